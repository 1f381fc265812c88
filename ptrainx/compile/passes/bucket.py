"""Merges all-reduces that were asked for into few large ones.

A collective has a price of its own, whatever it carries: on gloo about a tenth of a millisecond. Gradients come in
dozens of small tensors; their reductions over one axis become one per bucket, over a flat buffer. Two reductions may
share a bucket if neither needs the other: they have the same number of mergeable reductions on the longest path that
leads to them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from ptrainx.compile.graph import axis_group, is_wait, origin_of, schema_name
from ptrainx.compile.provenance import merged_origin
from ptrainx.compile.trace import RankGraph
from ptrainx.core.trace_context import Origin

__all__ = ["BUCKET_BYTES", "bucket_reductions"]

BUCKET_BYTES = 8 * 2**20
"""How much one merged reduction carries: large enough to be worth its price, small enough to overlap the backward."""

aten = torch.ops.aten


def bucket_reductions(graph: RankGraph) -> RankGraph:
    """The graph with asked all-reduces of one axis, operation and dtype merged, in the order of their operands."""
    nodes = list(graph.module.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    with graph.fake_mode:
        for members in _buckets(nodes, position):
            _merge(graph.module.graph, members, position)
    return graph


def _mergeable(node: Node) -> bool:
    return schema_name(node) == "_c10d_functional::all_reduce" and origin_of(node).asked and len(node.users) == 1


def _buckets(nodes: list[Node], position: dict[Node, int]) -> Iterable[list[Node]]:
    level: dict[Node, int] = {}
    for node in nodes:
        below = max((level[n] for n in node.all_input_nodes), default=0)
        level[node] = below + _mergeable(node)
    kinds: dict[tuple, list[Node]] = {}
    for node in nodes:
        if _mergeable(node):
            kinds.setdefault((axis_group(node), node.args[1], _value(node.args[0]).dtype, level[node]), []).append(node)
    for candidates in kinds.values():
        candidates.sort(key=lambda n: position[n.args[0]])  # type: ignore[index]
        bucket: list[Node] = []
        size, needed = 0, math.inf
        for node in candidates:
            bytes_ = _value(node.args[0]).numel() * _value(node.args[0]).element_size()
            # A bucket runs behind its last operand, which has to come before the first reader of any result.
            if bucket and (size + bytes_ > BUCKET_BYTES or position[node.args[0]] >= needed):  # type: ignore[index]
                yield bucket
                bucket, size, needed = [], 0, math.inf
            bucket.append(node)
            size += bytes_
            needed = min([needed, *(position[reader] for wait in node.users for reader in wait.users)])
        yield bucket


def _value(node: Any) -> torch.Tensor:
    return node.meta["val"]


def _merge(graph: Graph, members: list[Node], position: dict[Node, int]) -> None:
    """Replaces the members and their waits by one reduction over their operands, flattened and joined."""
    if len(members) < 2:
        return
    operands: list[Node] = [m.args[0] for m in members]  # type: ignore[misc]
    last = max(operands, key=position.__getitem__)
    origin = merged_origin([origin_of(m) for m in members])
    anchor = last if last.op != "placeholder" else _last_placeholder(graph)
    emit = _Emitter(graph, anchor, origin)
    flat = emit(aten.cat.default, [emit(aten.reshape.default, o, [-1]) for o in operands])
    reduced = emit(members[0].target, flat, *members[0].args[1:])
    waited = emit(torch.ops._c10d_functional.wait_tensor.default, reduced)
    parts = emit(aten.split_with_sizes.default, waited, [_value(o).numel() for o in operands])
    for i, (member, operand) in enumerate(zip(members, operands)):
        wait = next(iter(member.users))
        assert is_wait(wait)
        part = emit(aten.view.default, emit(operator.getitem, parts, i), list(_value(operand).shape))
        wait.replace_all_uses_with(part)
        graph.erase_node(wait)
        graph.erase_node(member)
    position.update((node, i) for i, node in enumerate(graph.nodes))


def _last_placeholder(graph: Graph) -> Node:
    return [n for n in graph.nodes if n.op == "placeholder"][-1]


class _Emitter:
    """Adds nodes one after the other, with their fake values."""

    def __init__(self, graph: Graph, anchor: Node, origin: Origin):
        self.graph, self.anchor, self.origin = graph, anchor, origin

    def __call__(self, target: Any, *args: Any) -> Node:
        with self.graph.inserting_after(self.anchor):
            node = self.graph.call_function(target, args)
        values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values)
        node.meta["custom"] = {"origin": self.origin}
        self.anchor = node
        return node
