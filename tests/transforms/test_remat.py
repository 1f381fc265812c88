"""`remat`: the gradient is the plain one; what the backward needs is computed again, or saved as the policy says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.graph import is_collective, schema_name, walk
from ptrainx.errors import InputError
from tests.compile.programs import assert_close, values

X = values(8, 16)
KEY = px.random.key(0)
W = {"up": values(3, 16, 32, seed=1), "down": values(3, 32, 16, seed=2)}
MESHES = ({"data": 1}, {"data": 2})
NAMES = px.checkpoint_policies.save_only_these_names("hidden")
POLICIES = {
    "nothing": None,
    "everything": "everything_saveable",
    "dots": "dots_saveable",
    "names": NAMES,
    "own": lambda operator, name: operator == "aten::tanh",
}


def block(h: torch.Tensor, w: dict, key: torch.Tensor) -> torch.Tensor:
    hidden = px.checkpoint_name(torch.tanh(h @ w["up"]), "hidden")
    return h + px.random.dropout(key, torch.sin(hidden) @ w["down"], 0.5)


def unrolled(one: Callable[..., Any], w: dict, x: torch.Tensor) -> torch.Tensor:
    h = x
    for i, key in enumerate(px.random.split(KEY, 3)):
        h = one(h, px.tree.map(lambda t, i=i: t[i], w), key)
    return h.square().mean()


def scanned(one: Callable[..., Any], w: dict, x: torch.Tensor) -> torch.Tensor:
    last, _ = px.scan(lambda h, s: (one(h, s[0], s[1]), None), x, (w, px.random.split(KEY, 3)))
    return last.square().mean()


def whole(one: Callable[..., Any], w: dict, x: torch.Tensor) -> torch.Tensor:
    """A whole scan rematerialized, besides its steps."""
    return px.remat(lambda w, x: scanned(one, w, x))(w, x)


def nested(one: Callable[..., Any], w: dict, x: torch.Tensor) -> torch.Tensor:
    pair = px.remat(lambda h, a, b: one(one(h, a, KEY), b, KEY))
    parts = [px.tree.map(lambda t, i=i: t[i], w) for i in range(3)]
    return pair(pair(x, parts[0], parts[1]), parts[1], parts[2]).square().mean()


def plain_gradient(form: Callable[..., Any]) -> tuple:
    leaves, tree = px.tree.flatten(W)
    inputs = [leaf.clone().requires_grad_() for leaf in leaves]
    plain = {scanned: unrolled, whole: unrolled}.get(form, form)
    if form is nested:
        parts = [px.tree.map(lambda t, i=i: t[i], px.tree.unflatten(tree, inputs)) for i in range(3)]
        h = X
        for i in (0, 1, 1, 2):
            h = block(h, parts[i], KEY)
        value = h.square().mean()
    else:
        value = plain(block, px.tree.unflatten(tree, inputs), X)
    return value.detach(), px.tree.unflatten(tree, list(torch.autograd.grad(value, inputs)))


def gradient(form: Callable[..., Any], policy: Any) -> Any:
    return px.value_and_grad(lambda w, x: form(px.remat(block, policy), w, x))


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("form", [unrolled, scanned, whole, nested])
def test_the_gradient_is_the_plain_one(form: Callable[..., Any], policy: Any, axes: dict) -> None:
    step = px.jit(gradient(form, policy), mesh=px.make_mesh(axes, simulate=True), in_specs=(P(), P("data")))
    assert_close(step(W, X), plain_gradient(form))


def test_outside_a_step_too() -> None:
    for policy in POLICIES.values():
        assert_close(gradient(unrolled, policy)(W, X), plain_gradient(unrolled))


def counts(form: Callable[..., Any], policy: Any, *names: str) -> list[int]:
    mesh = px.make_mesh(data=2, simulate=True)
    lowered = px.jit(gradient(form, policy), mesh=mesh, in_specs=(P(), P("data"))).lower(W, X)
    found = [(schema_name(n), times) for n, times in walk(lowered.graphs[0].module.graph)]
    return [sum(times for name, times in found if name == wanted) for wanted in names]


# Forward operators of three layers; those of the backward are others, but for matrix products: two for each.
@pytest.mark.parametrize("form", [unrolled, scanned])
@pytest.mark.parametrize(
    ("policy", "tanh", "sin", "mm"),
    [
        ("everything_saveable", 3, 3, 6 + 12),
        (None, 6, 6, 6 + 12 + 3),
        ("dots_saveable", 6, 6, 6 + 12),
        (NAMES, 3, 6, 6 + 12),
    ],
    ids=["everything", "nothing", "dots", "names"],
)
def test_what_is_computed_twice(form: Callable[..., Any], policy: Any, tanh: int, sin: int, mm: int) -> None:
    # The first layer's input needs no gradient where layers are apart; in a scan all steps are alike.
    spared = 1 if form is unrolled else 0
    assert counts(form, policy, "aten::tanh", "aten::sin", "aten::mm") == [tanh, sin, mm - spared]


def gathers(policy: Any) -> tuple[int, int]:
    """How often parameters are gathered, and bytes that a step saves for the backward, under ZeRO-3."""
    specs = {"up": P(None, "data"), "down": P(None, "data")}
    one = px.remat(lambda h, w, key: block(h, px.reshard(w, P()), key), policy)
    fn = px.grad(lambda w, x: unrolled(one, w, x))
    lowered = px.jit(fn, mesh=px.make_mesh(data=2, simulate=True), in_specs=(specs, P("data"))).lower(W, X)
    comms = [c for c in lowered.comms() if c.kind == "all_gather"]
    return sum(c.bytes for c in comms), sum(1 for n, _ in walk(lowered.graphs[0].module.graph) if is_collective(n))


def test_sharded_parameters_are_gathered_again() -> None:
    once, again = gathers("everything_saveable")[0], gathers(None)[0]
    assert again == 2 * once > 0


def peak(policy: Any, form: Callable[..., Any]) -> int:
    """The most bytes alive at once while a gradient of many wide layers runs."""
    from torch.profiler import ProfilerActivity, profile

    w = {"a": torch.ones(16, 64, 64) / 64}
    one = px.remat(lambda h, w: torch.tanh(torch.sin(torch.cos(h @ w["a"]))) + h, policy)

    def loss(w: dict, x: torch.Tensor) -> torch.Tensor:
        if form is scanned:
            return px.scan(lambda h, s: (one(h, s), None), x, w)[0].sum()
        for i in range(16):
            x = one(x, px.tree.map(lambda t, i=i: t[i], w))
        return x.sum()

    step = px.jit(px.grad(loss), mesh=px.make_mesh(data=1, simulate=True))
    x = torch.ones(4096, 64)
    step(w, x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step(w, x)
    live = most = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


@pytest.mark.parametrize("form", [unrolled, scanned])
def test_the_measured_peak_falls(form: Callable[..., Any]) -> None:
    layer = 4096 * 64 * 4
    kept, again = peak("everything_saveable", form), peak(None, form)
    # Kept: at least three values a layer. Computed again: a layer's input each, and one layer's values.
    assert kept > 16 * 3 * layer
    assert again < (16 + 8) * layer


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InputError, match="no policy 'dots'"):
        px.remat(block, "dots")
