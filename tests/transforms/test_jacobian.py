"""`vjp`, `jvp` and `hvp` against torch.func on one device, JAX, and closed forms; on sharded values."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import func
from torch.nn.attention import SDPBackend, sdpa_kernel

import ptrainx as px
from ptrainx import P
from ptrainx.errors import GradientError, TraceError, TreeError
from tests.compile.programs import BATCH, MLP, MLP_SPECS, X, assert_close, attention, mlp, values


def step(w, x):
    """A loop whose body reads what is around it, in a remat."""
    carry, ys = px.scan(px.remat(lambda c, row: (torch.tanh(c @ w + row), c.sum())), x[0], x[:2])
    return {"carry": carry, "ys": ys}


def written_out(w, x):
    """The same without either."""
    first = torch.tanh(x[0] @ w + x[0])
    return {"carry": torch.tanh(first @ w + x[1]), "ys": torch.stack([x[0].sum(), first.sum()])}


def sharded_weight(w, x):
    return torch.tanh(x @ px.reshard(w, P()))


# Name -> function, arguments, their specs, the same function for torch.func.
TABLE = {
    "mlp": (mlp, (MLP, X), (MLP_SPECS, P("data")), None),
    "attention": (lambda w, x: attention(x, w), (values(16, 48), BATCH), (P(), P("data")), None),
    "cross entropy": (lambda w, x: F.cross_entropy(x @ w, torch.arange(8) % 5), (X, X), (P(), P("data")), None),
    "norms": (lambda s, x: (F.layer_norm(x, (8,), s), [x.sum(0)]), (values(8), X), (P(), P("data")), None),
    "a sum over an axis": (lambda w, x: torch.relu(x @ w), (X, X), (P("data"), P(None, "data")), None),
    "a loop": (step, (X, X), (P(), P()), written_out),
    "gathered": (sharded_weight, (X, X), (P("data"), P("data")), lambda w, x: torch.tanh(x @ w)),
}


def like(tree, seed):
    return px.tree.map(lambda leaf: values(*leaf.shape, seed=seed), tree)


def flat_answer(fn, args, tangents, cotangents):
    """torch.func's: (leaves of the value's tangents, of the gradients)."""
    leaves, treedef = px.tree.flatten(args)

    def flat(*xs):
        return tuple(px.tree.leaves(fn(*px.tree.unflatten(treedef, xs))))

    with sdpa_kernel(SDPBackend.MATH):
        _, tangent = func.jvp(flat, tuple(leaves), tuple(px.tree.leaves(tangents)))
        return list(tangent), list(func.vjp(flat, *leaves)[1](tuple(px.tree.leaves(cotangents))))


@pytest.mark.parametrize("name", TABLE)
def test_equals_torch_func(name):
    fn, args, specs, same = TABLE[name]
    same = same or fn
    value = same(*args)
    tangents, cotangents = like(args, 5), like(value, 6)
    tangent, gradients = flat_answer(same, args, tangents, cotangents)

    def both(args, tangents, cotangents):
        return px.jvp(fn, args, tangents), px.vjp(fn, *args)[1](cotangents)

    mesh = px.make_mesh({"data": 2, "model": 2} if name == "mlp" else {"data": 2}, simulate=True)
    placed = px.device_put((args, tangents), (specs, specs), mesh)
    got = px.jit(both, mesh=mesh)(*placed, cotangents)
    for (mine, along), back in [got] if name == "gathered" else [got, both(args, tangents, cotangents)]:
        assert_close(mine, value)
        assert_close(px.tree.leaves(px.device_get(along)), tangent, rtol=1e-4, atol=1e-5)
        assert_close(px.tree.leaves(px.device_get(back)), gradients, rtol=1e-4, atol=1e-5)
    for gradient, primal in zip(px.tree.leaves(got[1]), px.tree.leaves(placed[0])):
        assert px.spec_of(gradient) == px.spec_of(primal)


def test_hessian_vector_products():
    """As torch.func's forward over reverse, and as ours: `jvp` of `grad`."""
    specs, tangents = (MLP_SPECS, P("data")), like((MLP, X), 5)
    leaves, treedef = px.tree.flatten((MLP, X))

    def squares(params, x):
        return mlp(params, x).square().mean()

    def flat(*xs):
        return squares(*px.tree.unflatten(treedef, xs))

    gradient = func.grad(flat, tuple(range(len(leaves))))
    _, want = func.jvp(gradient, tuple(leaves), tuple(px.tree.leaves(tangents)))
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    jitted = px.jit(lambda args, t: px.hvp(squares, args, t), mesh=mesh, in_specs=(specs, specs))
    composed = px.jvp(px.grad(squares, (0, 1)), (MLP, X), tangents)[1]
    for got in (jitted((MLP, X), tangents), composed):
        assert_close(px.tree.leaves(px.device_get(got)), list(want), rtol=1e-4, atol=1e-5)


def test_equals_jax():
    """`jax.jvp`, `jax.vjp` and `jax.hessian`, on two devices."""

    def jax_fn(w, x):
        return jnp.sin(x @ w).sum(1), (w * w).sum()

    x, w = X.numpy(), values(8, 3, seed=2).numpy()
    given, cotangents = (values(8, 3, seed=3).numpy(), values(8, 8, seed=4).numpy()), (jnp.ones(8), jnp.float32(2.0))
    value, tangent = jax.jvp(jax_fn, (w, x), given)
    gradients = jax.vjp(jax_fn, w, x)[1](cotangents)
    hessian = jax.hessian(lambda w: jax_fn(w, x)[0].sum())(w)

    def fn(w, x):
        return torch.sin(x @ w).sum(1), (w * w).sum()

    def ours(args, tangents, cotangents):
        value, tangent = px.jvp(fn, args, tangents)
        product = px.hvp(lambda w: fn(w, args[1])[0].sum(), args[:1], tangents[:1])
        return value, tangent, px.vjp(fn, *args)[1](cotangents), product

    mesh = px.make_mesh(data=2, simulate=True)
    specs = (P(), P("data"))
    tensors = px.tree.map(lambda a: torch.from_numpy(jax.device_get(a).copy()), ((w, x), given))
    jitted = px.jit(ours, mesh=mesh, in_specs=(specs, specs, None))
    got = jitted(*tensors, (torch.ones(8), torch.tensor(2.0)))
    want = (value, tangent, gradients, (jnp.einsum("abcd,cd->ab", hessian, given[0]),))
    assert_close(got, px.tree.map(lambda a: torch.from_numpy(jax.device_get(a).copy()), want), rtol=1e-4, atol=1e-5)


def test_composes():
    """Third derivatives, aux, values that do not depend on an argument, on plain tensors."""
    x = torch.tensor(0.7)
    third = px.jvp(px.grad(px.grad(torch.sin)), (x,), (torch.tensor(2.0),))[1]
    torch.testing.assert_close(third, -2.0 * torch.cos(x))
    inner = px.grad(lambda t: px.jvp(lambda y: y**3 * t, (x,), (t,))[1])(torch.tensor(2.0))
    torch.testing.assert_close(inner, 12.0 * x**2)
    through_vjp = px.grad(lambda y: px.vjp(torch.sin, y)[1](y)[0])(x)
    torch.testing.assert_close(through_vjp, torch.cos(x) - x * torch.sin(x))
    value, tangent, aux = px.jvp(lambda a, b: (a * 2, {"b": b + 1}), (x, x), (x, x), has_aux=True)
    assert (value, tangent, aux["b"]) == (2 * x, 2 * x, x + 1)
    value, pullback, aux = px.vjp(lambda a, b: (b.exp(), 3), x, x, has_aux=True)
    assert pullback(torch.tensor(1.0))[0] == 0
    torch.testing.assert_close(pullback(torch.tensor(1.0))[1], value)
    assert aux == 3
    assert not any(leaf.requires_grad for leaf in (third, inner, value, tangent))


ONE = torch.ones(2)
REFUSED = {
    "an integer": (lambda: px.jvp(torch.neg, (torch.ones(2, dtype=torch.int64),), (ONE,)), GradientError, "close over"),
    "an integer result": (lambda: px.vjp(lambda x: x.argmax(), ONE), GradientError, "has_aux=True"),
    "no tuple": (lambda: px.jvp(torch.sin, ONE, ONE), TreeError, "(primal,)"),
    "another shape": (lambda: px.jvp(torch.sin, (ONE,), (torch.ones(3),)), GradientError, "f32[3]"),
    "another structure": (lambda: px.vjp(torch.sin, ONE)[1]((ONE,)), TreeError, "cotangents"),
    "no pair": (lambda: px.jvp(torch.sin, (ONE,), (ONE,), has_aux=True), GradientError, "(value, aux)"),
    "no scalar": (lambda: px.hvp(torch.sin, (ONE,), (ONE,)), GradientError, "scalar"),
    "in a shard_map": (
        lambda: px.shard_map(
            lambda x: px.jvp(torch.sin, (x,), (x,))[1],
            mesh=px.make_mesh(data=2, simulate=True),
            in_specs=P("data"),
            out_specs=P("data"),
        )(ONE),
        TraceError,
        "px.grad",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, told = REFUSED[name]
    with pytest.raises(error) as caught:
        call()
    assert told in str(caught.value)
