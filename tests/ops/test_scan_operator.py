"""`scan` in a step's graph: one operator, its body traced once; values and gradients are the Python loop's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.graph import is_collective, loops_of, walk
from tests.compile.programs import assert_close, values
from tests.support.pool import Pool

L = 4
# Two ranks of "data" alone would meet what they meet on the last.
MESHES = ({"data": 1, "model": 1}, {"data": 4, "model": 1}, {"data": 2, "model": 2})
H = values(8, 8, seed=2)
XS = values(L, 8, 8)
W = {"a": values(L, 8, 16, seed=3), "b": values(L, 16, 8, seed=4)}
GAIN = values(8, seed=5)


def python_scan(body: Any, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False) -> Any:
    """What scan means, as a loop."""
    steps = length if length is not None else len(px.tree.leaves(xs)[0])
    carry, ys = init, [None] * steps
    for i in reversed(range(steps)) if reverse else range(steps):
        carry, ys[i] = body(carry, px.tree.map(lambda t, i=i: t[i], xs))
    return carry, px.tree.map(lambda *t: torch.stack([torch.as_tensor(v) for v in t]), *ys)


def layer(h: torch.Tensor, w: dict) -> torch.Tensor:
    return h + torch.tanh(h @ w["a"]) @ w["b"]


def layers(scan: Any, h: torch.Tensor, w: dict, gain: torch.Tensor) -> torch.Tensor:
    last, norms = scan(lambda c, w: (layer(c, w), c.square().mean()), h, w)
    return (last * gain).square().mean() + norms.sum()


def sharded_layers(scan: Any, h: torch.Tensor, w: dict, gain: torch.Tensor) -> torch.Tensor:
    """Parameters are stored sharded and gathered for use."""
    whole = lambda tree: px.reshard(tree, P()) if scan is px.scan else tree  # noqa: E731
    last, norms = scan(lambda c, w: (layer(c, whole(w)), c.square().mean()), h, w)
    return (last * whole(gain)).square().mean() + norms.sum()


def closed_over(scan: Any, h: torch.Tensor, w: dict, gain: torch.Tensor) -> torch.Tensor:
    scaled = gain * 2.0

    def body(c: torch.Tensor, w: dict) -> tuple:
        return layer(c * scaled, w) + gain, (c * scaled).sum()

    last, sums = scan(body, h, w)
    return last.square().mean() + sums.square().mean()


def reverse(scan: Any, h: torch.Tensor, w: dict, gain: torch.Tensor) -> torch.Tensor:
    last, ys = scan(lambda c, w: (layer(c, w), c * gain), h, w, reverse=True)
    return last.mean() + (ys * torch.arange(1.0, L + 1)[:, None, None]).mean()


def nested(scan: Any, h: torch.Tensor, w: dict, gain: torch.Tensor) -> torch.Tensor:
    def outer(c: torch.Tensor, w: dict) -> tuple:
        inner, ys = scan(lambda d, row: (torch.tanh(d + row * gain) @ w["a"] @ w["b"], d.mean()), c, w["a"][:3, :8])
        return layer(inner, w), ys

    last, ys = scan(outer, h, w)
    return last.square().mean() + ys.sum()


def swapped(scan: Any, h: torch.Tensor, w: dict, gain: torch.Tensor) -> torch.Tensor:
    """Carries that change places, one that never changes, and one that counts."""

    def body(c: tuple, w: dict) -> tuple:
        a, b, fixed, n = c
        return (b, layer(a, w) * fixed, fixed, n + 1), (a, n)

    (a, b, fixed, n), (ys, counts) = scan(body, (h, h * 2.0, gain, torch.tensor(0)), w)
    return (a * b).mean() + fixed.sum() + ys.mean() + (counts * n).sum() * gain.mean()


def constant_result(scan: Any, h: torch.Tensor, w: dict, gain: torch.Tensor) -> torch.Tensor:
    """The carry that comes out does not depend on the one that went in."""
    last, ys = scan(lambda c, w: (w["a"][:, :8] * 1.0, (c * gain).sum()), h, w)
    return last.square().mean() + ys.sum()


def written(scan: Any, h: torch.Tensor, w: dict, gain: torch.Tensor) -> torch.Tensor:
    def body(c: torch.Tensor, w: dict) -> tuple:
        buffer = torch.zeros(8, 8)
        buffer += layer(c, w)
        buffer[:, 0] = 0.5
        return buffer, None

    return scan(body, h, w)[0].square().mean()


def dropped(scan: Any, h: torch.Tensor, w: dict, gain: torch.Tensor) -> torch.Tensor:
    keys = px.random.split(px.random.key(0), L)
    last, _ = scan(lambda c, x: (layer(px.random.dropout(x[1], c, 0.5), x[0]), None), h, (w, keys))
    return (last * gain).mean()


def differentiated_inside(scan: Any, h: torch.Tensor, w: dict, gain: torch.Tensor) -> torch.Tensor:
    inner = px.grad(lambda c, w: layer(c, w).square().sum())
    last, _ = scan(lambda c, w: (c - 0.01 * inner(c, w) * gain, None), h, w)
    return last.square().mean()


class Case(NamedTuple):
    """A loss, where its arguments lie, and whether the graph keeps a loop."""

    loss: Callable[..., torch.Tensor]
    specs: tuple = (P("data"), P(), P())


ZERO3 = (P("data"), {"a": P(None, "data"), "b": P(None, "data")}, P("data"))
TENSOR = (P("data"), {"a": P(None, None, "model"), "b": P(None, "model")}, P())
CASES = {
    "data": Case(layers),
    "replicated": Case(layers, (P(), P(), P())),
    "tensor parallel": Case(layers, TENSOR),
    "zero3": Case(sharded_layers, ZERO3),
    "zero3 over both": Case(
        sharded_layers,
        (P("data"), {"a": P(None, ("data", "model")), "b": P(None, "data", "model")}, P(("data", "model"))),
    ),
    "closed over": Case(closed_over),
    "closed over, tensor parallel": Case(closed_over, TENSOR),
    "reverse": Case(reverse),
    "nested": Case(nested),
    "swapped": Case(swapped),
    "constant result": Case(constant_result),
    "written": Case(written),
    "dropped": Case(dropped),
    "differentiated inside": Case(differentiated_inside),
}


def value_and_grads(loss: Callable[..., torch.Tensor]) -> tuple:
    """The answer: torch's own gradient of the Python loop."""
    leaves, tree = px.tree.flatten((H, W, GAIN))
    inputs = [leaf.clone().requires_grad_() for leaf in leaves]
    value = loss(python_scan, *px.tree.unflatten(tree, inputs))
    grads = torch.autograd.grad(value, inputs, allow_unused=True)
    filled = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, grads)]
    return value.detach(), px.tree.unflatten(tree, filled)


# A loop in a loop takes its time to trace; on two axes it meets what it would on one of four.
# Each case on two of the meshes, the nested one on two axes.
ROWS = [
    (name, axes)
    for i, name in enumerate(CASES)
    for k, axes in enumerate(MESHES)
    if (name != "nested" and (i + k) % 3 < 2) or axes == {"data": 2, "model": 2}
]


@pytest.mark.parametrize(("name", "axes"), ROWS, ids=str)
def test_gradients_are_those_of_the_loop(name: str, axes: dict) -> None:
    case, mesh = CASES[name], px.make_mesh(axes, simulate=True)
    fn = px.value_and_grad(lambda h, w, gain: case.loss(px.scan, h, w, gain), argnums=(0, 1, 2))
    step = px.jit(fn, mesh=mesh, in_specs=case.specs)
    assert_close(step(H, W, GAIN), value_and_grads(case.loss))
    (compiled,) = step._cache.values()
    assert any(loops_of(graph.module.graph) for graph in compiled.lowered.graphs)


def many_layers(n: int) -> tuple:
    w = {"a": values(n, 8, 16), "b": values(n, 16, 8)}
    return H, w, GAIN


def test_the_graph_does_not_grow_with_the_number_of_steps() -> None:
    mesh = px.make_mesh(data=2, simulate=True)
    fn = px.grad(lambda h, w, gain: layers(px.scan, h, w, gain), argnums=(1, 2))
    counts = []
    for n in (2, 24):
        lowered = px.jit(fn, mesh=mesh, in_specs=(P("data"), P(), P())).lower(*many_layers(n))
        counts.append(sum(1 for _ in walk(lowered.graphs[0].module.graph)))
    assert counts[0] == counts[1]


def test_the_body_runs_as_often_for_many_steps_as_for_few() -> None:
    runs = []

    def loss(w: dict) -> torch.Tensor:
        def body(c: torch.Tensor, w: dict) -> tuple:
            runs.append(1)
            return layer(c, w), None

        return px.scan(body, H, w)[0].sum()

    for n in (2, 24):
        px.jit(px.grad(loss), mesh=px.make_mesh(data=1, simulate=True)).lower(many_layers(n)[1])
        runs.append(0)
    few = runs.index(0)
    assert runs[few + 1 :].count(1) == few


def test_parameters_are_gathered_a_step_ahead_and_their_gradients_scattered_a_step_late() -> None:
    mesh = px.make_mesh(data=2, simulate=True)
    fn = px.value_and_grad(lambda h, w, gain: sharded_layers(px.scan, h, w, gain), argnums=(1,))
    step = px.jit(fn, mesh=mesh, in_specs=ZERO3)
    lowered = step.lower(H, W, GAIN)
    text = lowered.compile().as_text()
    assert text.count("ahead =") == 4  # two loops, each before its steps and within
    assert "late_i" in text
    whole = sum(t[0].numel() * 4 for t in W.values())
    for _, loop in zip(range(2), loops_of(lowered.graphs[0].module.graph)):
        gathers = [n for n in loop.body.graph.nodes if is_collective(n) and "all_gather" in str(n.target)]
        assert sum(g.args[0].meta["val"].numel() * 4 for g in gathers) * 2 == whole


def test_second_derivatives_go_through_a_scan() -> None:
    def loss(scan: Any, x: torch.Tensor) -> torch.Tensor:
        return scan(lambda c, x: (torch.sin(c * x), None), torch.tensor(0.5), x)[0]

    x = values(3)
    want = torch.autograd.functional.hessian(lambda x: loss(python_scan, x), x)
    vector = values(3, seed=1)
    product = px.grad(lambda x: (px.grad(lambda x: loss(px.scan, x))(x) * vector).sum())
    assert_close(px.jit(product, mesh=px.make_mesh(data=2, simulate=True))(x), want @ vector)


def train(axes: dict) -> list[float]:
    """A few steps of ZeRO-3 over a scan, on real ranks."""
    mesh = px.make_mesh(axes)
    specs = ZERO3[1]
    fn = px.value_and_grad(lambda w, h, gain: sharded_layers(px.scan, h, w, gain))

    @px.jit(mesh=mesh, in_specs=(specs, P("data"), P()), out_specs=(specs, P()), donate_argnums=0)
    def step(w: dict, h: torch.Tensor, gain: torch.Tensor) -> tuple:
        loss, grads = fn(w, h, gain)
        return px.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    w, losses = px.device_put(W, specs, mesh), []
    for _ in range(5):
        w, loss = step(w, H, GAIN)
        losses.append(float(loss))
    return losses


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
def test_real_ranks_train_as_one_device_does(pool: Pool, world: int) -> None:
    w, want = px.tree.map(lambda t: t.clone().requires_grad_(), W), []
    for _ in range(5):
        loss = layers(python_scan, H, w, GAIN)
        want.append(loss.item())
        grads = torch.autograd.grad(loss, px.tree.leaves(w))
        w = px.tree.unflatten(
            px.tree.structure(w), [(p - 0.1 * g).detach().requires_grad_() for p, g in zip(px.tree.leaves(w), grads)]
        )
    for losses in pool.run(train, world, {"data": world}):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-5, atol=1e-6)


def test_a_carry_that_a_loop_starts_from_is_not_overwritten_while_the_backward_needs_it() -> None:
    def loss(scan: Any, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        start = x @ w  # a value of the step, which the scan saves and others read afterwards
        last, _ = scan(lambda c, gain: (torch.sin(c) * gain, None), start, torch.arange(1.0, 4.0))
        return (last * (start * 2.0)).sum()

    w, x = values(8, 8), values(8, 8, seed=1)
    leaf = w.clone().requires_grad_()
    want = torch.autograd.grad(loss(python_scan, leaf, x), leaf)[0]
    for backend in ("graph", "inductor"):
        step = px.jit(
            px.grad(lambda w, x: loss(px.scan, w, x)), mesh=px.make_mesh(data=1, simulate=True), backend=backend
        )
        assert_close(step(w, x), want)
