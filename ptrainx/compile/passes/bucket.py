"""Merges collectives that were asked for into few larger ones: all-reduces, all-gathers, reduce-scatters.

A collective has a price of its own, whatever it carries: on gloo about a tenth of a millisecond. Gradients and sharded
parameters come in dozens of small tensors; those over one axis, of one dtype, go together in a flat buffer.

    all-reduce       cat of the flat operands       -> views of the result
    reduce-scatter   cat of the flat operands       -> views of the result
    all-gather       cat of the flat shards         -> views of the result

Scatters and gathers become the collectives of `ops/pieces.py`, which take and give whole tensors one behind another,
so that nothing is rearranged. A bucket copies what would otherwise not be copied, so that only small tensors go into
one. Two collectives may share a bucket if neither needs the other: they have the same number of mergeable collectives
on the longest path that leads to them. Reductions fill their buckets in the order in which their operands are ready,
gathers in the order in which their results are read. Gathers that a remat repeats go with their like.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.graph import is_wait, origin_of, schema_name
from ptrainx.compile.passes.emit import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Emitter,
    bytes_of,
    last_placeholder,
    operand_of,
    value_of,
)
from ptrainx.compile.passes.sink import sink_waits
from ptrainx.compile.program import RankGraph
from ptrainx.compile.provenance import merged_origin
from ptrainx.ops.pieces import ALL_GATHER_PIECES, REDUCE_SCATTER_PIECES

__all__ = ["BUCKET_BYTES", "GATHER_BUCKET_BYTES", "REDUCED_BYTES", "SMALL_BYTES", "bucket_collectives"]

BUCKET_BYTES = 8 * 2**20
"""How much one merged reduction carries: large enough to be worth its price, small enough to overlap the backward."""
GATHER_BUCKET_BYTES = 2 * 2**20
"""What a merged gather makes: it is all there before the first of its parts is read."""
SMALL_BYTES = 256 * 2**10
"""The largest whole tensor that is gathered or scattered in a bucket. Between two processes of one host, packing eight
of them takes half the time up to here, the same at 512 KiB, and more from 1 MiB on."""
REDUCED_BYTES = 2**20
"""The largest tensor that is all-reduced in a bucket; a larger one is reduced in place, without a copy."""

aten = torch.ops.aten


def bucket_collectives(graph: RankGraph) -> RankGraph:
    """The graph with asked collectives of one kind, axis, operation and dtype merged."""
    nodes = list(sink_waits(graph).module.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    for members in _buckets(nodes, position):
        if len(members) > 1:
            _merge(graph, members, position)
            position.update((node, i) for i, node in enumerate(graph.module.graph.nodes))
    return graph


def _whole_bytes(node: Node) -> int:
    """The size of the larger of operand and result."""
    return max(bytes_of(node), bytes_of(node.args[0]))


def _mergeable(node: Node) -> bool:
    name = schema_name(node)
    if name not in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER) or not origin_of(node).asked or len(node.users) != 1:
        return False
    limit = REDUCED_BYTES if name == ALL_REDUCE else SMALL_BYTES
    return _whole_bytes(node) <= limit and value_of(node).numel() > 0


def _levels(nodes: list[Node]) -> dict[Node, int]:
    """How many mergeable collectives there are on the longest path to each node, itself included."""
    level: dict[Node, int] = {}
    for node in nodes:
        level[node] = max((level[n] for n in node.all_input_nodes), default=0) + _mergeable(node)
    return level


def _buckets(nodes: list[Node], position: dict[Node, int]) -> Iterable[list[Node]]:
    level = _levels(nodes)
    kinds: dict[tuple, list[Node]] = {}
    for node in nodes:
        if _mergeable(node):
            repeated = node.meta.get("recomputed")
            kind = (schema_name(node), *node.args[1:], value_of(node.args[0]).dtype, level[node], repeated)
            kinds.setdefault(kind, []).append(node)
    for (name, *_), candidates in kinds.items():
        gathers = name == ALL_GATHER
        limit = GATHER_BUCKET_BYTES if gathers else BUCKET_BYTES
        candidates.sort(key=lambda n: _first_read(n, position) if gathers else position[operand_of(n)])
        bucket: list[Node] = []
        size, ready, needed = 0, -1, math.inf
        for node in candidates:
            bytes_, made, read = _whole_bytes(node), position[operand_of(node)], _first_read(node, position)
            # A bucket runs behind its last operand, which has to come before the first reader of any result.
            if bucket and (size + bytes_ > limit or max(ready, made) >= min(needed, read)):
                yield bucket
                bucket, size, ready, needed = [], 0, -1, math.inf
                made, read = position[operand_of(node)], _first_read(node, position)
            bucket.append(node)
            size, ready, needed = size + bytes_, max(ready, made), min(needed, read)
        yield bucket


def _first_read(node: Node, position: dict[Node, int]) -> float:
    return min((position[reader] for wait in node.users for reader in wait.users), default=math.inf)


def _merge(graph: RankGraph, members: list[Node], position: dict[Node, int]) -> None:
    """Replaces the members and their waits by one collective over their operands, flattened and joined."""
    operands = [operand_of(m) for m in members]
    waits = [next(iter(m.users)) for m in members]
    assert all(map(is_wait, waits))
    last = max(operands, key=position.__getitem__)
    origin = merged_origin([origin_of(m) for m in members])
    start = last if last.op != "placeholder" else last_placeholder(graph.module.graph)
    assert start is not None
    pack = Emitter(graph, start.next, members[0], origin)
    flat = _packed(pack, operands)
    waited = pack.collective(*_merged(members, flat))
    readers = [reader for wait in waits for reader in wait.users]
    first = min(readers, key=position.__getitem__, default=None)
    unpack = pack if first is None else Emitter(graph, first, members[0], origin)
    for wait, member, part in zip(waits, members, _unpacked(unpack, members, waited)):
        wait.replace_all_uses_with(part)
        graph.module.graph.erase_node(wait)
        graph.module.graph.erase_node(member)


def _packed(emit: Emitter, operands: list[Node]) -> Node:
    return emit(aten.cat.default, [emit(aten.reshape.default, o, [-1]) for o in operands])


def _merged(members: list[Node], flat: Node) -> tuple[Any, ...]:
    """The operator that stands for the members together, and its arguments."""
    name, rest = schema_name(members[0]), members[0].args[1:]
    if name == ALL_GATHER:
        return ALL_GATHER_PIECES, flat, [value_of(operand_of(m)).numel() for m in members], *rest
    if name == REDUCE_SCATTER:
        op, *group = rest
        return REDUCE_SCATTER_PIECES, flat, op, [value_of(m).numel() for m in members], *group
    return members[0].target, flat, *rest


def _unpacked(emit: Emitter, members: list[Node], waited: Node) -> list[Node]:
    parts = emit(aten.split_with_sizes.default, waited, [value_of(m).numel() for m in members])
    return [
        emit(aten.view.default, emit(operator.getitem, parts, i), list(value_of(m).shape))
        for i, m in enumerate(members)
    ]
