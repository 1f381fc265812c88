"""A gathered value that is only read in a narrower dtype is cast before the gather: fewer bytes, the same bits.

    all_gather(x).bfloat16()            ->  all_gather(x.bfloat16())
    cat(all_gather(x).split(4), 1)...   ->  likewise, through what only moves elements

A cast goes element by element, so it may come first. It stays behind where another reader needs the wide value.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.graph import schema_name
from ptrainx.compile.passes.emit import ALL_GATHER, VIEWS, Emitter, collective_of, operand_of, same_layout, value_of
from ptrainx.compile.program import RankGraph

__all__ = ["narrow_gathers"]

aten = torch.ops.aten

_MOVES = VIEWS | {
    "aten::cat",
    "aten::clone",
    "aten::permute",
    "aten::slice",
    "aten::split",
    "aten::split_with_sizes",
    "aten::t",
    "aten::transpose",
}
_KEEPS = {"dtype", "layout", "device"}
"""What a cast of autograd's says beside the dtype, and does not change."""


def narrow_gathers(graph: RankGraph) -> RankGraph:
    """The graph with casts moved in front of the gathers that lead to nothing else."""
    for node in list(graph.module.graph.nodes):
        gather = collective_of(node, ALL_GATHER)
        if gather is None or not value_of(node).is_floating_point():
            continue
        found = _readers(node)
        if found is not None:
            _cast_first(graph, node, gather, *found)
    return graph


def _readers(gathered: Node) -> tuple[list[Node], list[Node], torch.dtype] | None:
    """(what moves the gathered elements, in order, the casts at the ends, their dtype), if there is nothing else."""
    moved = {gathered}
    moves: list[Node] = []
    casts: list[Node] = []
    node, pending = gathered, set(gathered.users)
    while pending:
        node = node.next
        if node not in pending:
            continue
        pending.discard(node)
        if _is_narrowing(node):
            casts.append(node)
        elif (schema_name(node) in _MOVES or node.target is operator.getitem) and moved >= set(node.all_input_nodes):
            moves.append(node)
            moved.add(node)
            pending |= set(node.users)
        else:
            return None
    dtypes = {value_of(cast).dtype for cast in casts}
    return (moves, casts, dtypes.pop()) if len(dtypes) == 1 else None


def _is_narrowing(node: Node) -> bool:
    """Whether a node casts a floating-point value to a smaller floating-point dtype, and does nothing else."""
    if schema_name(node) != "aten::_to_copy" or set(node.kwargs) - _KEEPS:
        return False
    after, before = value_of(node), value_of(operand_of(node))
    return (
        (after.device, after.layout) == (before.device, before.layout)
        and after.is_floating_point()
        and before.is_floating_point()
        and after.element_size() < before.element_size()
    )


def _cast_first(
    graph: RankGraph, gathered: Node, gather: Node, moves: list[Node], casts: list[Node], dtype: torch.dtype
) -> None:
    emit = Emitter(graph, gather, gather)
    cast = emit(aten._to_copy.default, gather.args[0], dtype=dtype)
    new = {gathered: emit.collective(gather.target, cast, *gather.args[1:])}

    def moved(operand: Node) -> Node:
        return new.get(operand, operand)

    for node in moves:
        args: Any = torch.fx.node.map_arg(node.args, moved)
        kwargs: Any = torch.fx.node.map_arg(node.kwargs, moved)
        new[node] = Emitter(graph, node, node)(node.target, *args, **kwargs)
    for node in casts:
        narrow = new[operand_of(node)]
        if not same_layout(node, narrow):
            narrow = Emitter(graph, node, node)(aten.clone.default, narrow)  # as a cast lays out its result
        assert same_layout(node, narrow)
        node.replace_all_uses_with(narrow)
    for node in reversed([gather, gathered, *moves, *casts]):
        graph.module.graph.erase_node(node)
