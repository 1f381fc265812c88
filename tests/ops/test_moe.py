"""Mixtures of experts: against a loop over tokens on one device, which knows nothing of buffers or meshes.

B batch, L length, D width, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P
from ptrainx.errors import InputError, MeshError, PtrainxError, SpecError
from tests.compile.programs import values

B, L, D, E = 4, 8, 6, 8
X = values(B, L, D, dtype=torch.float64) * 3
ROUTER = values(D, E, seed=1, dtype=torch.float64) * 3
PARAMS = {
    "up": values(E, D, 10, seed=2, dtype=torch.float64),
    "down": values(E, 10, D, seed=3, dtype=torch.float64),
}


def experts(params: Any, x: Any) -> Any:
    return (x @ params["up"]).relu() @ params["down"]


def sorted_experts(params: Any, x: Any, sizes: Any) -> Any:
    hidden = px.ops.grouped_matmul(x, params["up"], sizes).relu()
    return px.ops.grouped_matmul(hidden, params["down"], sizes)


def by_hand(params: Any, x: Any, logits: Any, k: int, factor: float, groups: int, normalize: bool = True) -> Any:
    """Token by token: first choices first, as long as there is room."""
    size = B * L // groups
    room = math.ceil(k * size / E * factor)
    probabilities = logits.softmax(-1)
    weights, chosen = (t.reshape(groups, size, k) for t in probabilities.topk(k, -1))
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    tokens, rows, dropped = x.reshape(groups, size, D), [], 0
    for g in range(groups):
        taken, out = [0] * E, [torch.zeros(D, dtype=x.dtype)] * size
        for j, t in ((j, t) for j in range(k) for t in range(size)):
            e = int(chosen[g, t, j])
            if taken[e] == room:
                dropped += 1
                continue
            taken[e] += 1
            out[t] = out[t] + weights[g, t, j] * experts({n: p[e] for n, p in params.items()}, tokens[g, t])
        rows.append(torch.stack(out))
    share = F.one_hot(chosen, E).to(x.dtype).mean((0, 1, 2))
    balance = E * (share * probabilities.mean((0, 1))).sum()
    y = torch.stack(rows).reshape(B, L, D)
    return y, (balance, logits.logsumexp(-1).square().mean(), torch.tensor(dropped / (B * L * k), dtype=x.dtype))


LAYERS: dict[str, tuple[Callable, Callable]] = {
    "capacity, groups are rows": (
        lambda p, x, r: px.ops.moe(experts, p, x, r, k=2, capacity_factor=0.75),
        lambda p, x, r: by_hand(p, x, r, 2, 0.75, B),
    ),
    "capacity, smaller groups, one choice": (
        lambda p, x, r: px.ops.moe(experts, p, x, r, k=1, capacity_factor=1.0, groups=8, normalize=False),
        lambda p, x, r: by_hand(p, x, r, 1, 1.0, 8, normalize=False),
    ),
    "dropless": (
        lambda p, x, r: px.ops.dropless_moe(sorted_experts, p, x, r, k=3),
        lambda p, x, r: by_hand(p, x, r, 3, float(E), B),
    ),
}


def with_gradients(layer: Callable, params: Any, router: Any, x: Any) -> Any:
    """Gradients by all of them of a loss with both balancing losses in it; the layer's result and what it tells."""

    def loss(params: Any, router: Any, x: Any) -> Any:
        y, aux = layer(params, x, x @ router)
        return y.square().sum() + 3 * aux[0] + 0.1 * aux[1], (y, tuple(aux))

    return px.grad(loss, argnums=(0, 1, 2), has_aux=True)(params, router, x)


def run(mesh: Any, names: Any, dtype: torch.dtype = torch.float64) -> Any:
    step = px.jit(
        lambda *args: {name: with_gradients(LAYERS[name][0], *args) for name in names},
        mesh=mesh,
        in_specs=(P("expert"), P(), P(mesh.axis_names)),
        out_specs=P(),
    )
    return px.device_get(step(*px.tree.map(lambda t: t.to(dtype), (PARAMS, ROUTER, X))))


def check(found: Any, **tolerances: float) -> None:
    for name, got in found.items():
        want = with_gradients(LAYERS[name][1], PARAMS, ROUTER, X)
        for (path, a), b in zip(px.tree.flatten_with_path(got)[0], px.tree.leaves(want)):
            torch.testing.assert_close(a.double(), b, msg=lambda text, at=(name, path): f"{at}: {text}", **tolerances)


def test_on_one_device() -> None:
    got = {name: with_gradients(layer, PARAMS, ROUTER, X) for name, (layer, _) in LAYERS.items()}
    dropped = {name: float(found[1][1][2]) for name, found in got.items()}
    assert 0 < dropped["capacity, groups are rows"] < 0.5
    assert dropped["dropless"] == 0
    check(got)


@pytest.mark.parametrize("axes", [{"expert": 2}, {"expert": 4}, {"data": 2, "expert": 2}], ids=str)
def test_on_meshes(axes: dict[str, int]) -> None:
    kind = "smaller groups, one choice" if axes == {"expert": 2} else "groups are rows"
    check(run(px.make_mesh(axes, simulate=True), (f"capacity, {kind}", "dropless")))


def on_real_ranks() -> Any:
    return run(px.make_mesh(expert=2), ("capacity, groups are rows", "dropless"), torch.float32)


def test_in_processes(pool: Any) -> None:
    for found in pool.run(on_real_ranks, 2):
        check(found, rtol=1e-4, atol=1e-4)


def test_experts_that_are_split_themselves_and_what_is_sent() -> None:
    """Along "model" each rank has a part of every expert, and sums."""

    def split(params: Any, x: Any) -> Any:
        return px.psum(experts(params, x), "model")

    def layer(params: Any, x: Any, logits: Any) -> Any:
        return px.ops.moe(split, params, x, logits, k=2, capacity_factor=0.75)[0]

    specs = {"up": P("expert", None, "model"), "down": P("expert", "model")}
    mesh = px.make_mesh(expert=2, model=2, simulate=True)
    step = px.jit(layer, mesh=mesh, in_specs=(specs, P("expert"), P("expert")), out_specs=P("expert"))
    logits = X @ ROUTER
    torch.testing.assert_close(px.device_get(step(PARAMS, X, logits)), by_hand(PARAMS, X, logits, 2, 0.75, B)[0])
    rows = step.comms(PARAMS, X, logits)
    sent = [((c.kind, c.axis), c.count) for c in rows]
    totals = {key: sum(count for k, count in sent if k == key) for key, _ in sent}
    assert totals == {("all_to_all", "expert"): 2, ("all_reduce", "model"): 1}
    assert all(c.asked for c in rows)
    unsummed = px.jit(
        lambda p, x, r: px.ops.moe(experts, p, x, r), mesh=mesh, in_specs=(specs, P("expert"), P("expert"))
    )
    with pytest.raises(SpecError, match=r"px.psum\(x, 'model'\)"):
        unsummed.trace(PARAMS, X, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_products_and_their_gradients(dtype: torch.dtype) -> None:
    x, w, sizes = values(12, 4, dtype=dtype), values(3, 4, 8, seed=1, dtype=dtype), torch.tensor([5, 0, 4])
    along = values(12, 8, seed=2, dtype=dtype)
    parts = lambda x, w: torch.cat([x[:5] @ w[0], x[5:9] @ w[2], torch.zeros(3, 8, dtype=dtype)])  # noqa: E731
    torch.testing.assert_close(px.ops.grouped_matmul(x, w, sizes), parts(x, w))
    got = px.grad(lambda x, w: (px.ops.grouped_matmul(x, w, sizes) * along).sum(), argnums=(0, 1))(x, w)
    torch.testing.assert_close(got, px.grad(lambda x, w: (parts(x, w) * along).sum(), argnums=(0, 1))(x, w))


def test_the_losses_say_how_even_the_choices_are() -> None:
    """Closed forms: 1 where all experts are alike, nearly E where one takes everything."""
    identity = lambda params, x: x * params[:, None, None]  # noqa: E731
    ones, x = torch.ones(E), torch.zeros(1, E, 2)
    even = px.ops.moe(identity, ones, x, torch.eye(E)[None] * 1e-3, k=1)[1]
    one = px.ops.moe(identity, ones, x, torch.eye(E)[:1].expand(1, E, E) * 50, k=1)[1]
    assert float(even.load_balancing_loss) == pytest.approx(1, abs=1e-3)
    assert float(even.router_z_loss) == pytest.approx(math.log(E) ** 2, rel=1e-3)
    assert float(even.dropped) == 0
    assert float(one.load_balancing_loss) == pytest.approx(E)
    assert float(one.dropped) == pytest.approx(1 - 2 / E)  # ceil(8 / 8 * 1.25) = 2 places


def test_jitter_is_the_same_on_every_mesh() -> None:
    key, x = px.random.key(3), values(8, 4)
    want = px.ops.router_jitter(key, x, 0.1)
    assert 0 < (want / x - 1).abs().max() <= 0.1 + 1e-6
    mesh = px.make_mesh(data=2, simulate=True)
    got = px.jit(lambda key, x: px.ops.router_jitter(key, x, 0.1), mesh=mesh, in_specs=(P(), P("data")))(key, x)
    assert torch.equal(px.device_get(got), want)


def call(n: int | None = None, axes: Any = None, **changes: Any) -> None:
    x, logits, params = changes.pop("x", X), changes.pop("logits", X @ ROUTER), changes.pop("params", PARAMS)
    layer = lambda x, logits, params: px.ops.moe(experts, params, x, logits, **changes)  # noqa: E731
    if n is None and axes is None:
        layer(x, logits, params)
    else:
        px.jit(layer, mesh=px.AbstractMesh(axes or {"expert": n})).trace(x, logits, params)


REFUSED: dict[str, tuple[dict[str, Any], type[PtrainxError], str]] = {
    "experts on ranks": ({"n": 3}, SpecError, "8 experts can't be divided over 3 ranks"),
    "too many choices": ({"k": 9}, InputError, "k=9, of 8 experts"),
    "no room": ({"capacity_factor": 0.0}, InputError, "leaves experts no room"),
    "no such axis": ({"axes": {"data": 2}}, MeshError, "no axis 'expert'"),
    "groups": ({"groups": 5}, InputError, "groups=5 does not divide 4 x 8 tokens"),
    "groups on ranks": ({"n": 8}, SpecError, "pass groups=8 (which makes groups of 4 tokens)"),
    "parameters": ({"params": PARAMS["up"][:3]}, InputError, "params is f64[3,6,10], and not of 8 experts"),
    "several": ({"x": X[:2], "k": 0}, InputError, "batch and length differ\n    k=0, of 8 experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, error, text = REFUSED[name]
    with pytest.raises(error) as raised:
        call(**changes)
    assert text in str(raised.value)
