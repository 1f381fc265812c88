"""`assert_mesh_invariant` passes what is the same on every mesh, and names the line of a fault that is planted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import ptrainx as px
from ptrainx import P
from ptrainx.core.trace_context import current_trace, user_source
from tests.compile.programs import MLP, MLP_SPECS, X, mlp, sgd, values

FAULTS = torch.library.Library("ptrainx_faults", "DEF")


def operator(name: str, schema: str, compute: Any, *rows: Any) -> Any:
    """An operator with a sharding rule of its own, which may be wrong."""
    FAULTS.define(f"{name}{schema}")
    FAULTS.impl(name, compute, "CompositeExplicitAutograd")
    overload = getattr(torch.ops.ptrainx_faults, name).default
    px.ops.register_sharding(overload)(lambda *args: rows)
    return overload


# Rules that say what is not so: a sum along the split dim that the ranks could take alone; a sum of which nothing is
# owed; a square that could be taken of the addends.
RUNNING = operator("running", "(Tensor x) -> Tensor", lambda x: x.cumsum(0), (Shard(0), [Shard(0)]))
TOTAL = operator("total", "(Tensor x) -> Tensor", lambda x: x.sum(0), (Replicate(), [Shard(0)]))
SQUARE = operator("square", "(Tensor x) -> Tensor", lambda x: x * x, (Partial(), [Partial()]))


class Scaled(torch.autograd.Function):
    """A function whose gradient is wrong where there is a mesh."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        LINES["wrong gradient"] = LINES["wrong gradient in a step"] = here()
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (3 if current_trace() is None else 4)


def here() -> str:
    """The line of the caller's next line."""
    file, line = user_source(2).rsplit(":", 1)
    return f"{file}:{int(line) + 1}"


LINES: dict[str, str] = {}


def wrong_rule(params: dict, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ params["up"])
    LINES["wrong rule"] = here()
    h = RUNNING(h)
    return (h @ params["down"]).relu()


def wrong_partial(params: dict, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ params["up"])
    LINES["wrong partial"] = here()
    total = TOTAL(h)
    return total @ params["down"] + 1


def addends_squared(params: dict, x: torch.Tensor) -> torch.Tensor:
    h = x @ params["up"] @ params["down"]
    LINES["addends squared"] = here()
    h = SQUARE(h)
    return h + 1


def wrong_on_one_rank(params: dict, x: torch.Tensor) -> torch.Tensor:
    trace = current_trace()
    LINES["wrong on one rank"] = here()
    h = (x @ params["up"]) * (2 if trace is not None and trace.rank == 1 else 1)
    return h @ params["down"]


def wrong_gradient(params: dict, x: torch.Tensor) -> torch.Tensor:
    h = Scaled.apply(torch.tanh(x @ params["up"]))
    return h @ params["down"]


def wrong_gradient_in_a_step(params: dict, x: torch.Tensor) -> dict:
    grads = px.grad(lambda p: wrong_gradient(p, x).square().mean())(params)
    return px.tree.map(lambda p, g: p - 0.1 * g, params, grads)


ROWS = ({"up": P(), "bias": P(), "down": P()}, P("data"))
COLUMNS = ({"up": P(None, "data"), "bias": P("data"), "down": P("data")}, P())
FAULTY = {
    "wrong rule": (wrong_rule, ROWS, "running", 1, False, "up"),
    "wrong partial": (wrong_partial, ROWS, "total", 0, False, "up"),
    "addends squared": (addends_squared, COLUMNS, "square", None, False, "down"),
    "wrong on one rank": (wrong_on_one_rank, ROWS, "mul", 1, False, "up"),
    "wrong gradient": (wrong_gradient, ROWS, "mul", 0, True, None),
    "wrong gradient in a step": (wrong_gradient_in_a_step, ROWS, "mul", 0, True, None),
}


@pytest.mark.parametrize("name", FAULTY)
def test_the_first_operation_that_departs_is_named(name: str) -> None:
    fn, specs, operation, rank, backward, layer = FAULTY[name]
    differentiates = None if "gradient" in name else False  # the operators above have no gradient
    with pytest.raises(px.testing.InvarianceError) as caught:
        px.testing.assert_mesh_invariant(fn, (MLP, X), [{"data": 2}], specs, gradients=differentiates)
    found = caught.value.departure
    assert found is not None
    assert found.operation.split(".")[0] == operation
    assert found.source == LINES[name]
    assert (found.rank, found.backward) == (rank, backward)
    if layer is not None:
        assert found.layer.endswith(layer)
    assert LINES[name] in str(caught.value)
    assert f"rank {rank}" in str(caught.value) or rank is None


def test_a_sum_that_nobody_pays_is_named_where_it_is_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(params: dict, x: torch.Tensor) -> torch.Tensor:
        h = x @ params["up"] @ params["down"]
        LINES["dropped sum"] = here()
        h = torch.relu(h)
        return h * 2

    px.testing.assert_mesh_invariant(step, (MLP, X), [{"data": 2}], COLUMNS)
    monkeypatch.setattr(Partial, "_reduce_value", lambda self, tensor, mesh, dim: tensor)
    with pytest.raises(px.testing.InvarianceError) as caught:
        px.testing.assert_mesh_invariant(step, (MLP, X), [{"data": 2}], COLUMNS, gradients=False)
    found = caught.value.departure
    assert found is not None
    assert found.source in (
        LINES["dropped sum"],
        f"{LINES['dropped sum'].rsplit(':', 1)[0]}:{step.__code__.co_firstlineno + 1}",
    )


MESHES = [{"data": 2, "model": 1}, {"data": 2, "model": 2}, {"data": 1, "model": 4}]
RIGHT = {
    "layers": (mlp, (MLP, X), (MLP_SPECS, P("data"))),
    "a step that differentiates": (sgd, (MLP, X), (MLP_SPECS, P("data")), (MLP_SPECS, P())),
    "complex": (lambda x, y: torch.complex(x, y) * 2, (X, values(8, 8, seed=1)), P("data", "model")),
    "numbers, integers, no gradient": (lambda x, n: (x * n).argmax(1), (X, 3), (P("data"), None)),
    "written in place": (lambda x: (x * 2).mul_(x).relu_(), (X,), P("data", "model")),
    "a loop": (lambda w, x: px.scan(lambda h, w: (torch.tanh(h @ w), h.sum()), x, w), (values(3, 8, 8), X), P()),
    "several results": (lambda x: {"a": x.max(1), "b": list(x.split(4)), "n": 1}, (X,), P("data")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str) -> None:
    fn, args, *specs = RIGHT[name]
    px.testing.assert_mesh_invariant(fn, args, MESHES, *specs)


def test_an_argument_may_owe_a_sum() -> None:
    """Its addends differ, so that a rule which takes the square of each of them is told apart."""
    x = torch.arange(1.0, 7.0)
    meshes, owed = [{"data": 2}, {"data": 3}], P(unreduced=("data",))
    px.testing.assert_mesh_invariant(lambda x: x * x + x.tanh(), (x,), meshes, owed)
    with pytest.raises(px.testing.InvarianceError, match="differs"):
        px.testing.assert_mesh_invariant(lambda x: SQUARE(x), (x,), meshes, owed, gradients=False)


def test_another_structure_shape_or_dtype_departs() -> None:
    def one(here: Any, there: Any) -> Any:
        return lambda x: (here if current_trace() is None else there)(x)

    for there, text in (
        (lambda x: (x, x), "another structure"),
        (lambda x: x[:2], r"is f32\[2,8\], on one device f32\[8,8\]"),
        (lambda x: x.double(), r"is f64\[8,8\]"),
    ):
        with pytest.raises(AssertionError, match=text):
            px.testing.assert_mesh_invariant(one(lambda x: x, there), (X,), [{"data": 2}], gradients=False)
