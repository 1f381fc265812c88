"""Buckets of gathers and scatters, and when collectives start and are waited for: on steps with sharded parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.graph import copy_module, is_collective, is_wait, origin_of, schema_name
from ptrainx.compile.passes import bucket
from ptrainx.compile.passes.bucket import bucket_collectives
from ptrainx.compile.passes.common import share_common
from ptrainx.compile.passes.dead import drop_dead
from ptrainx.compile.passes.emit import ALL_GATHERS, REDUCE_SCATTERS, bytes_of
from ptrainx.compile.passes.identities import drop_identities
from ptrainx.compile.passes.schedule import issue_early
from ptrainx.compile.trace import RankGraph
from tests.compile.programs import assert_close, values

LAYERS, WIDTH = 6, 8
PARAMS = [{"w": values(WIDTH, WIDTH, seed=i), "b": values(WIDTH, seed=i + 20)} for i in range(LAYERS)]
BATCH = values(8, WIDTH, seed=50)
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes of a layer's parameters, whole


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in px.reshard(params, P()):
        x = torch.tanh(x @ p["w"] + p["b"])
    return x.square().mean()


def train(params: Any, x: torch.Tensor) -> Any:
    value, grads = px.value_and_grad(loss)(params, x)
    return px.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def on_one_device() -> tuple[Any, torch.Tensor]:
    """The step by torch's autograd."""
    leaves = px.tree.map(lambda p: p.clone().requires_grad_(), PARAMS)
    x = BATCH
    for p in leaves:
        x = torch.tanh(x @ p["w"] + p["b"])
    value = x.square().mean()
    value.backward()
    return px.tree.map(lambda p: (p - 0.1 * p.grad).detach(), leaves), value.detach()


SPECS = ((P("data"), P("data")), (P("data"), P()))


def step_on(**axes: int) -> Any:
    return px.jit(train, mesh=px.make_mesh(axes, simulate=True), in_specs=SPECS[0], out_specs=SPECS[1])


@functools.cache
def traced_on(data: int) -> Any:
    """Traced once; what changes a graph takes a copy."""
    return step_on(data=data).trace(PARAMS, BATCH)


def tidied() -> RankGraph:
    graph = traced_on(2).graphs[0]
    copied = dataclasses.replace(graph, module=copy_module(graph.module))
    return drop_dead(share_common(drop_identities(copied)))


def named(graph: RankGraph, names: Collection[str]) -> list[Any]:
    return [n for n in graph.module.graph.nodes if schema_name(n) in names]


# --- buckets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 4}, {"data": 2, "model": 2}], ids=str)
def test_a_step_with_sharded_parameters(axes: dict[str, int]) -> None:
    step = step_on(**axes)
    assert_close(step(PARAMS, BATCH), on_one_device())
    report = step.comms(PARAMS, BATCH)
    n = axes["data"]
    sharded = {kind: [c for c in report if c.kind == kind] for kind in ("all_gather", "reduce_scatter")}
    # All of it is small: one collective each way, of the bytes that the parts have.
    for rows in sharded.values():
        assert [(c.axis, c.count, c.bytes) for c in rows] == [("data", 1, LAYERS * LAYER * (n - 1) // n)]


def test_one_by_one_without_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "SMALL_BYTES", 0)
    step = step_on(data=2)
    assert_close(step(PARAMS, BATCH), on_one_device())
    counts: Counter = Counter()
    for c in step.comms(PARAMS, BATCH):
        counts[c.kind] += c.count
    assert (counts["all_gather"], counts["reduce_scatter"]) == (2 * LAYERS, 2 * LAYERS)


def test_gathers_fill_buckets_in_the_order_of_their_first_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "GATHER_BUCKET_BYTES", 2 * LAYER)
    graph = issue_early(bucket_collectives(tidied()))
    layers = [origin_of(n).layer for n in named(graph, ALL_GATHERS)]
    assert layers == ["0/{b,w}, 1/{b,w}", "2/{b,w}, 3/{b,w}", "4/{b,w}, 5/{b,w}"]
    assert [bytes_of(n) for n in named(graph, ALL_GATHERS)] == [2 * LAYER] * 3


def test_large_ones_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "SMALL_BYTES", WIDTH * 4)
    graph = bucket_collectives(tidied())
    for names in (ALL_GATHERS, REDUCE_SCATTERS):
        sizes = sorted(max(bytes_of(n), bytes_of(n.args[0])) for n in named(graph, names))
        assert sizes == sorted([WIDTH * WIDTH * 4] * LAYERS + [LAYERS * WIDTH * 4])


def test_what_a_remat_gathers_again_has_buckets_of_its_own() -> None:
    graph = tidied()
    for node in named(graph, ALL_GATHERS)[-2:]:
        node.meta["recomputed"] = 1
    bucket_collectives(graph)
    assert sorted((bytes_of(n), n.meta.get("recomputed")) for n in named(graph, ALL_GATHERS)) == [
        (LAYER, 1),
        ((LAYERS - 1) * LAYER, None),
    ]


# --- schedule --------------------------------------------------------------------------------------------------------


def under_way(graph: RankGraph, names: Collection[str], size: Any) -> tuple[int, int]:
    """The most that have started and are not yet waited for, in number and by `size`, as the graph runs."""
    going: list[Any] = []
    most = (0, 0)
    for node in graph.module.graph.nodes:
        if schema_name(node) in names:
            going.append(node)
        elif is_wait(node) and node.args[0] in going:
            going.remove(node.args[0])
        most = (max(most[0], len(going)), max(most[1], sum(size(n) for n in going)))
    return most


@pytest.mark.parametrize("window", [1, 2, 5])
def test_gathers_start_within_a_window(window: int) -> None:
    graph = issue_early(tidied(), window=window)
    assert under_way(graph, ALL_GATHERS, bytes_of)[0] == window
    assert len(named(graph, ALL_GATHERS)) == 2 * LAYERS


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_gathers_hold_no_more_than_a_limit(layers: int) -> None:
    graph = issue_early(tidied(), window=100, gathered_bytes=layers * LAYER)
    most = under_way(graph, ALL_GATHERS, bytes_of)[1]
    assert (layers - 1) * LAYER < most <= layers * LAYER


def test_the_next_gather_starts_before_what_reads_the_last() -> None:
    """With two on their way, layer i + 1 travels while layer i computes."""
    graph = issue_early(bucketed_by_layer(), window=2)
    nodes = list(graph.module.graph.nodes)
    at = {n: i for i, n in enumerate(nodes)}
    gathers = named(graph, ALL_GATHERS)
    products = [n for n in nodes if schema_name(n) == "aten::mm"][:LAYERS]
    assert len(gathers) == LAYERS
    for gather, product in zip(gathers[1:], products):
        assert at[gather] < at[product]
    for gather, product in zip(gathers[2:], products):
        assert at[gather] > at[product] - 10  # not long before


def bucketed_by_layer() -> RankGraph:
    before, bucket.GATHER_BUCKET_BYTES = bucket.GATHER_BUCKET_BYTES, LAYER
    try:
        return bucket_collectives(tidied())
    finally:
        bucket.GATHER_BUCKET_BYTES = before


def test_parameters_that_are_cast_at_once_are_gathered_one_by_one() -> None:
    """The whole tree is gathered and cast on the first lines; the window holds all the same."""

    def half(params: Any, x: torch.Tensor) -> torch.Tensor:
        params = px.tree.map(lambda p: p.double(), px.reshard(params, P()))
        x = x.double()
        for p in params:
            x = torch.tanh(x @ p["w"] + p["b"])
        return x.square().mean()

    step = px.jit(half, mesh=px.make_mesh(data=2, simulate=True), in_specs=(P("data"), P("data")))
    graph = drop_dead(share_common(drop_identities(step.trace(PARAMS, BATCH).graphs[0])))
    assert under_way(issue_early(graph, window=3), ALL_GATHERS, bytes_of)[0] == 3
    nodes = list(graph.module.graph.nodes)
    waits = [i for i, n in enumerate(nodes) if is_wait(n) and schema_name(n.args[0]) in ALL_GATHERS]
    products = [i for i, n in enumerate(nodes) if schema_name(n) == "aten::mm"]
    assert waits[-1] > products[-2]
    want = BATCH.double()
    for p in PARAMS:
        want = torch.tanh(want @ p["w"].double() + p["b"].double())
    assert_close(step(PARAMS, BATCH), want.square().mean())


@pytest.mark.parametrize("layers", [1, 3])
def test_scatters_hold_no_more_than_a_limit(layers: int) -> None:
    graph = issue_early(tidied(), scattered_bytes=layers * LAYER)
    assert under_way(graph, REDUCE_SCATTERS, lambda n: bytes_of(n.args[0]))[1] <= layers * LAYER
    without = issue_early(tidied())
    assert under_way(without, REDUCE_SCATTERS, lambda n: bytes_of(n.args[0]))[1] == LAYERS * LAYER


@pytest.mark.parametrize("settings", [(1, 1, 1), (2, LAYER, LAYER), (3, 10**9, 10**9)])
def test_results_do_not_depend_on_the_order(settings: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PREFETCH_GATHERS", "PREFETCH_BYTES", "SCATTER_BYTES")
    for name, value in zip(names, settings):
        monkeypatch.setattr(f"ptrainx.compile.passes.schedule.{name}", value)
    monkeypatch.setattr(bucket, "SMALL_BYTES", 0)
    assert_close(traced_on(4).lower().compile()(PARAMS, BATCH), on_one_device())


def test_every_rank_has_one_order() -> None:
    lowered = step_on(data=2, model=2).lower(PARAMS, BATCH)

    def order(graph: RankGraph) -> list[tuple]:
        found = [n for n in graph.module.graph.nodes if is_collective(n)]
        return [(schema_name(n), graph.axis_of[n.args[-1]], bytes_of(n)) for n in found]

    assert all(order(graph) == order(lowered.graphs[0]) for graph in lowered.graphs)


# --- on real ranks ---------------------------------------------------------------------------------------------------


def on_ranks(world: int) -> list[Any]:
    """The same step twice, in a world that is left and entered again in between."""
    found = []
    for _ in range(2):
        mesh = px.make_mesh(data=2, model=world // 2)
        step = px.jit(train, mesh=mesh, in_specs=SPECS[0], out_specs=SPECS[1])
        params, x = px.device_put(PARAMS, P("data"), mesh), px.device_put(BATCH, P("data"), mesh)
        owed = px.jit(lambda x: px.reshard(x.sum(0), P()), mesh=mesh, in_specs=P(("data", "model")), out_specs=P())
        flat = px.device_put(BATCH, P(("data", "model")), mesh)
        axes = [c.axis for c in owed.comms(flat)]
        found.append((px.device_get(step(params, x)), px.device_get(owed(flat)), axes))
        del step, params, x, owed, flat, mesh
        px.shutdown()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_on_real_ranks(pool: Any, world: int) -> None:
    for rounds in pool.run(on_ranks, world, world, timeout=120):
        for result, total, axes in rounds:
            assert_close(result, on_one_device())
            assert_close(total, BATCH.sum(0))
            assert axes == (["data*model"] if world == 4 else ["data"])
