"""Orders collectives for overlap: each starts as soon as its operand exists and is waited for right before its first
reader, within bounds on the memory that this holds.

A parameter's gather could start with the step: its operand is an argument. It starts while at most
`PREFETCH_GATHERS` gathers and `PREFETCH_BYTES` of gathered values, itself among them, have been started and not yet
been read. What leads from arguments to a gather alone (casts, packing) is computed right before it.

A small reduction of what a few light operators make from arguments is put at the start.

A reduce-scatter holds its whole operand until it is waited for, its result is a part of that. Once `SCATTER_BYTES` are
held, the oldest is waited for, whoever reads it later.

The order follows from the graph alone, and so is the same on every rank.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ptrainx.compile.graph import is_collective, is_wait, schema_name
from ptrainx.compile.passes.emit import (
    ALL_GATHERS,
    REDUCE_SCATTERS,
    bytes_of,
    collective_of,
    last_placeholder,
    only_user,
    operand_of,
)
from ptrainx.compile.passes.sink import is_light, sink_waits
from ptrainx.compile.program import RankGraph

__all__ = ["PREFETCH_BYTES", "PREFETCH_GATHERS", "SCATTER_BYTES", "issue_early"]

PREFETCH_GATHERS = 4
PREFETCH_BYTES = 32 * 2**20
SCATTER_BYTES = 32 * 2**20
QUICK_BYTES = 256 * 2**10
QUICK_OPERATORS = 12


def issue_early(
    graph: RankGraph,
    window: int | None = None,
    gathered_bytes: int | None = None,
    scattered_bytes: int | None = None,
) -> RankGraph:
    """Moves collectives up and waits down.

    Args:
        graph: one rank's.
        window: how many gathers are on their way at most; `PREFETCH_GATHERS` if None.
        gathered_bytes: what they make at most, but for one; `PREFETCH_BYTES` if None.
        scattered_bytes: what reduce-scatters hold at most, but for one; `SCATTER_BYTES` if None.
    """
    _start_reductions(graph)
    _start_what_is_quick(graph)
    sink_waits(graph)
    _start_gathers(
        graph,
        PREFETCH_GATHERS if window is None else window,
        PREFETCH_BYTES if gathered_bytes is None else gathered_bytes,
    )
    _end_scatters(graph, SCATTER_BYTES if scattered_bytes is None else scattered_bytes)
    return graph


def _start_reductions(graph: RankGraph) -> None:
    """The order of collectives among each other stays that of their operands."""
    nodes = list(graph.module.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if is_collective(node) and schema_name(node) not in ALL_GATHERS:
            last = max((n for n in node.all_input_nodes), key=position.__getitem__, default=None)
            if last is not None and last.op != "placeholder" and not _between(last, node):
                last.append(node)


def _start_what_is_quick(graph: RankGraph) -> None:
    """Puts a small reduction of what little work makes from arguments at the start of the step.

    The weight of a batch's targets, for one, by which a loss is divided: behind the forward pass it would be waited for
    at once, at its start it is there long before.
    """
    anchor = last_placeholder(graph.module.graph)
    if anchor is None:
        return
    for node in list(graph.module.graph.nodes):
        if is_collective(node) and schema_name(node) not in ALL_GATHERS and bytes_of(node) <= QUICK_BYTES:
            made_by = _quick(node)
            if made_by is not None:
                for member in (*made_by, node):
                    if member > anchor:
                        anchor.append(member)
                        anchor = member


def _quick(collective: Node) -> list[Node] | None:
    """What makes a collective's operand, in order; None if it is more than a few light operators on arguments."""
    found: set[Node] = set()
    stack = [n for n in collective.all_input_nodes if n.op != "placeholder"]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        light = node.op == "get_attr" or torch.Tag.pointwise in getattr(node.target, "tags", ()) or _is_sum(node)
        if len(found) == QUICK_OPERATORS or not (light or is_light(node)) or bytes_of(node) > QUICK_BYTES:
            return None
        found.add(node)
        stack.extend(n for n in node.all_input_nodes if n.op != "placeholder")
    return sorted(found)


def _is_sum(node: Node) -> bool:
    return schema_name(node) in ("aten::sum", "aten::amax", "aten::amin", "aten::mean")


def _between(last: Node, node: Node) -> bool:
    """Whether the node follows its operand already, behind other collectives of the same operand's making."""
    current = last.next
    while is_collective(current):
        if current is node:
            return True
        current = current.next
    return False


def _start_gathers(graph: RankGraph, window: int, limit: int) -> None:
    nodes = list(graph.module.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    waits = [n for n in nodes if collective_of(n, *ALL_GATHERS) is not None]
    start = last_placeholder(graph.module.graph)
    behind: dict[Node, Node] = {}  # node -> the last that was put behind it
    for k, wait in enumerate(waits):
        gather = operand_of(wait)
        after, held = k - 1, bytes_of(gather)
        while after >= 0 and k - after < window and held + bytes_of(waits[after]) <= limit:
            held += bytes_of(waits[after])
            after -= 1
        moved, ready = _own_chain(gather, position)
        anchors = [n for n in (waits[after] if after >= 0 else start, ready) if n is not None]
        if not anchors:
            continue
        anchor = max(anchors, key=position.__getitem__)
        for node in (*moved, gather):
            behind.get(anchor, anchor).append(node)
            behind[anchor] = node


def _own_chain(gather: Node, position: dict[Node, int]) -> tuple[list[Node], Node | None]:
    """(what leads to a gather alone, in order; the last of what else it needs, if it is no argument)."""
    own: set[Node] = {gather}
    ready: Node | None = None
    stack = list(gather.all_input_nodes)
    while stack:
        node = max(stack, key=position.__getitem__)  # readers before what they read
        stack = [n for n in stack if n is not node]
        if node.op == "placeholder":
            continue
        if (node.op == "get_attr" or is_light(node)) and all(user in own for user in node.users):
            own.add(node)
            stack.extend(node.all_input_nodes)
        elif ready is None or position[node] > position[ready]:
            ready = node
    return sorted(own - {gather}, key=position.__getitem__), ready


def _end_scatters(graph: RankGraph, limit: int) -> None:
    under_way: list[Node] = []
    held = 0
    for node in list(graph.module.graph.nodes):
        if is_wait(node) and node in under_way:
            under_way.remove(node)
            held -= bytes_of(operand_of(operand_of(node)))
        elif schema_name(node) in REDUCE_SCATTERS and only_user(node) is not None:
            size = bytes_of(node.args[0])
            while under_way and held + size > limit:
                oldest = under_way.pop(0)
                held -= bytes_of(operand_of(operand_of(oldest)))
                node.prepend(oldest)
            under_way.append(next(iter(node.users)))
            held += size
