"""The predicted peak of a step's memory against the allocations that a run makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ptrainx as px
from ptrainx import P
from tests.compile.models import Model, convnet, gpt, mlp, scanned, train
from tests.support.pool import Pool

MODELS = {
    "GPT": lambda: gpt(layers=4, D=64, T=64, B=8, V=256, heads=4),
    "MLP": lambda: mlp((256, 512, 512, 128), B=256),
    "convnet": lambda: convnet(channels=32, size=32, B=16),
    "loop": lambda: scanned(layers=6, D=64, B=256),
}


def measured_peak(run: Any) -> tuple[int, int]:
    """(the most that is allocated at once beyond the start, what is left at the end), by the allocator's events.

    What gloo's own threads free is not seen, and counts as left.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        run()
    now = peak = 0
    for event in events.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, now


def both_peaks(model: Model, weights: Any = None, donate: bool = True, **axes: int) -> tuple[int, int, int]:
    """(predicted, measured, what of that may be wrong) bytes of a step's second call, arguments included."""
    mesh = px.make_mesh(axes or {"data": 1})
    step, state, batch = train(model, mesh, weights)
    if not donate:
        step = px.jit(step.fn, mesh=mesh, in_specs=step.in_specs, out_specs=step.out_specs)
    specs, *_ = step.in_specs
    state, batch = px.device_put(state, specs, mesh), px.device_put(batch, P("data"), mesh)
    out = step(state, *batch)[0]
    state = out if donate else state
    del out
    (compiled,) = step._cache.values()
    memory = compiled.lowered.memory()
    held = [state]
    del state

    def run() -> None:
        out = step(held.pop() if donate else held[0], *batch)
        del out

    # With donation the memory of results is that of arguments: what grows is counted, not what is given back.
    peak, left = measured_peak(run)
    return memory.peak_bytes, memory.argument_bytes + peak, max(left, 0)


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "kept"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_peak_is_predicted_within_a_tenth(model: Any, donate: bool) -> None:
    predicted, measured, _ = both_peaks(model(), donate=donate)
    assert predicted == pytest.approx(measured, rel=0.1)


def on_two_ranks(name: str, sharded: bool) -> tuple[int, int, int]:
    return both_peaks(MODELS[name](), P("data") if sharded else None, data=2)


@pytest.mark.parametrize("sharded", [False, True], ids=["data-parallel", "sharded"])
@pytest.mark.parametrize("name", ["GPT", "MLP", "loop"])
def test_the_peak_of_real_ranks(pool: Pool, name: str, sharded: bool) -> None:
    for predicted, measured, unseen in pool.run(on_two_ranks, 2, name, sharded):
        assert 0.9 * (measured - unseen) <= predicted <= 1.1 * measured


def test_the_holders_of_the_peak() -> None:
    """x of 4,000 bytes and its double at the end, beside the argument; each with its line."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return (y + x.sum()) * y

    report = px.jit(fn, mesh=px.make_mesh(data=1)).lower(torch.ones(1000)).memory()
    assert (report.argument_bytes, report.result_bytes) == (4000, 4000)
    # x, y and y + x.sum(), whose memory the result takes; the sum has died.
    assert report.peak_bytes == 12_004
    assert [h.bytes for h in report.holders] == [4000, 4000, 4000, 4]
    assert {h.what for h in report.holders} == {"x", "mul", "add", "sum"}
    line = fn.__code__.co_firstlineno
    assert {h.source.rsplit(":")[-1] for h in report.holders if h.what != "x"} == {str(line + 1), str(line + 2)}
    assert str(report).splitlines()[0].startswith("peak 12,004 bytes at ")


def test_holders_say_what_they_are_to_the_step() -> None:
    model = gpt(layers=2, D=32, T=32, B=8, V=64)
    step, state, batch = train(model, px.make_mesh(data=2, simulate=True))
    report = step.lower(state, *batch).memory()
    assert sum(h.bytes for h in report.holders) == report.peak_bytes
    roles = {h.role for h in report.holders}
    assert {"parameter", "activation"} <= roles
    largest = report.holders[0]
    assert largest.layer
    assert largest.source.split(":")[0].endswith("models.py")


def test_donation_is_told() -> None:
    """Given away, an argument's memory is the result's."""
    x = torch.ones(1000)
    for donate, peak in (((), 8000), (0, 4000)):
        lowered = px.jit(lambda x: x * 2, mesh=px.make_mesh(data=1), donate_argnums=donate).lower(x)
        assert lowered.memory().peak_bytes == peak
