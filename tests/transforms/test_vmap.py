"""`vmap` against torch.func, JAX, loops over examples and closed forms; on sharded batches; with other transforms."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import func

import ptrainx as px
from ptrainx import P
from ptrainx.errors import HostReadError, InputError, RandomnessError, TraceError, TreeError
from tests.compile.programs import BATCH, MLP, MLP_SPECS, X, assert_close, attention, mlp, values


def loss(params, x, y):
    return (mlp(params, x) - y).square().mean()


def each(fn, *args):
    """A loop over examples."""
    rows = [fn(*row) for row in zip(*args)]
    return px.tree.map(lambda *leaves: torch.stack(leaves), *rows)


def running(x):
    return px.scan(lambda c, t: (torch.tanh(c + t), c * t), torch.zeros(()), x)


W, Y = values(16, 48), values(8, 8, seed=3)
KEYS = px.random.split(px.random.key(0), 4)
PER_EXAMPLE = (None, 0, 0)
TABLE = {
    "a gradient each": (
        px.vmap(px.grad(loss), PER_EXAMPLE),
        (MLP, X, Y),
        (MLP_SPECS, P("data"), P("data")),
        lambda: func.vmap(func.grad(loss), PER_EXAMPLE)(MLP, X, Y),
    ),
    "attention": (
        px.vmap(lambda x: attention(x[None], W)[0]), (BATCH,), (P("data"),), lambda: attention(BATCH, W),
    ),
    "axes": (
        px.vmap(lambda x, t: {"s": x.sum() + t["a"], "y": x * t["b"]}, (1, {"a": 0, "b": None}), {"s": 0, "y": 1}),
        (X, {"a": Y[0], "b": Y[1]}),
        (P("data"), P()),
        lambda: {"s": X.sum(0) + Y[0], "y": X * Y[1][:, None]},
    ),
    "one in another": (
        px.vmap(lambda x, y: px.vmap(lambda row: torch.dot(x, row))(y), (0, None)),
        (X, Y),
        (P("data"), P(None, "model")),
        lambda: X @ Y.T,
    ),
    "a loop": (px.vmap(running), (X,), (P("data"),), lambda: each(running, X)),
    "a tangent each": (
        px.vmap(lambda x: px.jvp(torch.sin, (x,), (x,))[1]), (X,), (P("data"),), lambda: X.cos() * X,
    ),
    "a key each": (
        px.vmap(lambda k, x: px.random.dropout(px.random.fold_in(k, 1), x, 0.5)),
        (KEYS, X[:4]),
        (P(), P("data")),
        lambda: each(lambda k, x: px.random.dropout(px.random.fold_in(k, 1), x, 0.5), KEYS, X[:4]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_equals_a_loop_over_examples(name):
    fn, args, specs, answer = TABLE[name]
    want = answer()
    assert_close(fn(*args), want)
    both = name in ("a gradient each", "one in another")
    mesh = px.make_mesh({"data": 2, "model": 2} if both else {"data": 2}, simulate=True)
    assert_close(px.jit(fn, mesh=mesh, in_specs=specs)(*args), want)


def test_a_sharded_batch_stays_where_it_is():
    fn = px.vmap(px.grad(loss), PER_EXAMPLE)
    lowered = px.jit(fn, mesh=px.AbstractMesh(data=2), in_specs=(P(), P("data"), P("data"))).lower(MLP, X, Y)
    assert lowered.comms() == []
    assert [output.spec for output in lowered.graphs[0].outputs] == [P("data")] * 3


def kept_constant(params, x, y):
    """A closed-over tree, a detached value, a region without gradients."""

    def one(a, b):
        with torch.no_grad():
            scale = (a * b).sum()
        return loss(params, a, b.detach()) * scale

    return px.vmap(one)(x, y).sum()


def kept_constant_answer(params, x, y):
    scale = (x * y).sum(1).detach()
    return ((mlp(params, x) - y.detach()).square().mean(1) * scale).sum()


def penalty(transform, gradient):
    def fn(params, x, y):
        grads = transform(gradient(loss), PER_EXAMPLE)(params, x, y)
        return sum(g.square().sum() for g in px.tree.leaves(grads))

    return fn


DIFFERENTIATED = {
    "constants": (kept_constant, kept_constant_answer),
    "gradients each": (penalty(px.vmap, px.grad), penalty(func.vmap, func.grad)),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_through_it(name):
    fn, same = DIFFERENTIATED[name]
    leaves, treedef = px.tree.flatten((MLP, X, Y))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(same(*px.tree.unflatten(treedef, leaves)), leaves, allow_unused=True)
    want = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves)]
    gradient = px.grad(fn, (0, 1, 2))
    assert_close(px.tree.leaves(gradient(MLP, X, Y)), want)
    mesh = px.make_mesh(data=2, simulate=True)
    got = px.jit(gradient, mesh=mesh, in_specs=(P(), P("data"), P("data")))(MLP, X, Y)
    assert_close(px.tree.leaves(got), want)


def test_a_hessian_equals_jax():
    """In a scan's body, over values from around it, and on placed values outside of any jit."""
    rows = jnp.asarray(X.numpy()[:, :4])
    want = torch.from_numpy(jax.device_get(jax.hessian(lambda v: jnp.tanh(rows @ v).sum())(rows[0])).copy())

    def hessian(x, v):
        return px.vmap(lambda t: px.hvp(lambda v: torch.tanh(x @ v).sum(), (v,), (t,))[0])(torch.eye(4))

    def twice(x, vs):
        return px.scan(lambda c, v: (c, hessian(x, v)), 0, vs)[1]

    alone, mesh = px.make_mesh(data=1, simulate=True), px.make_mesh(data=2, simulate=True)
    both = px.device_get(px.jit(twice, mesh=alone, in_specs=(P("data"), P()))(X[:, :4], X[:2, :4]))
    torch.testing.assert_close(both[0], want, rtol=1e-4, atol=1e-5)
    placed = px.device_put(X, P("data"), mesh)
    assert_close(px.vmap(torch.dot)(placed, placed), (X * X).sum(1))
    assert_close(px.grad(lambda v: px.vmap(torch.dot)(v, v).sum())(placed), 2 * X)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def write_each(x):
    out = torch.zeros(8)
    out.copy_(x)
    return out


MESH = {"mesh": px.AbstractMesh(data=2), "in_specs": P("data"), "out_specs": P("data")}
REFUSED = {
    "sizes": (lambda: px.vmap(torch.add)(X, X[:3]), InputError, "[1]: 3"),
    "no batch": (lambda: px.vmap(torch.sin, None)(X), InputError, "no argument"),
    "no such dim": (lambda: px.vmap(torch.sin, 2)(X), InputError, "no dim 2"),
    "axis_size": (lambda: px.vmap(torch.sin, axis_size=3)(X), InputError, "axis_size=3"),
    "in_axes": (lambda: px.vmap(torch.add, (0,))(X, X), TreeError, "one entry an argument"),
    "a prefix": (lambda: px.vmap(lambda t: t["a"], ({"b": 0},))({"a": X}), TreeError, "in_axes"),
    "a value": (lambda: px.vmap(lambda x: x * x.sum().item())(X), HostReadError, "torch.where"),
    "a shape": (lambda: px.vmap(lambda x: x[x > 0])(X), HostReadError, "masks"),
    "no key": (lambda: px.vmap(lambda x: x + torch.randn(8))(X), RandomnessError, "px.random.split"),
    "a write": (lambda: px.vmap(write_each)(X), TraceError, "aten::copy_"),
    "reshard": (lambda: px.vmap(lambda x: px.reshard(x, P()))(X), TraceError, "px.reshard inside px.vmap"),
    "shard_map": (lambda: px.vmap(px.shard_map(torch.sin, **MESH))(X), TraceError, "px.vmap"),
    "print": (lambda: px.vmap(lambda x: px.debug.print("{}", x))(X), TraceError, "px.debug.print inside"),
    "by hand": (lambda: px.grad(lambda x: px.vmap(Straight.apply)(x).sum())(X), TraceError, "Straight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, told = REFUSED[name]
    with pytest.raises(error) as caught:
        call()
    assert told in str(caught.value)
