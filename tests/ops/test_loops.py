"""`scan`, `accumulate_grads` and `debug.print`, against Python loops, slices and one big batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.errors import GradientError, InputError, SpecError, TreeError
from tests.compile.programs import assert_close, values
from tests.support.pool import Pool

XS = values(4, 8, 8)
X = values(16, 8)
W = values(8, 8, seed=1)


def mesh(**axes: int) -> px.Mesh:
    return px.make_mesh(axes or {"data": 2, "model": 2}, simulate=True)


def loop(body: Any, init: Any, xs: list, reverse: bool = False) -> Any:
    """What scan means."""
    carry, ys = init, [None] * len(xs)
    for i in reversed(range(len(xs))) if reverse else range(len(xs)):
        carry, ys[i] = body(carry, xs[i])
    return carry, torch.stack(ys)


def body(carry: dict, x: torch.Tensor) -> tuple:
    h = torch.tanh(carry["h"] @ W + x)
    return {"h": h, "n": carry["n"] + 1}, h.sum(1)


INIT = {"h": values(8, 8, seed=2), "n": 0}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "specs", [(P("data"), P(None, "data")), (P(), P()), (P(None, "model"), P(None, "data", "model"))]
)
def test_scan_is_the_loop(reverse: bool, specs: tuple) -> None:
    init = {"h": INIT["h"], "n": torch.tensor(0)}
    want = loop(body, init, list(XS), reverse)
    fn = lambda h, xs: px.scan(body, {"h": h, "n": 0}, xs, reverse=reverse)  # noqa: E731
    assert_close(fn(INIT["h"], XS), want)
    assert_close(px.jit(fn, mesh=mesh(), in_specs=specs)(INIT["h"], XS), want)


def test_gradients_through_scan() -> None:
    def loss(w: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        step = lambda h, x: ((h @ w + x).sin(), h.mean())  # noqa: E731
        last, ys = px.scan(step, torch.zeros(8, 8), xs)
        return last.square().sum() + ys.sum()

    def unrolled(w: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        h, total = torch.zeros(8, 8), torch.zeros(())
        for x in xs:
            total = total + h.mean()
            h = (h @ w + x).sin()
        return h.square().sum() + total

    w, xs = W.clone().requires_grad_(), XS.clone().requires_grad_()
    want = torch.autograd.grad(unrolled(w, xs), (w, xs))
    assert_close(px.grad(loss, argnums=(0, 1))(W, XS), want)
    assert_close(px.jit(px.grad(loss, argnums=(0, 1)), mesh=mesh(), in_specs=(P(), P(None, "data")))(W, XS), want)


def test_scan_by_length_and_over_nothing() -> None:
    double = lambda c, _: (c * 2, c)  # noqa: E731
    assert_close(px.scan(double, torch.tensor(1), length=5), (torch.tensor(32), torch.tensor([1, 2, 4, 8, 16])))
    assert_close(px.scan(lambda c, x: (c + x, None), 0, torch.arange(4))[0], torch.tensor(6))
    for run in (lambda f: f, lambda f: px.jit(f, mesh=mesh())):
        carry, ys = run(lambda xs: px.scan(lambda c, x: (c + x.sum(), x * 2), torch.zeros(()), xs))(torch.ones(0, 3))
        assert_close((carry, ys), (torch.zeros(()), torch.ones(0, 3)))


def test_the_carry_finds_its_placement() -> None:
    step = px.jit(
        lambda xs: px.scan(lambda c, x: (c + x, c), torch.zeros(8, 8), xs), mesh=mesh(), in_specs=P(None, "data")
    )
    carry, ys = step(XS)
    assert_close((carry, ys), (XS.sum(0), torch.cat([torch.zeros(1, 8, 8), XS.cumsum(0)[:-1]])))
    assert (px.spec_of(carry), px.spec_of(ys)) == (P("data"), P(None, "data"))
    assert len(step.comms(XS)) == 0


@pytest.mark.parametrize("outside", [False, True])
def test_a_carry_that_owes_a_sum_at_first_pays_it(outside: bool) -> None:
    fn = lambda x: px.scan(lambda c, _: (c.tanh() * c + 1, None), x.sum(0), None, length=3)[0].sum()  # noqa: E731
    if outside:
        fn = px.grad(fn)
    for spec in (P("data"), P("data", "model"), P(("data", "model"))):
        assert_close(px.jit(fn, mesh=mesh(), in_specs=spec)(X), fn(X))


def test_a_trial_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(c: torch.Tensor, x: torch.Tensor) -> tuple:
        px.debug.print("step {}", x.sum())
        return c + x, None

    px.jit(lambda xs: px.scan(noisy, torch.zeros(8, 8), xs)[0], mesh=mesh(), in_specs=P(None, "data"))(XS)
    assert capsys.readouterr().out.count("step") == 4


SCAN_ERRORS = {
    "shape": (lambda xs: px.scan(lambda c, x: (x, c), torch.zeros(3), xs), InputError, r"carry changes its type"),
    "dtype": (lambda xs: px.scan(lambda c, x: ({"a": c["a"] + 0.5}, 1), {"a": 0}, xs), InputError, r"carry\['a'\]"),
    "structure": (lambda xs: px.scan(lambda c, x: ((c, c), c), 0, xs), TreeError, "structure changes"),
    "lengths": (lambda xs: px.scan(lambda c, x: (c, c), 0, (xs, xs[1:])), InputError, "leading dims differ"),
    "length": (lambda xs: px.scan(lambda c, x: (c, c), 0, xs, length=3), InputError, "leading dims differ"),
    "nothing": (lambda xs: px.scan(lambda c, x: (c, c), 0), InputError, "no xs and no length"),
    "no dims": (lambda xs: px.scan(lambda c, x: (c, c), 0, torch.tensor(1)), InputError, "no leading dim"),
    "no pair": (lambda xs: px.scan(lambda c, x: c, torch.zeros(()), xs), TreeError, "pair"),
}


@pytest.mark.parametrize(("fn", "kind", "text"), SCAN_ERRORS.values(), ids=SCAN_ERRORS)
def test_loops_that_do_not_close(fn: Any, kind: type[Exception], text: str) -> None:
    for run in (fn, px.jit(fn, mesh=mesh())):
        with pytest.raises(kind, match=text):
            run(XS)


def test_placements_that_do_not_close() -> None:
    with pytest.raises(SpecError, match="sharded on its leading dim"):
        px.jit(lambda xs: px.scan(lambda c, x: (c, x), 0, xs), mesh=mesh(), in_specs=P("data"))(XS)
    moving = lambda xs: px.scan(lambda c, x: (px.reshard(c.t() + x, P(None, "data")), 0), torch.zeros(8, 8), xs)  # noqa: E731
    with pytest.raises(SpecError, match="carry changes its placement"):
        px.jit(lambda h, xs: px.scan(lambda c, x: (px.reshard(c, P(None, "data")), 0), h, xs), mesh=mesh())(
            px.device_put(X[:8], P("data"), mesh()), XS
        )
    assert_close(px.jit(moving, mesh=mesh())(XS)[0], loop(lambda c, x: (c.t() + x, x), torch.zeros(8, 8), list(XS))[0])


def loss_fn(w: torch.Tensor, batch: dict) -> tuple:
    h = batch["x"] @ w
    return (h - batch["y"]).square().mean(), {"mean": h.mean(), "rows": torch.tensor(1.0) * len(h)}


DATA = {"x": X, "y": values(16, 8, seed=3)}
GRAD = px.value_and_grad(loss_fn, has_aux=True)


def big_batch(data: dict) -> Any:
    w = W.clone().requires_grad_()
    loss, aux = loss_fn(w, data)
    return (loss.detach(), aux["mean"].detach()), torch.autograd.grad(loss, w)[0]


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_microbatches_add_up_to_the_batch(m: int) -> None:
    (loss, mean), g = big_batch(DATA)
    step = px.accumulate_grads(GRAD, m)
    want = (loss, {"mean": mean, "rows": torch.tensor(16.0 / m)}), g
    assert_close(step(W, DATA), want)
    on = mesh(data=2)
    assert_close(px.jit(step, mesh=on, in_specs=(P(), P("data")))(W, DATA), want)
    assert_close(step(*px.device_put((W, DATA), (P(), P("data")), on)), want)


def test_microbatch_i_has_the_rows_from_i_on() -> None:
    seen = []

    def fn(w: torch.Tensor, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen.append((x.detach(), key))
        return (x @ w).sum()

    key = px.random.key(3)
    px.accumulate_grads(px.grad(fn), 4, key_argnums=2)(W, X, key)
    assert len(seen) == 4
    for i, (rows, used) in enumerate(seen):
        assert rows.equal(X[i::4])
        assert used.equal(px.random.fold_in(key, i))


def test_weights() -> None:
    tokens = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
    loss = lambda w, x, n: (x @ w).sum() / len(x)  # noqa: E731
    weight = lambda w, x, n: n.sum()  # noqa: E731
    args = (W, X[:8], tokens)
    parts = [(loss(W, X[:8][i::4], None), tokens[i::4].sum()) for i in range(4)]
    want = sum(v * n for v, n in parts) / tokens.sum()
    for run in (lambda f: f, lambda f: px.jit(f, mesh=mesh(data=2), in_specs=(P(), P("data"), P("data")))):
        value, _ = run(px.accumulate_grads(px.value_and_grad(loss), 4, argnums=(1, 2), weight=weight))(*args)
        assert_close(value, want)


def test_sums_are_paid_once() -> None:
    on = mesh(data=2)
    one = px.jit(px.grad(lambda w, x: (x @ w).square().mean()), mesh=on, in_specs=(P(), P("data")))
    grad = px.grad(lambda w, x: (x @ w).square().mean())
    many = px.jit(px.accumulate_grads(grad, 8), mesh=on, in_specs=(P(), P("data")))
    row = [(c.kind, c.axis, c.bytes, c.count, c.asked) for c in one.comms(W, X)]
    assert row == [("all_reduce", "data", W.numel() * 4, 1, True)]
    assert [(c.kind, c.axis, c.bytes, c.count, c.asked) for c in many.comms(W, X)] == row


def test_accumulation_leaves_sums_owed() -> None:
    grad = px.grad(lambda w, x: (x @ w).square().mean(), reduce=False)
    step = px.jit(
        px.accumulate_grads(grad, 4), mesh=mesh(data=2), in_specs=(P(), P("data")), out_specs=P(unreduced="data")
    )
    assert len(step.comms(W, X)) == 0
    w = W.clone().requires_grad_()
    assert_close(step(W, X), torch.autograd.grad((X @ w).square().mean(), w)[0])


ACCUMULATE_ERRORS = {
    "rows": (lambda: px.accumulate_grads(GRAD, 3)(W, DATA), InputError, "16 rows over 1 shards, which 3"),
    "rows of a shard": (
        lambda: px.jit(px.accumulate_grads(GRAD, 16), mesh=mesh(data=2), in_specs=(P(), P("data")))(W, DATA),
        InputError,
        "16 rows over 2 shards",
    ),
    "different rows": (
        lambda: px.accumulate_grads(GRAD, 2)(W, {"x": X, "y": X[:8]}),
        InputError,
        "different numbers of rows",
    ),
    "no rows": (lambda: px.accumulate_grads(GRAD, 2)(W, {"x": 3.0, "y": X}), InputError, "has no rows"),
    "not a gradient": (lambda: px.accumulate_grads(loss_fn, 2), GradientError, "made by px.grad or px.value_and_grad"),
    "number": (lambda: px.accumulate_grads(GRAD, 0), InputError, "a positive integer"),
    "position": (lambda: px.accumulate_grads(GRAD, 2, argnums=5)(W, DATA), InputError, "argnums"),
}


@pytest.mark.parametrize(("call", "kind", "text"), ACCUMULATE_ERRORS.values(), ids=ACCUMULATE_ERRORS)
def test_batches_that_do_not_split(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def printing(x: torch.Tensor) -> torch.Tensor:
    px.debug.print("sum {s:.2f} of {}", x.shape[0], s=x.sum())
    loss, g = px.value_and_grad(lambda x: (px.debug.print("in {}", x[0, 0]), (x * x).sum())[1])(x)
    px.debug.print("out {loss:.2f}", loss=loss)
    return g


PRINTED = f"sum {X.sum():.2f} of 16\nin {X[0, 0].item()}\nout {(X * X).sum():.2f}\n"


@pytest.mark.parametrize("backend", ["graph", "eager"])
@pytest.mark.parametrize("simulate", [True, False])
def test_prints_when_it_runs(backend: str, simulate: bool, capsys: pytest.CaptureFixture[str]) -> None:
    on = px.make_mesh(data=2, simulate=True) if simulate else px.make_mesh(data=1)
    step = px.jit(printing, mesh=on, in_specs=P("data"), backend=backend)
    for _ in range(2):
        step(X)
        assert capsys.readouterr().out == PRINTED


def test_prints_outside_and_not_where_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    printing(X)
    assert capsys.readouterr().out == PRINTED
    px.debug.print("{x}", x=px.device_put(X[0, :2], P("data"), mesh(data=2)))
    assert capsys.readouterr().out == f"{X[0, :2]}\n"
    px.eval_shape(printing, X)
    px.jit(printing, mesh=mesh()).lower(X)
    assert capsys.readouterr().out == ""
    with pytest.raises(InputError, match="field without a value"):
        px.debug.print("{a} {b}", a=1)


def print_on_ranks() -> None:
    px.jit(printing, mesh=px.make_mesh(data=2), in_specs=P("data"))(X)


def test_one_rank_prints(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(print_on_ranks, 2)
    assert capsys.readouterr().out == PRINTED
