"""Cutting a graph into regions changes no result and moves no collective; regions that say the same are one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Interpreter

import ptrainx as px
from ptrainx import P
from ptrainx.compile import inductor
from ptrainx.compile.graph import copy_module, is_collective, is_wait
from ptrainx.compile.regions import Region, canonical, cut, put_in_place, region_module
from tests.compile.loops import looped, traced
from tests.compile.programs import MESHES, PROGRAMS, X, assert_close, values
from tests.compile.test_reuse import CASES

Made = list[tuple[Region, str]]


class Interpreted:
    """A region's nodes, run one by one; an output that takes an input's memory is written there."""

    boxed, __name__ = True, "interpreted"

    def __init__(self, region: Region, owner: GraphModule):
        self.module, self.overwrites = region_module(region, owner), region.overwrites

    def __call__(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        outs = list(Interpreter(self.module).run(*args))
        for i, j in self.overwrites:
            outs[i] = args[j].copy_(outs[i])
        args.clear()
        return outs


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Regions run without Inductor; gives those that are made, and what they say."""
    seen: Made = []

    def compiled(region: Region, owner: GraphModule, *rest: Any) -> Interpreted:
        seen.append((region, canonical(region)))
        return Interpreted(region, owner)

    monkeypatch.setattr(inductor, "_compiled", compiled)
    return seen


@pytest.mark.parametrize("axes", [MESHES[0], MESHES[-1]], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_in_regions(name: str, axes: dict[str, int], interpreted: Made) -> None:
    row = PROGRAMS[name]
    mesh = px.make_mesh(axes, simulate=True)
    step = px.jit(row.fn, mesh=mesh, in_specs=row.in_specs, out_specs=row.out_specs, backend="inductor")
    assert_close(step(*row.args), row.fn(*row.args))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("donate", [(), (0,), (0, 1)])
def test_memory_that_is_taken_over(name: str, donate: tuple[int, ...], interpreted: Made) -> None:
    fn = CASES[name]
    pair = [values(4, 4, seed=i) + 1.5 for i in range(2)]
    want = fn(*[t.clone() for t in pair])
    args = [t.clone() for t in pair]
    got = px.jit(fn, mesh=px.make_mesh(data=1), donate_argnums=donate, backend="inductor")(*args)
    assert_close(got, want)
    for i in {0, 1} - set(donate):
        assert torch.equal(args[i], pair[i]), f"argument {i} was not donated and has changed"
    assert donate or not any(region.overwrites for region, _ in interpreted)


def update(p: torch.Tensor, m: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m = 0.9 * m + g
    return p - 0.1 * m, m


UPDATES = {
    "update": (update, {0: "p", 1: "m"}),
    "swap": (lambda p, m, g: (m * 1.0, p * 2.0), {0: "m", 1: "p"}),
    "no product into its operand": (lambda p, m, g: (p @ g, m + 1), {1: "m"}),
    "read by two": (lambda p, m, g: (p * 2.0, m + p.t()), {0: "p", 1: "m"}),
    "other dtype and shape": (lambda p, m, g: (p.double() + 1, m[:2] * 2), {}),
    "not donated": (lambda p, m, g: (g * 2, g + 1), {}),
    "still read": (lambda p, m, g: (p + 1, p, m * 2), {2: "m"}),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_result_takes_the_memory_of_the_nearest_donated_argument(name: str) -> None:
    """Result -> the argument whose memory it takes."""
    fn, want = UPDATES[name]
    graph = traced(lambda p, m, g: list(fn(p, m, g)), (4, 4), (4, 4), (4, 4)).graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    (region,) = cut(graph, placeholders[:2])
    results = list(next(iter(graph.find_nodes(op="output"))).args[0])
    called = dict(zip(placeholders, "pmg"))
    assert {results.index(region.outputs[i]): called[region.inputs[j]] for i, j in region.overwrites} == want


LOWERED = {
    name: row for name, row in PROGRAMS.items() if name in ("training step", "training step, params sharded", "norms")
}


@pytest.mark.parametrize("name", LOWERED)
def test_collectives_stay_where_they_are(name: str) -> None:
    row = PROGRAMS[name]
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    step = px.jit(row.fn, mesh=mesh, in_specs=row.in_specs, out_specs=row.out_specs)
    module = copy_module(step.lower(*row.args).graphs[0].module)
    before = list(module.graph.nodes)
    position = {node: i for i, node in enumerate(before)}
    fixed = [n for n in before if is_collective(n) or is_wait(n)]
    regions = cut(module.graph)
    assert regions
    for region in regions:
        first, last = (end(position[n] for n in region.nodes) for end in (min, max))
        assert not any(first < position[n] < last for n in fixed), "a region spans a collective or a wait"
    assert [n for n in module.graph.nodes if n in set(fixed)] == fixed
    for region in reversed(regions):
        put_in_place(module.graph, region, lambda args: args)
    module.graph.lint()
    assert [n for n in module.graph.nodes if n in set(fixed)] == fixed


def names(nodes: Any) -> list[str]:
    return [str(n.target).removeprefix("aten.").split(".")[0] for n in nodes if n.target is not operator.getitem]


def regions_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[Graph, list[Region]]:
    module = traced(fn, *shapes)
    return module.graph, cut(module.graph)


def test_a_view_of_an_argument_that_others_read_is_made_outside() -> None:
    graph, (region,) = regions_of(lambda x: [x.t(), (x.t() * 2).sin() + x], (4, 4))
    assert "t" not in names(region.outputs)
    assert [n.op for n in region.inputs] == ["placeholder", "call_function"] or len(region.inputs) == 1
    result = list(next(iter(graph.find_nodes(op="output"))).args[0])
    assert result[0] not in region.nodes
    assert result[1] in region.outputs


def test_parts_of_a_tuple_that_is_made_outside_are_made_outside() -> None:
    _, (region,) = regions_of(lambda x: [x.split(2)[0], (x.split(2)[1] * 2).sin()], (4, 4))
    assert all(isinstance(n.meta["val"], torch.Tensor) for n in (*region.inputs, *region.outputs))


@pytest.mark.parametrize(
    "fn", [lambda x: [x.t()], lambda x: [x + 1], lambda x: [(x + 1).t()], lambda x: [x, x.view(-1)]]
)
def test_a_run_of_one_kernel_is_left_alone(fn: Callable[..., Any]) -> None:
    assert regions_of(fn, (4, 4))[1] == []


def test_a_loop_stands_between_regions() -> None:
    module = looped(lambda x: [(x * 2).sin()], 3, (4,))

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        (y,) = Interpreter(module).run((x + 1).cos())
        return [(y + 1).cos()]

    graph, regions = regions_of(fn, (4,))
    assert len(regions) == 2
    loops = [i for i, n in enumerate(graph.nodes) if "loop" in str(n.target) and n.op == "call_function"]
    position = {n: i for i, n in enumerate(graph.nodes)}
    first, second = regions
    assert max(position[n] for n in first.nodes) < loops[0] < min(position[n] for n in second.nodes)


def text(fn: Callable[..., Any], *shapes: tuple[int, ...], donated: int = 0) -> str:
    graph = traced(fn, *shapes).graph
    (region,) = cut(graph, list(graph.find_nodes(op="placeholder"))[:donated])
    return canonical(region)


def one(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [(x * 2).sin() + y]


def renamed(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    doubled = a * 2
    return [doubled.sin() + b]


OTHERS = {
    "constant": (lambda x, y: [(x * 3).sin() + y], ((4, 4), (4, 4)), 0),
    "type of a constant": (lambda x, y: [(x * 2.0).sin() + y], ((4, 4), (4, 4)), 0),
    "wiring": (lambda x, y: [(x * 2).sin() + x + 0 * y], ((4, 4), (4, 4)), 0),
    "operator": (lambda x, y: [(x * 2).cos() + y], ((4, 4), (4, 4)), 0),
    "shape": (one, ((4, 8), (4, 8)), 0),
    "strides": (lambda x, y: [(x * 2).sin().t().contiguous().t() + y], ((4, 4), (4, 4)), 0),
    "outputs": (lambda x, y: [(x * 2).sin() + y, x * 2], ((4, 4), (4, 4)), 0),
    "donated": (one, ((4, 4), (4, 4)), 1),
}


def test_regions_that_say_the_same_are_one() -> None:
    assert text(one, (4, 4), (4, 4)) == text(renamed, (4, 4), (4, 4))


@pytest.mark.parametrize("difference", OTHERS)
def test_regions_that_differ_are_two(difference: str) -> None:
    fn, shapes, donated = OTHERS[difference]
    assert text(fn, *shapes, donated=donated) != text(one, (4, 4), (4, 4))


def test_repeated_layers_share_a_region(interpreted: Made) -> None:
    def layers(x: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        for up, down in weights:
            x = torch.tanh(torch.relu(x @ up) @ down) + x
        return x

    mesh = px.make_mesh(data=2, simulate=True)
    weights = [(values(8, 16, seed=i), values(16, 8, seed=i + 1)) for i in range(4)]
    step = px.jit(layers, mesh=mesh, in_specs=(P(), [(P(None, "data"), P("data"))] * 4), backend="inductor")
    assert_close(step(X, weights), layers(X, weights))
    # The sum that ends each layer's second product is a cut: a first half, three middles and a last half, on two ranks.
    texts = [text for _, text in interpreted]
    assert (len(texts), len(set(texts))) == (10, 3)
