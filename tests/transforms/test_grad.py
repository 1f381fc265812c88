"""Gradients, against torch.autograd on one device and closed forms; their placements and what they send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P
from ptrainx.errors import GradientError
from tests.compile.programs import MLP, MLP_SPECS, assert_close, attention, mlp, values

X = values(8, 8)
BATCH, QKV = values(4, 4, 16), values(16, 48)


def mesh(**axes: int) -> px.Mesh:
    return px.make_mesh(axes or {"data": 2, "model": 2}, simulate=True)


def autograd(fn: Any, *args: Any) -> Any:
    """torch's own answer: (value, gradient of the first argument)."""
    leaves, treedef = px.tree.flatten(args[0])
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    value = fn(px.tree.unflatten(treedef, leaves), *args[1:])
    grads = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None] * len(leaves)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves)]
    return value.detach(), px.tree.unflatten(treedef, grads)


TABLE = {
    "mlp": (lambda p, x: mlp(p, x).square().mean(), (MLP, X), (MLP_SPECS, P("data"))),
    "cross entropy": (lambda w, x: F.cross_entropy(x @ w, torch.arange(8) % 5), (X, X), (P(), P("data"))),
    "attention": (lambda w, x: attention(x, w).square().sum(), (QKV, BATCH), (P(), P("data"))),
    "layer norm": (lambda s, x: (F.layer_norm(x, (8,), s) ** 3).sum(), (values(8), X), (P("model"), P("data"))),
    "sharded argument": (lambda x, y: (x @ y).exp().sum(), (X, X), (P("data", "model"), P())),
    "unused leaf": (lambda p, x: (p["a"] * x).sum(), ({"a": X, "b": X}, X), (P("data"), P("data"))),
    "constant": (lambda p, x: x.sum(), (X, X), (P("data"), P("data"))),
    "embedding": (lambda t, i: F.embedding(i, t).exp().sum(), (X, torch.arange(8) % 3), (P(), P("data"))),
    "indexing": (lambda x, y: x[1:, ::2].sum() * x[0, 0], (X, X), (P("data"), P())),
    "0-d": (lambda s, x: (s * x).sum() ** 2, (torch.tensor(2.0), X), (P(), P("data"))),
    "mutation inside": (lambda x, y: (torch.zeros(8, 8).copy_(x) * y).add_(x).sum(), (X, X), (P("data"), P())),
}


@pytest.mark.parametrize(("fn", "args", "specs"), TABLE.values(), ids=TABLE)
def test_equals_torch_autograd(fn: Any, args: tuple, specs: tuple) -> None:
    want = autograd(fn, *args)
    assert_close(px.value_and_grad(fn)(*args), want)
    for axes in ({"data": 2, "model": 2}, {"data": 4, "model": 1}):
        on = mesh(**axes)
        placed = px.device_put(args, specs, on)
        value, grads = px.jit(px.value_and_grad(fn), mesh=on)(*placed)
        assert_close((value, grads), want)
        if axes["model"] > 1:  # an axis of size 1 may go unmentioned
            where = px.tree.map(lambda x: px.spec_of(x) if hasattr(x, "device_mesh") else P(), (placed[0], grads))
            assert where[0] == where[1]


CUBE = lambda x: (x**3).sum()  # noqa: E731


def test_closed_forms_of_higher_derivatives() -> None:
    x, v, on = X[0], X[1], mesh()
    hvp = lambda x, v: px.grad(lambda x: (px.grad(CUBE)(x) * v).sum())(x)  # noqa: E731
    third = px.grad(lambda x: px.grad(lambda x: px.grad(CUBE)(x).sum())(x).sum())
    for fn, args, want in ((hvp, (x, v), 6 * x * v), (third, (x,), torch.full_like(x, 6.0))):
        assert_close(fn(*args), want)
        assert_close(px.jit(fn, mesh=on, in_specs=P("data"))(*args), want)
    assert_close(px.grad(px.grad(lambda s: s**4))(torch.tensor(2.0)), torch.tensor(48.0))
    assert_close(px.grad(px.grad(lambda s: s**4))(2.0), torch.tensor(48.0))


def test_a_hessian_vector_product_through_attention() -> None:
    loss = lambda w, x: attention(x, w).square().sum()  # noqa: E731

    def hvp(w: torch.Tensor, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return px.grad(lambda w: (px.grad(loss)(w, x) * v).sum())(w)

    v = values(16, 48, seed=2) / 8
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch.autograd.functional.hvp(lambda w: loss(w, BATCH), QKV, v)[1]
    assert_close(hvp(QKV, BATCH, v), want, rtol=1e-4, atol=1e-5)
    got = px.jit(hvp, mesh=mesh(), in_specs=(P(), P("data"), P()))(QKV, BATCH, v)
    assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_argnums_and_aux() -> None:
    fn = lambda a, b, c: (a * b["w"]).sum() * c  # noqa: E731
    a, b, c = X[0], {"w": X[1]}, torch.tensor(3.0)
    ga, gb, gc = 3 * X[1], {"w": 3 * X[0]}, (X[0] * X[1]).sum()
    assert_close(px.grad(fn)(a, b, c), ga)
    assert_close(px.grad(fn, argnums=1)(a, b, c), gb)
    assert_close(px.grad(fn, argnums=(0,))(a, b, c), (ga,))
    assert_close(px.grad(fn, argnums=(2, 0, 1))(a, b, c), (gc, ga, gb))
    assert_close(px.value_and_grad(fn, argnums=(0, 2))(a, b, c), (gc * 3, (ga, gc)))
    with_aux = lambda x: (x.sum(), {"double": x * 2, "n": 3})  # noqa: E731
    assert_close(px.grad(with_aux, has_aux=True)(a), (torch.ones(8), {"double": a * 2, "n": 3}))
    (value, aux), g = px.jit(px.value_and_grad(with_aux, has_aux=True), mesh=mesh(), in_specs=P("data"))(a)
    assert_close((value, aux, g), (a.sum(), {"double": a * 2, "n": 3}, torch.ones(8)))
    assert not value.requires_grad
    assert not aux["double"].requires_grad


def test_the_arguments_stay_as_they_are() -> None:
    x = X.clone().requires_grad_()
    g = px.grad(CUBE)(x.detach())
    assert not g.requires_grad
    assert x.grad is None
    # Under torch's own autograd the gradient is part of its graph.
    (double,) = torch.autograd.grad(px.grad(CUBE)(x).sum(), x)
    assert_close(double, 6 * X)


ERRORS = {
    "vector": (lambda x: px.grad(lambda x: x * 2)(x), r"does not return a scalar(.|\n)*f32\[8,8\](.|\n)*\.mean\(\)"),
    "integers": (lambda x: px.grad(lambda n: n.sum())({"n": torch.arange(3)}["n"]), "with respect to integers"),
    "integer leaf": (lambda x: px.grad(lambda t: x.sum())({"a": x, "step": 3}), r"argument 0\['step'\]"),
    "bool": (lambda x: px.grad(lambda b: x.sum())(True), "with respect to integers"),
    "integer value": (lambda x: px.grad(lambda x: x.argmax())(x), "not floating-point"),
    "no tensor": (lambda x: px.grad(lambda x: 3.0)(x), "does not return a scalar"),
    "no aux": (lambda x: px.grad(lambda x: x.sum(), has_aux=True)(x), r"does not return a pair \(value, aux\)"),
    "by keyword": (lambda x: px.grad(lambda x: x.sum())(x=x), "by position"),
}


@pytest.mark.parametrize(("call", "text"), ERRORS.values(), ids=ERRORS)
def test_what_has_no_gradient(call: Any, text: str) -> None:
    with pytest.raises(GradientError, match=text):
        call(X)
    with pytest.raises(GradientError, match=text):
        px.jit(call, mesh=mesh(), in_specs=P("data"))(X)


def test_sums_can_stay_owed_and_be_paid_later() -> None:
    on = mesh(data=4)
    loss = lambda w, x: (x @ w).square().mean()  # noqa: E731
    want = autograd(loss, X, X)[1]
    owed = px.jit(px.grad(loss, reduce=False), mesh=on, in_specs=(P(), P("data")), out_specs=P(unreduced="data"))
    assert len(owed.comms(X, X)) == 0
    assert_close(px.reshard(owed(X, X), P()), want)
    later = px.jit(
        lambda w, x: px.reshard(px.grad(loss, reduce=False)(w, x), P("data")), mesh=on, in_specs=(P(), P("data"))
    )
    assert [(c.kind, c.asked) for c in later.comms(X, X)] == [("reduce_scatter", True)]
    assert_close(later(X, X), want)


def test_gradients_of_sharded_parameters_are_scattered() -> None:
    step = px.jit(px.grad(lambda w, x: (x @ w).square().mean()), mesh=mesh(data=2), in_specs=(P("data"), P("data")))
    report = step.comms(X, X)
    assert [(c.kind, c.phase, c.asked) for c in report if c.phase == "backward"] == [
        ("reduce_scatter", "backward", True)
    ]
    assert px.spec_of(step(X, X)) == P("data")


def test_over_placed_values_without_jit() -> None:
    on = mesh(data=2)
    w, x = px.device_put((X, X), (P("data"), P("data")), on)
    loss = lambda w, x: (x @ w).square().mean()  # noqa: E731
    value, g = px.value_and_grad(loss)(w, x)
    assert_close((value, g), autograd(loss, X, X))
    assert px.spec_of(g) == P("data")


def test_a_jitted_function_is_differentiated() -> None:
    on = mesh(data=2)
    inner = px.jit(CUBE, mesh=on, in_specs=P("data"))
    assert_close(px.grad(inner)(X), 3 * X**2)
    assert_close(px.jit(px.grad(inner), mesh=on)(X), 3 * X**2)
    with pytest.raises(GradientError, match=r"px.jit\(px.grad\(fn\)"):
        px.grad(inner)(px.device_put(X, P("data"), on))
