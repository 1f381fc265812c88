"""The cost model, on graphs small enough to work out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.timeline import Hardware, Link, collective_time, predict_time
from ptrainx.core.trace_context import Origin
from tests.compile.loops import looped, rank_graph, traced
from tests.compile.models import gpt, train

c10d = torch.ops._c10d_functional
# A [8, 8] float product: 1,024 operations, one second. Bytes cost nothing. A reduction of 256 bytes over 2: 256 sent.
HARDWARE = Hardware(flops_per_s=1024, bytes_per_s=1e30, links={"data": Link(256, 0.0), "model": Link(128, 0.0)})
SIZES = {"data": 2, "model": 2}


def reduced(x: torch.Tensor, axis: str = "data") -> torch.Tensor:
    return c10d.all_reduce(x, "sum", axis)


def behind(x: torch.Tensor) -> list[torch.Tensor]:
    """A product, its sum under way during two more, a product of both."""
    a = x @ x
    under_way = reduced(a)
    b = (a @ x) @ x
    return [c10d.wait_tensor(under_way) @ b]


def at_once(x: torch.Tensor) -> list[torch.Tensor]:
    """The sum waited for where it starts."""
    a = x @ x
    total = c10d.wait_tensor(reduced(a))
    return [total @ ((a @ x) @ x)]


def two_in_turn(x: torch.Tensor) -> list[torch.Tensor]:
    """Two sums share a link: the second arrives after two seconds; one second of product hides one of them."""
    first, second = reduced(x), reduced(x + x)
    a = x @ x
    return [c10d.wait_tensor(first) + c10d.wait_tensor(second) + a]


def two_axes(x: torch.Tensor) -> list[torch.Tensor]:
    """A second on one link, two on the other, side by side."""
    first, second = reduced(x), reduced(x + x, "model")
    return [c10d.wait_tensor(first) + c10d.wait_tensor(second)]


# function -> (compute, communication, total, without overlap)
TABLE: dict[Any, tuple[float, float, float, float]] = {
    behind: (4, 1, 4, 5),
    at_once: (4, 1, 5, 5),
    two_in_turn: (1, 2, 2, 3),
    two_axes: (0, 3, 2, 3),
}


@pytest.mark.parametrize("fn", TABLE)
def test_by_hand(fn: Any) -> None:
    graph = rank_graph(traced(fn, (8, 8)), {"data": "data", "model": "model"}, Origin("m.py:1"))
    found = predict_time(graph, SIZES, HARDWARE)
    assert (found.compute, found.communication, found.total, found.unoverlapped) == pytest.approx(TABLE[fn])
    assert found.exposed == pytest.approx(found.total - found.compute)


def test_a_loop_takes_its_steps() -> None:
    """Five steps of a product and a sum that the next one needs: two seconds each."""
    graph = rank_graph(
        looped(lambda x: [c10d.wait_tensor(reduced(x @ x))], 5, (8, 8)), {"data": "data"}, Origin("m.py:1")
    )
    found = predict_time(graph, SIZES, HARDWARE)
    assert (found.compute, found.communication, found.total) == pytest.approx((5, 5, 10))


def test_collectives() -> None:
    """Rings of 4 over 1,024 bytes: latency a hop, bytes as `comms()` counts them."""
    x, link = torch.zeros(256), Link(1024.0, 0.25)
    assert collective_time("all_reduce", x, 4, link) == pytest.approx(2 * 0.75 + 6 * 0.25)
    assert collective_time("all_gather", x, 4, link) == pytest.approx(3 + 3 * 0.25)
    assert collective_time("reduce_scatter", x, 4, link) == pytest.approx(0.75 + 3 * 0.25)
    assert collective_time("all_to_all", x, 4, link) == pytest.approx(0.75 + 0.25)
    assert collective_time("all_reduce", x, 1, link) == 0


@pytest.mark.parametrize("weights", [None, P("data")], ids=["data-parallel", "sharded"])
def test_a_training_step_hides_communication(weights: Any) -> None:
    """Never longer than without overlap, never shorter than compute or the wire; here some of it is hidden."""
    step, state, batch = train(gpt(layers=4), px.AbstractMesh(data=4), weights)
    lowered = step.lower(state, *batch)
    flops = lowered.cost().flops
    hardware = Hardware(flops, 1e12, link=Link(2 * lowered.comms().total_bytes, 1e-6))
    found = lowered.timeline(hardware)
    assert max(found.compute, found.communication) <= found.total < found.unoverlapped
    assert found.unoverlapped == pytest.approx(found.compute + found.communication)
    assert "hidden" in str(found)
