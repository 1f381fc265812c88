"""Dynamic loss scaling: the scales of torch's GradScaler, and steps that all devices skip together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P, optim
from ptrainx.errors import HyperparameterError
from tests.compile.programs import values

# --- the sequence of scales ------------------------------------------------------------------------------------------

FLAGS = [bool(int(c)) for c in "1110111111110001111111110111110000000000111111111111"]


def scales_of_torch(flags, initial, interval, factor):
    """What torch.amp.GradScaler's scale is after each step."""
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", initial, factor, 1 / factor, interval)
    found = []
    for finite in flags:
        optimizer.zero_grad()
        scaler.scale(weight * (1.0 if finite else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


@pytest.mark.parametrize(("initial", "interval", "factor"), [(2.0**15, 3, 2.0), (1024.0, 1, 4.0), (2.0**120, 2, 8.0)])
def test_scales_are_those_of_torch(initial, interval, factor):
    scaling = px.DynamicLossScale(initial=initial, growth_interval=interval, factor=factor, min=1e-30)
    state, found = scaling.init(), []
    for finite in FLAGS:
        state = scaling.adjust(state, torch.tensor(finite))
        found.append(state.scale.item())
    assert found == scales_of_torch(FLAGS, initial, interval, factor)


def test_it_stops_at_min_and_below_infinity():
    scaling = px.DynamicLossScale(initial=4.0, growth_interval=1, min=1.0)
    state = scaling.init()
    for wanted in (2.0, 1.0, 1.0):
        state = scaling.adjust(state, False)
        assert state.scale == wanted
    for _ in range(200):
        state = scaling.adjust(state, True)
    assert state.scale == 2.0**127


# --- scaling and unscaling -------------------------------------------------------------------------------------------


def test_unscaled_halves_are_float32_and_exact():
    scaling = px.DynamicLossScale(initial=2.0**14)
    state = scaling.init()
    small = torch.tensor([2.0**-10, 3.0]).half()
    out = scaling.unscale(state, {"h": small, "f": torch.tensor([2.0**-10]), "d": torch.ones(1, dtype=torch.float64)})
    assert torch.equal(out["h"], small.float() / 2**14)
    assert torch.equal(out["f"], torch.tensor([2.0**-24]))
    assert [out[name].dtype for name in "hfd"] == [torch.float32, torch.float32, torch.float64]
    assert torch.equal(scaling.scale(state, torch.tensor(0.5)), torch.tensor(2.0**13))


SPECS = [P(), P("data"), P(None, "model"), P("data", "model"), P(("data", "model"))]


@pytest.mark.parametrize("bad", [None, float("inf"), -float("inf"), float("nan")], ids=str)
def test_all_finite_over_shards_costs_a_scalar_an_axis(bad):
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    leaves = [values(8, 4, seed=i) for i in range(len(SPECS))]
    answers, check = [], px.jit(optim.all_finite, mesh=mesh, in_specs=(SPECS,))
    for i in range(len(SPECS)):  # the bad element lies on the last device alone
        changed = [leaf.clone() for leaf in leaves]
        if bad is not None:
            changed[i][-1, -1] = bad
        answers.append(bool(check(changed)))
        assert answers[-1] == all(leaf.isfinite().all() for leaf in changed)
    sent = check.comms(leaves)
    assert {(row.kind, row.bytes // row.count) for row in sent} == {("all_reduce", 6)}


def test_all_finite_of_nothing_is_true():
    assert optim.all_finite({"a": None})


# --- whole steps -----------------------------------------------------------------------------------------------------

START = {"a": values(8, 16), "b": values(16, 8, seed=1)}
ROWS, STEPS = 16, 6
TARGETS = torch.arange(ROWS) % 8
SCALING = px.DynamicLossScale(initial=2.0**12, growth_interval=2)
OVERFLOWS = {1, 4}


def batch(step):
    """Rows of which, in some steps, one is too large for float16: only one device meets it."""
    x = values(ROWS, 8, seed=step)
    if step in OVERFLOWS:
        x[ROWS - 3] *= 1e6
    return x


def by_torch(clip):
    """The same training with GradScaler and casts by hand: parameters at the end, and the scale after each step."""
    params = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in START.items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", SCALING.initial, 2.0, 0.5, SCALING.growth_interval)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        hidden = torch.relu(batch(step).half() @ params["a"].half())
        scaler.scale(F.cross_entropy((hidden @ params["b"].half()).float(), TARGETS)).backward()
        scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(params.values(), clip)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {name: leaf.detach() for name, leaf in params.items()}, scales


def make_step(optimizer, microbatches, gather):
    def loss_fn(params, batch):
        x, targets = batch
        if gather:
            params = px.reshard(params, P(None, None))
        return F.cross_entropy((torch.relu(x @ params["a"]) @ params["b"]).float(), targets)

    policy = px.Precision(compute=torch.float16)

    def step(state, batch):
        params, before, scale = state
        grad = px.value_and_grad(lambda params, batch: SCALING.scale(scale, policy(loss_fn)(params, batch)))
        if microbatches > 1:
            grad = px.accumulate_grads(grad, microbatches)
        _, grads = grad(params, batch)
        grads = SCALING.unscale(scale, grads)
        finite = optim.all_finite(grads)
        updates, after = optimizer.update(grads, before, params)
        new = (optim.apply_updates(params, updates), after)
        return (*px.tree.where(finite, new, (params, before)), SCALING.adjust(scale, finite)), finite

    return step


def train(axes, spec, microbatches, clip, backend, simulate):
    sgd = optim.sgd(0.1, momentum=0.9)
    optimizer = optim.chain(optim.clip_by_global_norm(clip), sgd) if clip else sgd
    mesh = px.make_mesh(axes, simulate=simulate)
    state: Any = (START, optimizer.init(START), SCALING.init())
    specs = px.match_rules([(r"(^|/)a$", spec["a"]), (r"(^|/)b$", spec["b"]), (r".*", P())], state)
    step = px.jit(
        make_step(optimizer, microbatches, spec["a"] == P("data")),
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=(specs, P()),
        donate_argnums=0,
        backend=backend,
    )
    state = px.device_put(state, specs, mesh)
    scales, flags = [], []
    for number in range(STEPS):
        state, finite = step(state, (batch(number), TARGETS))
        scales.append(float(state[2].scale))
        flags.append(bool(finite))
    return px.device_get(state[0]), scales, flags


WHOLE, SHARDED = {"a": P(), "b": P()}, {"a": P("data"), "b": P("data")}
COLUMNS = {"a": P(None, "model"), "b": P("model")}
TRAININGS = {
    "one device": ({"data": 1}, WHOLE, 1, None, "graph"),
    "data=2, clipped": ({"data": 2}, WHOLE, 1, 0.2, "graph"),
    "data=2, accumulated and clipped": ({"data": 2}, WHOLE, 4, 0.2, "graph"),
    "data=2, in parts": ({"data": 2}, SHARDED, 1, 0.2, "graph"),
    "data=4, in parts, accumulated": ({"data": 4}, SHARDED, 2, None, "graph"),
    "data=2,model=2, clipped": ({"data": 2, "model": 2}, COLUMNS, 1, 0.2, "graph"),
    "data=2, in parts, inductor": ({"data": 2}, SHARDED, 1, 0.2, "inductor"),
}


def assert_trained(result, clip):
    params, scales, flags = result
    expected, expected_scales = by_torch(clip)
    assert flags == [step not in OVERFLOWS for step in range(STEPS)]
    assert scales == expected_scales
    for name in START:
        torch.testing.assert_close(params[name], expected[name], rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", TRAININGS)
def test_an_overflow_on_one_device_is_skipped_by_all(name):
    axes, spec, microbatches, clip, backend = TRAININGS[name]
    assert_trained(train(axes, spec, microbatches, clip, backend, simulate=True), clip)


def on_real_ranks():
    return train({"data": 2}, SHARDED, 1, 0.2, "graph", simulate=False)


@pytest.mark.processes
def test_an_overflow_on_one_of_two_processes_is_skipped_by_both(pool):
    for result in pool.run(on_real_ranks, 2):
        assert_trained(result, 0.2)


def test_a_skipped_step_keeps_every_bit():
    optimizer = optim.adamw(0.1)
    step = px.jit(make_step(optimizer, 1, False), mesh=px.make_mesh(data=2, simulate=True), in_specs=(P(), P("data")))
    state = step((START, optimizer.init(START), SCALING.init()), (batch(0), TARGETS))[0]
    before = px.device_get(state)
    after, finite = px.device_get(step(state, (batch(1), TARGETS)))
    assert not finite
    for old, new in zip(px.tree.leaves(before[:2]), px.tree.leaves(after[:2])):
        assert torch.equal(old, new)


def test_settings_out_of_range_are_told_together():
    with pytest.raises(HyperparameterError) as caught:
        px.DynamicLossScale(initial=0.5, growth_interval=0, factor=1.0, min=1.0)
    for part in ("initial=0.5", "growth_interval=0", "factor=1.0", ">= min=1.0", "a finite number > 1"):
        assert part in str(caught.value)
    with pytest.raises(HyperparameterError, match="min=-1"):
        px.DynamicLossScale(min=-1.0)
