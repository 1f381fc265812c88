"""What can't be part of a step is refused, with the user's line; what can is not."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate

import ptrainx as px
from ptrainx import P
from ptrainx.errors import HostReadError, MeshError, MutationError, RandomnessError, TraceError
from tests.compile.programs import assert_close, values

X = values(4, 4)
CAPTURED = values(4, 4, seed=1)
SCALE = torch.tensor(2.0)
LINE = re.compile(r"at: .*test_refusals.py:\d+")


def mesh(**axes: int) -> px.Mesh:
    return px.make_mesh(axes or {"data": 2}, simulate=True)


def branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def write_view(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[1:].mul_(2)
    return x


def write_detached(x: torch.Tensor) -> torch.Tensor:
    x.detach().zero_()
    return x


def write_slice(x: torch.Tensor) -> torch.Tensor:
    x[0] = 1
    return x


def write_out(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, 1, out=x)


def write_captured(x: torch.Tensor) -> torch.Tensor:
    CAPTURED.add_(1)
    return x


def write_nested(x: torch.Tensor) -> torch.Tensor:
    def loss(w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            w.mul_(2)
        return w.sum()

    return px.grad(loss)(x)


REFUSED = {
    "item": (lambda x: x.sum().item(), HostReadError, r"\.item\(\)"),
    "if": (branch, HostReadError, "(?s)if tensor.*torch.where"),
    "and": (lambda x: x.any() and x, HostReadError, "if tensor"),
    "float": (lambda x: float(x.sum()), HostReadError, r"float\(tensor\)"),
    "int": (lambda x: x[int(x.argmax())], HostReadError, r"int\(tensor\)"),
    "index": (lambda x: [1, 2][x.argmax()], HostReadError, "index"),
    "tolist": (lambda x: x.tolist(), HostReadError, "tolist"),
    "numpy": (lambda x: x.numpy(), HostReadError, "numpy"),
    "format": (lambda x: f"{x.sum():.2f}", HostReadError, "on the host"),
    "equal": (lambda x: torch.equal(x, x), HostReadError, "torch.equal"),
    "allclose": (lambda x: x.allclose(x), HostReadError, "allclose"),
    "nonzero": (lambda x: x.nonzero(), HostReadError, "a shape that depends on values"),
    "mask": (lambda x: x[x > 0], HostReadError, "(?s)a shape that depends on values.*torch.where"),
    "unique": (lambda x: x.unique(), HostReadError, "a shape that depends on values"),
    "add_": (lambda x: x.add_(1), MutationError, r"writes in place into argument x"),
    "slice": (write_slice, MutationError, "argument x"),
    "view": (write_view, MutationError, "writes in place into (argument x|a view of a sharded dim)"),
    "detach": (write_detached, MutationError, "argument x"),
    "out=": (write_out, MutationError, "argument x"),
    "inside grad": (write_nested, MutationError, "argument x"),
    "captured": (write_captured, MutationError, "a captured value"),
    "randn": (lambda x: x + torch.randn(4, 4), RandomnessError, "(?s)randn.*px.random"),
    "rand_like": (lambda x: torch.rand_like(x), RandomnessError, "rand_like"),
    "randperm": (lambda x: x[torch.randperm(4)], RandomnessError, "randperm"),
    "bernoulli": (lambda x: x.sigmoid().bernoulli(), RandomnessError, "bernoulli"),
    "normal_": (lambda x: torch.empty(4, 4).normal_() + x, RandomnessError, "normal_"),
    "init": (lambda x: torch.nn.init.xavier_uniform_(torch.empty(4, 4)) + x, RandomnessError, "uniform_"),
    "gumbel": (lambda x: F.gumbel_softmax(x), RandomnessError, "exponential"),
    "rrelu": (lambda x: F.rrelu(x, training=True), RandomnessError, "rrelu"),
    "dropout": (lambda x: F.dropout(x, 0.5), RandomnessError, "(?s)dropout.*px.random.dropout"),
    "dropout module": (lambda x: torch.nn.Dropout(0.1)(x), RandomnessError, "dropout"),
    "attention dropout": (
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1),
        RandomnessError,
        "without a key",
    ),
    "to_local": (lambda x: x.to_local(), TraceError, "to_local"),
    "full_tensor": (lambda x: x.full_tensor(), TraceError, "full_tensor"),
    "from_local": (lambda x: DTensor.from_local(torch.ones(2), None, [Replicate()]), TraceError, "from_local"),
    "all_reduce": (lambda x: dist.all_reduce(x), TraceError, "collective"),
    "functional collective": (
        lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", "group"),
        TraceError,
        "collective",
    ),
}


@pytest.mark.parametrize(("fn", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_line(fn: Any, kind: type[Exception], text: str) -> None:
    px.initialize()  # dist.all_reduce asks for a world
    before = CAPTURED.clone()
    for in_specs in (P(), P("data")):
        with pytest.raises(kind, match=text) as caught:
            px.jit(fn, mesh=mesh(), in_specs=in_specs)(X)
        assert LINE.search(str(caught.value)), caught.value
    assert CAPTURED.equal(before)


EAGER = ("add_", "slice", "view", "detach", "randn", "gumbel", "dropout")


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("axes", [{"data": 2, "simulate": True}, {"data": 1}], ids=["simulated", "one device"])
def test_the_eager_backend_refuses_alike(name: str, axes: dict) -> None:
    fn, kind, text = REFUSED[name]
    on = px.make_mesh(**axes)
    given = px.device_put(X, P("data"), on)
    with pytest.raises(kind, match=text):
        px.jit(fn, mesh=on, backend="eager")(given)
    assert_close(given, X)


def test_the_eager_backend_lets_values_be_read() -> None:
    seen = []
    px.jit(lambda x: seen.append(float(x.sum())), mesh=mesh(), in_specs=P("data"), backend="eager")(X)
    assert seen == [pytest.approx(float(X.sum()))]


def assign(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    h[0] = 1
    h[1:3, 1] = x[0, :2]
    h[:, 3] += 5
    h[torch.tensor([2])] = -x[:1]
    h[h > 0.9] = 0.5
    return h


ALLOWED = {
    "shapes": lambda x: x.reshape(x.shape[0] * x.size(1)) * x.numel() * len(x) * x.dim(),
    "loop over rows": lambda x: sum(row.sum() for row in x),
    "unpack": lambda x: torch.stack(list(x.unbind(1))),
    "dtype and device": lambda x: torch.zeros(2, dtype=x.dtype, device=x.device) + x[0, :2],
    "is tensor": lambda x: x if isinstance(x, torch.Tensor) and x.is_floating_point() else None,
    "where": lambda x: torch.where(x.sum() > 0, x, -x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "integer index": lambda x: x[torch.tensor([0, 2])],
    "write into clone": lambda x: x.clone().add_(1),
    "write into a factory": lambda x: torch.zeros_like(x).copy_(x),
    "dropout off": lambda x: F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0),
    "eval module": lambda x: torch.nn.Dropout(0.5).eval()(x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "constant read": lambda x: x * SCALE.item() * sum(CAPTURED.tolist()[0]) if SCALE else x,
    "assignment": assign,
    "no_grad": lambda x: torch.no_grad()(lambda: x * 2)(),
}


@pytest.mark.parametrize("fn", ALLOWED.values(), ids=ALLOWED)
def test_allowed(fn: Any) -> None:
    for in_specs in (P(), P("data")):
        assert_close(px.jit(fn, mesh=mesh(), in_specs=in_specs)(X), fn(X))


@pytest.mark.parametrize(
    "read", [lambda c: c, lambda c: c.tolist()[0][0], lambda c: c[0, 0]], ids=["use", "read", "index"]
)
def test_a_captured_tensor_is_a_constant(read: Any) -> None:
    captured = values(4, 4)
    step = px.jit(lambda x: x * read(captured), mesh=mesh(), in_specs=P("data"))
    assert_close(step(X), X * read(captured))
    captured.add_(1)
    with pytest.raises(TraceError, match="captured a tensor that was written in place"):
        step(X)


def test_a_captured_placed_value_is_an_input() -> None:
    on = mesh()
    captured = px.device_put(X, P("data"), on)
    step = px.jit(lambda x: x @ captured, mesh=on, in_specs=P("data"))
    assert_close(step(X), X @ X)
    captured.mul_(2)
    assert_close(step(X), X @ X * 2)
    with pytest.raises(TraceError, match="value of another mesh"):
        px.jit(lambda x: x @ captured, mesh=mesh(other=2))(X)
    with pytest.raises(TraceError, match="value of another mesh"):
        px.jit(lambda x: x @ captured, mesh=mesh(data=4))(X)


def test_a_reshard_can_be_written_into_where_it_is_a_copy() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return px.reshard(px.reshard(x, P(None, "data")) * 1, P("data")).add_(x)

    assert_close(px.jit(step, mesh=mesh())(X), X + X)


class Mine(Exception):
    """An error of user code."""


@pytest.mark.parametrize("kind", [Mine, ValueError, KeyboardInterrupt, SystemExit, RuntimeError, NotImplementedError])
@pytest.mark.parametrize("backend", ["graph", "eager"])
def test_errors_of_user_code_pass_and_leave_torch_as_it_was(kind: type[BaseException], backend: str) -> None:
    error = kind("Sharding redistribute DTensor")
    methods = {name: DTensor.__dict__[name] for name in ("redistribute", "to_local", "full_tensor", "from_local")}
    dispatcher = DTensor._op_dispatcher

    def raising(x: torch.Tensor) -> Any:
        px.grad(lambda w: (w * 2).sum())(x)
        raise error

    with pytest.raises(kind) as caught:
        px.jit(raising, mesh=mesh(), in_specs=P("data"), backend=backend)(X)
    assert caught.value is error
    assert methods == {name: DTensor.__dict__[name] for name in methods}
    assert not dispatcher._allow_implicit_replication
    assert "redistribute_local_args" not in dispatcher.__dict__
    assert torch.is_grad_enabled()
    assert type(torch.ones(2) + 1) is torch.Tensor
    assert_close(px.jit(lambda x: x + 1, mesh=mesh(), in_specs=P("data"))(X), X + 1)


def test_an_error_that_handled_one_of_ours_is_the_users() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            x.sum().item()
        except HostReadError:
            raise Mine from None
        return x

    def chained(x: torch.Tensor) -> torch.Tensor:
        try:
            x.sum().item()
        except HostReadError as error:
            raise Mine from error
        return x

    for fn in (step, chained):
        with pytest.raises(Mine):
            px.jit(fn, mesh=mesh())(X)


def test_threads_do_not_see_each_others_traces() -> None:
    on, started, done = mesh(), threading.Event(), threading.Event()
    placed = px.device_put(X, P("data"), on)

    def slow(x: torch.Tensor) -> torch.Tensor:
        started.set()
        done.wait(10)
        return x * 2

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(px.jit(slow, mesh=on, in_specs=P("data"))(X)))
    thread.start()
    started.wait(10)
    assert placed.full_tensor().equal(X)
    assert placed.to_local() is not None
    assert type(torch.randn(2)) is torch.Tensor
    done.set()
    thread.join(30)
    assert_close(results, [X * 2])


def test_jit_inside_jit() -> None:
    on = mesh()
    inner = px.jit(lambda a, n: a @ a * n, mesh=on, in_specs=(P(None, "data"), None), out_specs=P("data"))
    outer = px.jit(lambda x: inner(x, 3) + 1, mesh=on, in_specs=P("data"))
    assert_close(outer(X), X @ X * 3 + 1)
    assert px.spec_of(outer(X)) == P("data")
    assert any(c.asked and c.reason == "reshard" for c in outer.comms(X))
    with pytest.raises(MeshError, match="jitted for another mesh"):
        px.jit(lambda x: inner(x, 3), mesh=mesh(data=4))(X)
