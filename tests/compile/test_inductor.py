"""`backend="inductor"`: the plain functions' results, in the memory that was donated, with the same random bits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P
from ptrainx.compile.inductor import FallbackWarning
from ptrainx.ops.random.operator import HASH, RANDOM, SUBKEYS
from tests.compile.programs import PROGRAMS, assert_close, values
from tests.compile.test_reuse import CASES
from tests.support.pool import Pool

ROOT = Path(__file__).resolve().parents[2]


def compiled_of(step: Any) -> Any:
    """The only program of a jitted function."""
    (compiled,) = step._cache.values()
    return compiled


# Those whose regions differ in kind; `test_regions` cuts all programs.
COMPILED = (
    "mlp",
    "attention heads",
    "cross entropy",
    "training step",
    "training step, params sharded",
    "in place inside",
    "owed sums of two axes",
    "reductions",
    "norms",
    "dtypes",
    "zero size",
    "unknown to DTensor",
    "einsum",
)


@pytest.mark.parametrize("name", COMPILED)
def test_programs_on_a_simulated_mesh(name: str) -> None:
    row = PROGRAMS[name]
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    step = px.jit(row.fn, mesh=mesh, in_specs=row.in_specs, out_specs=row.out_specs, backend="inductor")
    want = row.fn(*row.args)
    assert_close(step(*row.args), want)
    assert_close(step(*row.args), want)  # The first call of a region differs from later ones.
    assert compiled_of(step).kernels().backend == "inductor"
    assert compiled_of(step).kernels().regions.failed == 0


@pytest.mark.parametrize("donate", [(), (0,)])
def test_memory_that_is_taken_over_never_changes_a_result(donate: tuple[int, ...]) -> None:
    def fn(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
        return {name: CASES[name](*pair) for name, pair in pairs.items()}

    pairs = {name: (values(4, 4, seed=i) + 1.5, values(4, 4, seed=i + 1) + 1.5) for i, name in enumerate(CASES)}
    want = fn(pairs)
    kept = px.tree.map(torch.clone, pairs)
    args = px.tree.map(torch.clone, pairs)
    step = px.jit(fn, mesh=px.make_mesh(data=1), donate_argnums=donate, backend="inductor")
    assert_close(step(args), want)
    if not donate:
        for before, after in zip(px.tree.leaves(kept), px.tree.leaves(args)):
            assert torch.equal(before, after)
    assert_close(step(px.tree.map(torch.clone, pairs)), want)


def adam(state: dict[str, torch.Tensor], grad: torch.Tensor) -> dict[str, torch.Tensor]:
    step = state["step"] + 1
    m = torch.lerp(state["m"], grad, 0.1)
    v = state["v"] * 0.99 + 0.01 * grad * grad
    update = (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
    return {"step": step, "m": m, "v": v, "p": state["p"] - 1e-2 * update}


def test_an_update_happens_where_the_parameters_are() -> None:
    parameter = torch.nn.Parameter(values(64, 64))
    reference = torch.optim.Adam([parameter], lr=1e-2, betas=(0.9, 0.99))
    mesh = px.make_mesh(data=1)
    zeros = torch.zeros(64, 64)
    state = {"step": torch.tensor(0), "m": zeros, "v": zeros.clone(), "p": parameter.detach().clone()}
    state = px.device_put(state, P(), mesh)
    step = px.jit(adam, mesh=mesh, donate_argnums=0, backend="inductor")
    for i in range(3):
        grad = values(64, 64, seed=i + 1)
        before = {name: state[name].to_local().data_ptr() for name in ("m", "v", "p")}
        state = step(state, grad)
        assert {name: state[name].to_local().data_ptr() for name in ("m", "v", "p")} == before
        parameter.grad = grad
        reference.step()
    assert_close(state["p"], parameter.detach())


DRAWS = {
    "bits": (0.0, 0.0),
    "uniform": (-2.0, 3.5),
    "uniform64": (-1.0, 5.0),
    "bernoulli": (0.3, 0.0),
    "normal": (0.0, 0.0),
    "truncated_normal": (-2.0, 1.5),
    "randint": (1000.0, 0.0),
    "dropout": (40000.0, 65536 / 40000),
}


# Shape, and the start and size of the part that is drawn; the second one starts beyond 32 bits.
PARTS = {"matrix": ((37, 129), (3, 5), (33, 101)), "far": ((3_000_000_000,), (2_999_999_000,), (1000,))}


def test_random_bits_are_those_of_the_eager_operators() -> None:
    def draw(key: torch.Tensor) -> dict[str, torch.Tensor]:
        keys = SUBKEYS(key, 5, len(DRAWS))
        out = {"hash": HASH(keys[1], torch.tensor([[1, -1], [2**40, 7]]))}
        for name, part in PARTS.items():
            for k, (dist, ab) in zip(keys, DRAWS.items()):
                out[f"{dist} of {name}"] = RANDOM(k, *part, dist, *ab)
        return out

    key = px.random.key(7)
    got = px.device_get(px.jit(draw, mesh=px.make_mesh(data=1), backend="inductor")(key))
    for name, want in draw(key).items():
        assert torch.equal(got[name], want), name


def block(p: dict[str, torch.Tensor], x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ p["qkv"]).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape) @ p["o"]
    h = F.gelu(F.rms_norm(x, (16,)) @ p["up"]) @ p["down"]
    return x + px.random.dropout(key, h, 0.25)


def gpt_loss(params: Any, tokens: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    def layer(x: torch.Tensor, p: Any) -> tuple[torch.Tensor, None]:
        weights, k = p
        return block(weights, x, k), None

    x = params["embed"][tokens[:, :-1]]
    x, _ = px.scan(layer, x, (params["layers"], px.random.split(key, 3)))
    logits = F.rms_norm(x, (16,)) @ params["embed"].t()
    return F.cross_entropy(logits.reshape(-1, 32), tokens[:, 1:].reshape(-1))


OPTIMIZER = px.optim.chain(px.optim.clip_by_global_norm(1.0), px.optim.adamw(1e-2))


def gpt_step(state: px.TrainState, tokens: torch.Tensor) -> tuple[px.TrainState, torch.Tensor]:
    key = px.random.fold_in(state.key, state.step)
    loss, grads = px.value_and_grad(lambda p: gpt_loss(p, tokens, key))(state.params)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    params = px.optim.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss


def gpt_state() -> px.TrainState:
    shapes = {"qkv": (3, 16, 48), "o": (3, 16, 16), "up": (3, 16, 64), "down": (3, 64, 16)}
    layers = {name: values(*shape, seed=i) * 0.4 for i, (name, shape) in enumerate(shapes.items())}
    params = {"embed": values(32, 16, seed=9), "layers": layers}
    return px.TrainState(step=0, params=params, opt_state=OPTIMIZER.init(params), key=px.random.key(3))


TOKENS = (torch.arange(8 * 9) * 7 % 31).view(8, 9)


def train(steps: int) -> list[float]:
    """Losses on two ranks; the layers' parameters and their optimizer state are sharded, and gathered in the loop."""
    mesh = px.make_mesh(data=2)
    state = gpt_state()
    specs = px.tree.map(lambda leaf: P(None, "data") if getattr(leaf, "ndim", 0) == 3 else P(), state)
    step = px.jit(
        gpt_step,
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=(specs, P()),
        donate_argnums=0,
        backend="inductor",
    )
    placed, losses = px.device_put(state, specs, mesh), []
    for _ in range(steps):
        placed, loss = step(placed, TOKENS)
        losses.append(float(loss))
    assert compiled_of(step).kernels().regions.failed == 0
    return losses


@pytest.mark.long
def test_two_ranks_train_as_one_device_does(pool: Pool) -> None:
    state, want = gpt_state(), []
    for _ in range(3):
        state, loss = gpt_step(state, TOKENS)
        want.append(float(loss))
    for got in pool.run(train, 2, 3, timeout=400.0):
        assert got == pytest.approx(want, rel=2e-5)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python with some variables set."""
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_a_compiler_the_graph_backend_runs_and_says_so(tmp_path: Path) -> None:
    code = """
    import torch, ptrainx as px
    step = px.jit(lambda x: (x * 2 + 1).sum(), mesh=px.make_mesh(data=1), backend="inductor")
    print(float(step(torch.ones(4))), float(step(torch.ones(8))))
    """
    done = run_python(code, PATH=str(tmp_path), CXX=str(tmp_path / "g++"), PTRAINX_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12.0", "24.0"]
    assert done.stderr.count("FallbackWarning") == 1, done.stderr
    assert "no C++ compiler" in done.stderr
    assert "g++" in done.stderr


def test_what_inductor_refuses_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from ptrainx.core import torch_compat_inductor

    def refuse(*args: Any) -> Any:
        raise NotImplementedError("not this one")

    monkeypatch.setattr(torch_compat_inductor, "compile_graph", refuse)
    step = px.jit(lambda x: (x * 0.123 + 4.56).tanh(), mesh=px.make_mesh(data=1), backend="inductor")
    with pytest.warns(FallbackWarning, match="not this one"):
        got = step(torch.ones(3, 5))
    assert_close(got, (torch.ones(3, 5) * 0.123 + 4.56).tanh())
