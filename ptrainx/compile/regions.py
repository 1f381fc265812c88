"""Cuts a legal graph into regions: runs of ordinary operators that a compiler may take as a whole.

Enters: a graph after the passes, in the order that the schedule chose. Leaves: the regions, each with the values that
enter and leave it. Between two regions stands at least one node that is no compiler's business: a collective, a wait,
a loop, an operator whose effect is the point. So a region never delays a collective or hastens a wait. Next stage:
`inductor`, which compiles regions and puts calls in their place; regions that say the same are compiled once.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ptrainx.compile.graph import (
    IMPURE,
    is_call,
    is_collective,
    is_loop,
    is_wait,
    packs,
    read_until,
    schema_name,
    writes,
)
from ptrainx.compile.reuse import storage_roots

__all__ = ["Region", "canonical", "cut", "is_ordinary", "put_in_place", "region_module"]

_FEWEST = 2
"""A run with fewer operators that compute stays as it is: one kernel is as fast by itself."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A run of a graph's nodes.

    Attributes:
        nodes: in order.
        inputs: values from outside that they read, in the order of the first reading.
        outputs: those of their values that are read outside, in order; none shares memory with an input.
        overwrites: (index of an output, index of the input whose memory it takes).
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    overwrites: tuple[tuple[int, int], ...]


def is_ordinary(node: Node) -> bool:
    """Whether a compiler may have a node: an operator on real numbers that computes a value and does nothing else."""
    if node.op != "call_function" or is_loop(node) or is_call(node):
        return False
    if is_collective(node) or is_wait(node) or packs(node):
        return False
    if node.target is operator.getitem:
        return is_ordinary(node.args[0])  # type: ignore[arg-type]
    name = schema_name(node)
    if not name or writes(node) or name in IMPURE or name == "ptrainx::axis_index":
        return False
    return not any(value.is_complex() for n in (node, *node.all_input_nodes) for value in _tensors(n))


def cut(graph: Graph, donated: Iterable[Node] = ()) -> list[Region]:
    """The regions of a graph, in order. May reorder views of what comes from outside a region to stand before it.

    Args:
        graph: legal, without writes; the bodies of its loops are graphs of their own.
        donated: placeholders whose memory may be taken once nobody reads it any more.
    """
    _gather_parts(graph)
    roots = storage_roots(graph)
    found = []
    for run in _runs(graph):
        region = _region(run, roots)
        if region is not None:
            found.append(region)
    last_read = _last_reads(graph, roots)
    position = {node: i for i, node in enumerate(graph.nodes)}
    free = {roots[node] for node in donated if node in roots}
    return [
        dataclasses.replace(region, overwrites=_overwrites(region, roots, free, last_read, position))
        for region in found
    ]


def _gather_parts(graph: Graph) -> None:
    """Puts every getitem right behind what it is a part of."""
    for node in reversed(list(graph.nodes)):
        if node.target is operator.getitem:
            node.args[0].append(node)


def _runs(graph: Graph) -> list[list[Node]]:
    runs: list[list[Node]] = [[]]
    for node in graph.nodes:
        if is_ordinary(node):
            runs[-1].append(node)
        elif node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
            continue  # It runs nothing, so it may stand before the region.
        else:
            runs.append([])
    return [run for run in runs if run]


def _region(run: list[Node], roots: dict[Node, int]) -> Region | None:
    """A region of a run's nodes, and of no others; views of outside memory that outside reads go before it."""
    inside = set(run)
    outer = {roots[n] for node in run for n in node.all_input_nodes if n not in inside and n in roots}
    shared = [n for n in run if roots.get(n) in outer and any(user not in inside for user in n.users)]
    hoisted = _with_sources(shared, inside)
    nodes = [n for n in run if n not in hoisted]
    if sum(not _is_view(n, roots) for n in nodes) < _FEWEST:
        return None
    own, node = set(nodes), nodes[-1]
    before = []
    while node is not nodes[0]:
        node = node.prev
        if node not in own:
            before.append(node)
    for node in reversed(before):
        nodes[0].prepend(node)
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own)
    outputs = [n for n in nodes if any(user not in own for user in n.users)]
    return Region(tuple(nodes), tuple(inputs), tuple(outputs), ())


def _with_sources(nodes: Iterable[Node], inside: set[Node]) -> set[Node]:
    """The nodes with everything inside that they are made from; of a tuple that is so taken, all parts."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in inside and node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
            waiting.extend(user for user in node.users if user.target is operator.getitem)
    return found


def _is_view(node: Node, roots: dict[Node, int]) -> bool:
    """Whether a node computes nothing: its result shares memory with an operand, or is a part of a tuple."""
    if node.target is operator.getitem:
        return True
    if node not in roots:
        parts = [roots.get(user) for user in node.users]
        return bool(parts) and all(part in {roots.get(n) for n in node.all_input_nodes} for part in parts)
    return roots[node] in {roots.get(n) for n in node.all_input_nodes}


def _last_reads(graph: Graph, roots: dict[Node, int]) -> dict[int, float]:
    """Storage -> the position of its last reader. A collective reads until it is waited for, the output for ever."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    last: dict[int, float] = {}
    for node in graph.nodes:
        until = float("inf") if node.op == "output" else max(position[reader] for reader in read_until(node))
        for operand in node.all_input_nodes:
            for root in _roots_of(operand, roots):
                last[root] = max(last.get(root, -1.0), until)
    return last


def _roots_of(node: Node, roots: dict[Node, int]) -> list[int]:
    return [roots[node]] if node in roots else [roots[user] for user in node.users if user in roots]


def _overwrites(
    region: Region, roots: dict[Node, int], free: set[int], last_read: dict[int, float], position: dict[Node, int]
) -> tuple[tuple[int, int], ...]:
    """Pairs an output with an input that dies here, the nearest first: an update with what it updates."""
    end = max(position[node] for node in region.nodes)
    seen = [roots.get(n) for n in region.inputs]
    dying = {
        node: i
        for i, node in enumerate(region.inputs)
        if roots.get(node) in free and last_read[roots[node]] <= end and seen.count(roots[node]) == 1
    }
    inside = set(region.nodes)
    pairs = []
    for i, output in enumerate(region.outputs):
        for node, distance in _pointwise_sources(output, inside).items():
            if node in dying and _layout(node) == _layout(output):
                pairs.append((distance, i, dying[node]))
    chosen: dict[int, int] = {}
    memory: set[int] = set()
    for _, i, j in sorted(pairs):
        root = roots[region.outputs[i]]
        if i not in chosen and j not in chosen.values() and root not in memory:
            chosen[i] = j
            memory.add(root)
    return tuple(sorted(chosen.items()))


def _pointwise_sources(output: Node, inside: set[Node]) -> dict[Node, int]:
    """Values that an output is made from element by element -> how many operators lie between."""
    distance = {output: 0}
    waiting = [output]
    for node in waiting:
        if node not in inside or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            continue
        for operand in node.all_input_nodes:
            if operand not in distance:
                distance[operand] = distance[node] + 1
                waiting.append(operand)
    return {node: steps for node, steps in distance.items() if node not in inside}


def _layout(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype, value.device


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def region_module(region: Region, owner: GraphModule) -> GraphModule:
    """A region as a graph of its own: its inputs are placeholders, its outputs a tuple."""
    graph, copies = Graph(), {}
    for node in region.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
    for node in region.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in region.outputs))
    return GraphModule(owner, graph)


def put_in_place(graph: Graph, region: Region, target: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]) -> None:
    """Replaces a region's nodes by one call of `target([*inputs])` and a getitem for each output."""
    with graph.inserting_before(region.nodes[0]):
        call = graph.call_function(target, (list(region.inputs),))
        call.meta["val"] = tuple(node.meta["val"] for node in region.outputs)
        call.meta["custom"] = dict(region.nodes[0].meta.get("custom") or {})
        for i, node in enumerate(region.outputs):
            part = graph.call_function(operator.getitem, (call, i))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    for node in reversed(region.nodes):
        graph.erase_node(node)


def canonical(region: Region) -> str:
    """A region in text: equal for regions that compute the same, on inputs of one kind, wired alike."""
    number = {node: f"%{i}" for i, node in enumerate((*region.inputs, *region.nodes))}
    lines = [f"{number[node]} = {_kind(node)}" for node in region.inputs]
    for node in region.nodes:
        name = "getitem" if node.target is operator.getitem else str(node.target)
        arguments = [_text(a, number) for a in node.args] + [f"{k}={_text(v, number)}" for k, v in node.kwargs.items()]
        lines.append(f"{number[node]} = {name}({', '.join(arguments)})")
    outputs = ", ".join(f"{number[node]}: {_kind(node)}" for node in region.outputs)
    return "\n".join([*lines, f"return {outputs}", f"overwrites {region.overwrites}"])


def _kind(node: Node) -> str:
    value = node.meta["val"]
    return f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.device}"


def _text(value: Any, number: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return number[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(v, number) for v in value)}]"
    return f"{type(value).__name__}:{value!r}"
