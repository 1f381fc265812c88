"""`shard_map`: against the program of global values, inside other transforms, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.errors import GradientError, InputError, MeshError, MutationError, PtrainxError, SpecError, TraceError

MESH = px.make_mesh(data=2, model=2, simulate=True)
X = torch.frac(torch.arange(1, 33, dtype=torch.float64) * 0.754877666).sub(0.5).view(8, 4)
W = torch.frac(torch.arange(1, 17, dtype=torch.float64) * 0.569840291).sub(0.5).view(4, 4)


def layer(c: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(c @ w)


def whole_loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = layer(x, w)
    return x.square().sum()


def scanned(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return px.scan(lambda c, _: (layer(c, w), None), x, length=3)[0].square().sum()


def rematerialized(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = px.remat(layer)(x, w)
    return x.square().sum()


def mapped(fn: Callable, in_specs: Any = (P(), P("data")), out_specs: Any = P(), **options: Any) -> Any:
    return px.shard_map(fn, in_specs=in_specs, out_specs=out_specs, **options)


def summed(fn: Callable) -> Any:
    return mapped(lambda w, x: px.psum(fn(w, x), "data"))


def in_scan(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    one = mapped(lambda w, c: torch.tanh(px.psum(c @ w, "model")), (P("model"), P("data", "model")), P("data"))
    return px.scan(lambda c, _: (one(w, c), None), x, length=3)[0].square().sum()


def closing_over(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    one = mapped(lambda c: layer(c, w), (P("data"),), P("data"))
    return px.scan(lambda c, _: (one(c), None), x, length=3)[0].square().sum()


def accumulated(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return px.accumulate_grads(px.grad(whole_loss), 2)(w, x) * 2


GRADIENTS: dict[str, Any] = {
    "around it": px.grad(summed(whole_loss)),
    "inside it": mapped(px.grad(whole_loss)),
    "of a scan, around it": px.grad(summed(scanned)),
    "of a scan, inside it": mapped(px.grad(scanned)),
    "of a remat": px.grad(summed(rematerialized)),
    "in a scan's body": px.grad(in_scan),
    "closing over a value, in a scan's body": px.grad(closing_over),
    "accumulated inside": mapped(accumulated),
    "unchecked, around it": px.grad(mapped(lambda w, x: px.psum(whole_loss(w, x), "data"), check=False)),
    "unchecked, summed by hand": mapped(lambda w, x: px.psum(px.grad(whole_loss)(w, x), "data"), check=False),
    "each rank's own, summed by hand": mapped(
        lambda w, x: px.psum(px.grad(whole_loss)(px.pcast(w, "data", to="varying"), x), "data")
    ),
    "left unreduced": mapped(
        lambda w, x: px.grad(whole_loss)(px.pcast(w, "data", to="varying"), x), out_specs=P(unreduced=("data",))
    ),
}


@pytest.mark.parametrize("name", sorted(GRADIENTS))
def test_gradients_are_those_of_the_global_program(name: str) -> None:
    want = px.grad(whole_loss)(W, X)
    step = px.jit(lambda w, x: px.reshard(GRADIENTS[name](w, x), P()), mesh=MESH)
    torch.testing.assert_close(px.device_get(step(W, X)), want)


def test_eager_gives_the_same() -> None:
    step = px.jit(
        lambda w, x: [GRADIENTS[n](w, x) for n in ("of a scan, around it", "in a scan's body")],
        mesh=MESH,
        backend="eager",
    )
    for got in px.device_get(step(W, X)):
        torch.testing.assert_close(got, px.grad(whole_loss)(W, X))


def test_second_derivatives() -> None:
    def slope(loss: Callable) -> Callable:
        return px.grad(lambda w: px.grad(loss)(w, X).square().sum())

    got = px.jit(slope(summed(whole_loss)), mesh=MESH)(W)
    torch.testing.assert_close(px.device_get(got), slope(whole_loss)(W))


def test_outside_of_a_jit_it_runs_differentiates_and_tells_shapes() -> None:
    fn = px.shard_map(
        lambda w, x: px.psum(whole_loss(w, x), "data"), mesh=MESH, in_specs=(P(), P("data")), out_specs=P()
    )
    torch.testing.assert_close(fn(W, X), whole_loss(W, X))
    torch.testing.assert_close(px.grad(fn)(W, X), px.grad(whole_loss)(W, X))
    placed = px.device_put(X, P("data"), MESH)
    gradient = px.grad(fn, argnums=1)(W, placed)
    assert px.spec_of(gradient) == P("data")
    torch.testing.assert_close(px.device_get(gradient), px.grad(whole_loss, argnums=1)(W, X))
    assert str(px.eval_shape(fn, W, X)) == "f64[]"


def test_a_carry_that_starts_alike_may_come_to_vary() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        total, _ = px.scan(lambda c, row: (c + row, None), torch.zeros(4, dtype=x.dtype), x)
        return px.psum(total, "data")

    fn = mapped(body, P("data"))
    torch.testing.assert_close(px.device_get(px.jit(fn, mesh=MESH)(X)), X.sum(0))
    gradient = px.jit(px.grad(lambda x: fn(x).square().sum()), mesh=MESH)(X)
    torch.testing.assert_close(px.device_get(gradient), (2 * X.sum(0)).expand(8, 4))


def test_draws_are_alike_until_the_key_is_not() -> None:
    def body(key: torch.Tensor) -> Any:
        own = px.random.fold_in(key, px.axis_index("data"))
        return px.random.normal(key, (2,)), px.random.normal(own, (2,))

    key = px.random.key(0)
    alike, own = px.device_get(px.jit(mapped(body, P(), (P(), P("data"))), mesh=MESH)(key))
    assert torch.equal(alike, px.random.normal(key, (2,)))
    want = [px.random.normal(px.random.fold_in(key, i), (2,)) for i in range(2)]
    assert torch.equal(own, torch.cat(want))


def test_an_abstract_mesh_is_enough_to_plan() -> None:
    step = px.jit(mapped(lambda x: px.psum(x, "data"), P("data")), mesh=px.AbstractMesh(data=64))
    (row,) = step.lower(px.ShapeDtypeStruct((64, 8), torch.float32)).comms()
    assert (row.kind, row.axis, row.asked) == ("all_reduce", "data", True)


def test_sums_that_are_owed_can_be_added_scaled_and_moved() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        owed = px.pcast(x, "data", to="unreduced")
        return px.psum((owed + owed)[:, :2].T * w.sum() / 2 - owed.T[:2], "data")

    want = X.view(2, 4, 4).sum(0)
    want = want[:, :2].T * W.sum() - want.T[:2]
    torch.testing.assert_close(px.device_get(px.jit(mapped(body, (P("data"), P())), mesh=MESH)(X, W)), want)


def _written(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def loss(w: torch.Tensor) -> torch.Tensor:
        y = w * 1
        y += x[:4]
        return y.sum()

    return px.grad(loss)(w)


def _sharded_closure(x: torch.Tensor) -> torch.Tensor:
    other = px.reshard(x * 2, P("data"))
    return mapped(lambda x: x + other, P("data"), P("data"))(x)


REFUSED: dict[str, tuple[Any, type[PtrainxError], str]] = {
    "varying, said to be the same": (
        mapped(lambda x: {"a": [x]}, P("data")),
        SpecError,
        r"result\['a'\]\[0\]: P\(\) says that the value is the same along 'data', but it varies[\s\S]*"
        r"at: .*test_shard_map.py[\s\S]*fix: .*px.psum\(x, 'data'\)[\s\S]*P\('data', None\)",
    ),
    "owed, said to be the same": (
        mapped(lambda x: px.pcast(x, "data", to="unreduced"), P("data")),
        SpecError,
        "but it is a sum that is still owed",
    ),
    "owed, joined": (
        mapped(lambda x: px.pcast(x, "data", to="unreduced"), P("data"), P("data")),
        SpecError,
        "an addend of a sum that is owed",
    ),
    "the same, said to be owed": (mapped(lambda x: x, P(), P(unreduced=("data",))), SpecError, "owes no sum"),
    "a scalar of each rank": (mapped(lambda x: x.sum(), P("data"), P("data")), SpecError, r"x\[None\]"),
    "no out_spec": (mapped(lambda x: x, P(), None), SpecError, "has no spec"),
    "not linear in an owed sum": (
        mapped(lambda x: px.psum(px.pcast(x, "data", to="unreduced").exp(), "data"), P("data")),
        SpecError,
        r"exp of a sum that is still owed along 'data'[\s\S]*px.psum",
    ),
    "a number added to an owed sum": (
        mapped(lambda x: px.psum(px.pcast(x, "data", to="unreduced") + 1, "data"), P("data")),
        SpecError,
        "add",
    ),
    "a gather of an owed sum": (
        mapped(lambda x: px.all_gather(px.pcast(x, "data", to="unreduced"), "data"), P("data")),
        SpecError,
        "px.all_gather of a sum that is still owed",
    ),
    "uneven": (lambda x: mapped(lambda x: x, P("data"), P("data"))(x[:3]), SpecError, "not divisible by data=2"),
    "an unknown axis": (mapped(lambda x: px.psum(x, "expert"), P()), MeshError, "'expert'"),
    "an axis twice": (mapped(lambda x: px.psum(x, ("data", "data")), P()), MeshError, "does not name axes"),
    "no permutation": (mapped(lambda x: px.ppermute(x, "data", [(0, 1), (1, 1)]), P()), InputError, "destination 1"),
    "a place too far": (mapped(lambda x: px.ppermute(x, "data", [(0, 2)]), P()), InputError, "from 0 to 1"),
    "a dim that does not divide": (
        mapped(lambda x: px.psum_scatter(x[:3], "data", tiled=True), P()),
        SpecError,
        "scatter_dimension=0 has size 3",
    ),
    "no such dim": (mapped(lambda x: px.all_to_all(x, "data", 2, 0), P()), InputError, "split_axis=2"),
    "booleans": (mapped(lambda x: px.psum(x > 0, "data"), P()), InputError, "booleans"),
    "an unknown cast": (mapped(lambda x: px.pcast(x, "data", to="replicated"), P()), InputError, "'unreduced'"),
    "a sharded value from around": (_sharded_closure, TraceError, "not replicated"),
    "nested": (mapped(lambda x: mapped(lambda x: x, P(), P())(x), P()), TraceError, "shard_mapped itself"),
    "reshard inside": (mapped(lambda x: px.reshard(x, P("data")), P()), TraceError, "px.reshard inside"),
    "outside": (lambda x: px.psum(x, "data"), TraceError, "outside of px.shard_map"),
    "vmap": (mapped(lambda x: torch.vmap(lambda r: r * 2)(x), P()), TraceError, "torch.vmap"),
    "a collective in vmap": (
        mapped(lambda x: torch.vmap(lambda r: px.psum(r, "data"))(x), P()),
        TraceError,
        "px.psum is called inside torch.vmap",
    ),
    "an argument written": (mapped(lambda x: x.add_(1), P()), MutationError, "in place"),
    "a value of the step written": (
        lambda x: mapped(lambda y: y.add_(1), P())(x * 2),
        MutationError,
        "argument 0 of <lambda>",
    ),
    "a read": (mapped(lambda x: x.sum().item(), P()), TraceError, "host"),
    "arguments without specs": (mapped(lambda x, y: x, (P(), P())), PtrainxError, "in_specs for 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals(name: str) -> None:
    fn, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        px.jit(fn, mesh=MESH)(X)


def test_a_varying_value_is_not_written_into_a_differentiated_one_that_does_not_vary() -> None:
    with pytest.raises(MutationError, match=r"x = x \+ y"):
        px.jit(mapped(_written), mesh=MESH)(W, X)


def test_outside_of_everything_a_collective_is_refused() -> None:
    with pytest.raises(TraceError, match=r"outside of px\.shard_map"):
        px.psum(X, "data")


def test_all_results_that_do_not_fit_are_told_at_once() -> None:
    with pytest.raises(SpecError, match=r"result\['a'\][\s\S]*result\['b'\]"):
        px.jit(mapped(lambda x: {"a": x, "b": x * 2}, P("data")), mesh=MESH)(X)


def test_an_autograd_function_that_forgets_the_sum_is_refused() -> None:
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Any, x: Any) -> Any:
            ctx.x = x
            return w * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.x, None

    with pytest.raises(GradientError, match="varies along it"):
        px.jit(px.grad(summed(lambda w, x: Times.apply(w, x[:4]).sum())), mesh=MESH)(W, X)
