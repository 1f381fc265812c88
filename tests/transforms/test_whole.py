"""`reshard`, `eval_shape`, `from_module`, `assert_mesh_invariant`, `block_until_ready`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ptrainx as px
from ptrainx import P
from ptrainx.errors import SpecError, TreeError
from tests.compile.programs import assert_close, values

X = values(8, 8)


def mesh(**axes: int) -> px.Mesh:
    return px.make_mesh(axes or {"data": 2, "model": 2}, simulate=True)


MOVES = [P(), P("data"), P(None, "data"), P("data", "model"), P(("data", "model")), P("model", "data")]


@pytest.mark.parametrize("source", MOVES, ids=str)
def test_reshard_changes_placement_alone(source: P) -> None:
    on = mesh()
    for target in MOVES:
        inside = px.jit(lambda x, target=target: px.reshard(x * 1, target), mesh=on, in_specs=source)(X)
        outside = px.reshard(px.device_put(X, source, on), target)
        for moved in (inside, outside):
            assert px.spec_of(moved) == target
            assert_close(moved, X)


def test_reshard_takes_trees_and_pays() -> None:
    on = mesh()
    step = px.jit(
        lambda x: px.reshard({"a": x.sum(0), "b": (x, 1)}, {"a": None, "b": P()}), mesh=on, in_specs=P("data")
    )
    out = step(X)
    assert_close(out, {"a": X.sum(0), "b": (X, torch.tensor(1))})
    assert (px.spec_of(out["a"]), px.spec_of(out["b"][0])) == (P(), P())


RESHARD_ERRORS = {
    "axis": (lambda x: px.reshard(x, P("batch")), SpecError, "axis 'batch'"),
    "not owed": (lambda x: px.reshard(x, P(unreduced="data")), SpecError, "owes no sum"),
    "owed maximum": (lambda x: px.reshard(x.amax(0), P(unreduced="data")), SpecError, "owes no sum"),
    "tree": (lambda x: px.reshard({"a": x}, {"b": P()}), TreeError, "in the specs, not in the value"),
}


@pytest.mark.parametrize(("fn", "kind", "text"), RESHARD_ERRORS.values(), ids=RESHARD_ERRORS)
def test_reshards_that_do_not_fit(fn: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        px.jit(fn, mesh=mesh(), in_specs=P("data"))(X)


def test_eval_shape_allocates_nothing() -> None:
    huge = px.ShapeDtypeStruct((10**6, 10**6), torch.float32)
    out = px.eval_shape(lambda x, n: {"y": x @ x.t(), "n": n + 1, "k": (torch.zeros(10**12), 3, None)}, huge, 2)
    assert repr(out) == "{'y': f32[1000000,1000000], 'n': i64[], 'k': (f32[1000000000000], i64[], None)}"


def test_eval_shape_of_what_the_library_makes() -> None:
    def init(key: torch.Tensor) -> dict:
        a, b = px.random.split(key)
        return {"w": px.random.normal(a, (10**6, 10**6)), "b": px.random.uniform(b, (3,), dtype=torch.float64)}

    assert repr(px.eval_shape(init, px.random.key(0))) == "{'w': f32[1000000,1000000], 'b': f64[3]}"
    loss = lambda w, x: (x @ w).sum()  # noqa: E731
    big = px.ShapeDtypeStruct((10**5, 10**5), torch.bfloat16)
    assert repr(px.eval_shape(px.value_and_grad(loss), big, big)) == "(bf16[], bf16[100000,100000])"
    assert repr(px.eval_shape(px.jit(loss, mesh=mesh(), in_specs=P("data")), big, big)) == "bf16[]"
    step = px.accumulate_grads(px.value_and_grad(loss), 4)
    assert repr(px.eval_shape(step, big, big)) == "(bf16[], bf16[100000,100000])"
    shapes = px.eval_shape(lambda t: t, px.device_put({"x": X}, P("data"), mesh()))
    assert repr(shapes) == "{'x': f32[8,8]}"


class Tied(nn.Module):
    """An output layer that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens))


MODULES = {
    "linear": (lambda: nn.Linear(8, 4), (X,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), (X,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), (X,)),
    "batch norm, eval": (lambda: nn.BatchNorm1d(8).eval(), (X,)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)), (values(8, 2, 4, 4),)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (values(8, 4, 8),),
    ),
    "transformer, eval": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (values(8, 4, 8),)),
    "tied": (Tied, (torch.arange(16).reshape(8, 2) % 8,)),
    "recurrent": (lambda: nn.GRUCell(8, 4), (X,)),
}


@pytest.mark.parametrize(("make", "args"), MODULES.values(), ids=MODULES)
def test_a_module_as_a_function(make: Any, args: tuple) -> None:
    torch.manual_seed(0)
    module = make()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    apply, params, buffers = px.from_module(module)
    step = lambda p, b, *args: apply(p, b, *args)  # noqa: E731
    plain = step(params, buffers, *args)
    jitted = {
        axes["data"]: px.jit(step, mesh=mesh(**axes), in_specs=(P(), P(), P("data")))(params, buffers, *args)
        for axes in ({"data": 2, "model": 2}, {"data": 4, "model": 1})
    }
    assert all(v.equal(before[k]) for k, v in module.state_dict().items())
    want = module(*args)
    for out, after in (plain, *jitted.values()):
        assert_close(out, want.detach(), rtol=1e-4, atol=1e-5)
        flat = {px.tree.path_str(path).replace("/", "."): v for path, v in px.tree.flatten_with_path(after)[0]}
        assert_close(flat, dict(module.named_buffers()), rtol=1e-4, atol=1e-5)


def test_gradients_of_a_module() -> None:
    torch.manual_seed(0)
    module = Tied()
    apply, params, buffers = px.from_module(module)
    assert len(px.tree.leaves(params)) == 1
    tokens = torch.arange(16).reshape(8, 2) % 8
    loss = lambda p, tokens: apply(p, buffers, tokens)[0].square().mean()  # noqa: E731
    module(tokens).square().mean().backward()
    got = px.jit(px.grad(loss), mesh=mesh(), in_specs=(P(), P("data")))(params, tokens)
    assert_close(got, {"embed": {"weight": module.embed.weight.grad}})


def test_mesh_invariance_is_checked() -> None:
    meshes = [{"data": 2}, {"data": 4}]
    px.testing.assert_mesh_invariant(lambda x: (x @ x.t(), x.sum()), (X,), meshes, P("data"))
    px.testing.assert_mesh_invariant(lambda x: torch.complex(x, x).sum(), (X,), meshes, P("data"))
    from ptrainx.core.trace_context import current_trace

    def dependent(x: torch.Tensor) -> dict:
        return {"n": x.sum() + (0 if current_trace() is None else current_trace().mesh.size)}

    with pytest.raises(AssertionError, match=r"on Mesh\(data=2, simulated\) result\['n'\] differs by up to 2"):
        px.testing.assert_mesh_invariant(dependent, (X,), meshes, P("data"))


def test_block_until_ready_gives_the_tree_back() -> None:
    tree = {"a": px.device_put(X, P("data"), mesh()), "b": [torch.ones(2), None, 3]}
    assert px.block_until_ready(tree) is tree
