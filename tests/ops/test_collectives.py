"""The named collectives: values, gradients, what they send, on simulated and real ranks, over one axis and several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from tests.ops.collectives import COLLECTIVES, linear_sum, ring

MESHES: tuple[tuple[dict[str, int], Any], ...] = (
    ({"data": 2}, "data"),
    ({"data": 4}, "data"),
    ({"data": 2, "model": 2}, "model"),
    ({"data": 2, "model": 2}, ("data", "model")),
    ({"data": 2, "model": 2}, ("model", "data")),
)
CASES = [pytest.param(shape, axes, id=f"{'x'.join(map(str, shape.values()))} {axes}") for shape, axes in MESHES]


def _axes(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


def _value(n: int) -> torch.Tensor:
    """[n * n, 2n] in float64, no two elements alike."""
    count = 2 * n * n * n
    return torch.frac(torch.arange(1, count + 1, dtype=torch.float64) * 0.754877666).sub(0.5).view(n * n, 2 * n)


SOME = ("psum", "psum_scatter tiled 1", "ppermute shift", "the whole, used again")


def _step(axes: Any, mesh_axes: tuple[str, ...], names: Any = tuple(COLLECTIVES)) -> Any:
    """x -> (each row's result joined along the axes, gradient of their weighted sum), over the whole table.

    A dim is split in mesh order, so for axes in another order the ranks' values are permuted within.
    """
    order = tuple(axis for axis in mesh_axes if axis in _axes(axes))
    spec = P(order)

    def one(row: Any) -> Any:
        mapped = px.shard_map(lambda x: row.body(x, axes)[None], in_specs=spec, out_specs=spec)

        def loss(x: torch.Tensor) -> Any:
            out = mapped(x)
            weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
            return (out * weights).sum(), out

        return lambda x: px.grad(loss, has_aux=True)(x)

    return lambda x: {name: one(COLLECTIVES[name])(x) for name in names}


def _expected(x: torch.Tensor, n: int, transposed: bool) -> dict[str, Any]:
    """By the global meaning of each row, on one device."""

    def one(row: Any) -> Any:
        leaf = x.clone().requires_grad_()
        shards = list(leaf.chunk(n))
        places = [0, 2, 1, 3] if transposed else list(range(n))
        outs = row.whole([shards[p] for p in places])
        outs = [outs[places.index(p)] for p in range(n)]
        (gradient,) = torch.autograd.grad(linear_sum(outs), leaf)
        return gradient, torch.stack(outs).detach()

    return {name: one(row) for name, row in COLLECTIVES.items()}


def _check(got: Any, want: Any) -> None:
    got = px.device_get(got)
    for name in got:
        for what, a, b in zip(("gradient", "value"), got[name], want[name]):
            torch.testing.assert_close(a, b, msg=lambda text, at=(name, what): f"{at}: {text}")


@pytest.mark.parametrize(("shape", "axes"), CASES)
def test_values_and_gradients_are_those_of_the_global_meaning(shape: Any, axes: Any) -> None:
    mesh = px.make_mesh(shape, simulate=True)
    n = 2 if axes in ("model", "data") and shape.get("data") == 2 else 4
    want = _expected(_value(n), n, axes == ("model", "data"))
    # The whole table over one axis and over both; enough of it to tell the ranks apart over the others.
    names = tuple(COLLECTIVES) if shape == {"data": 2} or axes == ("data", "model") else SOME
    _check(px.jit(_step(axes, mesh.axis_names, names), mesh=mesh)(_value(n)), want)
    if shape == {"data": 2} or axes == ("model", "data"):
        _check(px.jit(_step(axes, mesh.axis_names, SOME), mesh=mesh, backend="eager")(_value(n)), want)


@pytest.mark.long
def test_inductor_and_every_pass_keep_the_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTRAINX_CHECK_PASSES", "1")
    mesh = px.make_mesh(data=2, simulate=True)
    step = px.jit(_step("data", mesh.axis_names, SOME), mesh=mesh, backend="inductor")
    _check(step(_value(2)), _expected(_value(2), 2, False))


def _on_real_ranks(shape: dict[str, int], axes: Any, shared: str) -> Any:
    import os

    os.environ["PTRAINX_SHARED_MEMORY"] = shared
    mesh = px.make_mesh(shape)
    n = 1
    for axis in _axes(axes):
        n *= mesh.shape[axis]
    results = [px.jit(_step(axes, mesh.axis_names), mesh=mesh)(_value(n))]
    if n == 4:
        results.append(px.jit(_step(axes, mesh.axis_names, SOME), mesh=mesh, backend="eager")(_value(n)))
    return [px.device_get(r) for r in results]


@pytest.mark.parametrize(
    ("world", "shape", "axes", "shared"),
    [
        (2, {"data": 2}, "data", "1"),
        (2, {"data": 2}, "data", "0"),
        (4, {"data": 2, "model": 2}, ("data", "model"), "1"),
    ],
)
def test_real_processes_agree(pool: Any, world: int, shape: Any, axes: Any, shared: str) -> None:
    n = 4 if isinstance(axes, tuple) else 2
    want = _expected(_value(n), n, False)
    for rank in pool.run(_on_real_ranks, world, shape, axes, shared):
        for result in rank:
            _check(result, want)


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    mesh, x, row = px.make_mesh(data=2, simulate=True), _value(2), COLLECTIVES[name]
    mapped = px.shard_map(lambda x: row.body(x, "data")[None], in_specs=P("data"), out_specs=P("data"))
    loss = px.jit(lambda x: mapped(x).square().sum(), mesh=mesh)
    gradient = px.jit(px.grad(lambda x: mapped(x).square().sum()), mesh=mesh)(x)
    along = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    slope = (loss(x + 1e-5 * along) - loss(x - 1e-5 * along)) / 2e-5
    torch.testing.assert_close((px.device_get(gradient) * along).sum(), slope, rtol=1e-7, atol=1e-8)


def test_comms_tell_kind_axis_and_line() -> None:
    mesh = px.make_mesh(data=4, simulate=True)
    for name, row in COLLECTIVES.items():
        mapped = px.shard_map(lambda x, row=row: row.body(x, "data")[None], in_specs=P("data"), out_specs=P("data"))
        rows = px.jit(mapped, mesh=mesh).comms(px.device_put(_value(4), P("data"), mesh))
        assert tuple(c.kind for c in rows) == row.kinds, name
        for c in rows:
            assert (c.axis, c.asked, c.phase) == ("data", True, "forward"), name
            assert c.source.split(":")[0].endswith("collectives.py"), name
            assert c.reason.startswith("px."), name


def test_bytes_are_those_of_the_docstrings() -> None:
    mesh, x = px.make_mesh(data=4, simulate=True), torch.zeros(16, 4)
    one = 4 * 4 * 4  # bytes of a rank's rows
    wanted = {
        "psum": 2 * one * 3 // 4,
        "all_gather": 3 * one,
        "psum_scatter": one * 3 // 4,
        "all_to_all tiled 0 1": one * 3 // 4,
        "ppermute ring": one,
    }
    for name, sent in wanted.items():
        body = COLLECTIVES[name].body
        mapped = px.shard_map(lambda x, body=body: body(x, "data")[None], in_specs=P("data"), out_specs=P("data"))
        assert px.jit(mapped, mesh=mesh).comms(px.device_put(x, P("data"), mesh)).total_bytes == sent, name


def test_trees_and_whole_numbers() -> None:
    mesh = px.make_mesh(data=2, simulate=True)
    mapped = px.shard_map(lambda t: px.psum(t, "data"), mesh=mesh, in_specs=P(), out_specs=P())
    got = px.device_get(mapped({"a": [torch.ones(2), 3], "b": torch.tensor(2)}))
    assert px.tree.map(lambda v: v.tolist(), got) == {"a": [[2.0, 2.0], 6], "b": 4}


def test_a_place_is_that_of_each_rank_in_any_order_of_axes() -> None:
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    both = P(("data", "model"))
    for axes, want in ((("data", "model"), [0, 1, 2, 3]), (("model", "data"), [0, 2, 1, 3]), ("model", [0, 1, 0, 1])):
        mapped = px.shard_map(lambda axes=axes: px.axis_index(axes)[None], mesh=mesh, in_specs=(), out_specs=both)
        assert px.device_get(mapped()).tolist() == want


def test_places_do_not_merge_with_numbers_on_one_rank() -> None:
    # On rank 0 a place is 0: a pass that took it for the number would leave rank 1 alone in a collective.
    mesh = px.make_mesh(data=2, simulate=True)

    def body(x: torch.Tensor) -> torch.Tensor:
        place = px.axis_index("data") * torch.ones(2, dtype=torch.int64)
        return px.psum(place, "data") + px.psum(
            px.pcast(0 * torch.ones(2, dtype=torch.int64), "data", to="varying"), "data"
        )

    mapped = px.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P())
    assert px.device_get(mapped(torch.zeros(2))).tolist() == [1, 1]


def test_ring_of_one_is_the_value() -> None:
    mesh = px.make_mesh(data=1, simulate=True)
    mapped = px.shard_map(lambda x: px.ppermute(x, "data", ring(1)), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert px.device_get(mapped(torch.arange(3))).tolist() == [0, 1, 2]
