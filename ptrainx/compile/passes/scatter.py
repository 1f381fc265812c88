"""Collectives that undo each other, or of which a rank needs its own part only.

    all_reduce, of which a rank keeps its own part      -> reduce_scatter            half the bytes
    all_gather of a reduce_scatter                      -> all_reduce                one collective instead of two
    all_gather of the own part of a value               -> the value                 nothing is sent
    the own part of an all_gather                       -> what was gathered         nothing is sent

What DTensor cuts is marked with its axis while it is traced (`Origin.cut`), so every rank decides alike.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.graph import axis_group, schema_name
from ptrainx.compile.passes.emit import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Emitter,
    collective_of,
    only_user,
    operand_of,
    own_part,
    same_layout,
    value_of,
    whole_part,
)
from ptrainx.compile.program import RankGraph

__all__ = ["cancel_gathers", "scatter_reductions"]

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def scatter_reductions(graph: RankGraph) -> RankGraph:
    """An all-reduce of which nothing but this rank's part is read becomes a reduce-scatter."""
    for node in list(graph.module.graph.nodes):
        cut = own_part(node, graph)
        if cut is None:
            continue
        whole, dim, axis = cut
        reduced = collective_of(whole, ALL_REDUCE)
        if reduced is None or graph.axis_of[axis_group(reduced)] != axis:
            continue
        split = operand_of(node)
        if [only_user(whole), only_user(split)] != [split, node] or not value_of(whole).is_contiguous():
            continue
        operand: Any
        operand, op, group = reduced.args
        n = graph.place_in(axis)[1]
        emit = Emitter(graph, reduced, reduced)
        if dim:
            parts = emit(aten.split.Tensor, operand, split.args[1], dim)
            operand = emit(aten.cat.default, [emit(operator.getitem, parts, i) for i in range(n)])
        scattered = emit.collective(c10d.reduce_scatter_tensor.default, operand, op, n, group)
        if not _replace_cut(node, scattered):
            for new in (scattered, operand_of(scattered)):
                graph.module.graph.erase_node(new)
            continue
        for old in (node, split, whole, reduced):
            if not old.users:
                graph.module.graph.erase_node(old)
    return graph


def cancel_gathers(graph: RankGraph) -> RankGraph:
    """Gathers of what was just scattered or cut, and cuts of what was just gathered, go."""
    for node in list(graph.module.graph.nodes):
        if own_part(node, graph) is not None:
            _cut_of_gather(graph, node)
        elif collective_of(node, ALL_GATHER) is not None and node.users:
            _gather_of_scatter(graph, node) or _gather_of_cut(graph, node)
    return graph


def _cut_of_gather(graph: RankGraph, node: Node) -> None:
    cut = own_part(node, graph)
    assert cut is not None
    whole, dim, axis = cut
    joined = whole_part(whole, graph.place_in(axis)[1])
    stacked, gathered_dim = (whole, 0) if joined is None else joined
    gather = collective_of(stacked, ALL_GATHER)
    if gather is not None and graph.axis_of[axis_group(gather)] == axis and gathered_dim == dim:
        _replace_cut(node, operand_of(gather))


def _replace_cut(node: Node, new: Node) -> bool:
    """Readers of a part read `new`, which holds the same; False, and nothing done, where the layout would change."""
    if same_layout(node, new):
        node.replace_all_uses_with(new)
        return True
    if not all(schema_name(user) == "aten::clone" and same_layout(user, new) for user in node.users):
        return False
    for user in list(node.users):
        user.replace_all_uses_with(new)
        user.graph.erase_node(user)
    return True


def _gather_of_scatter(graph: RankGraph, node: Node) -> bool:
    gather = collective_of(node, ALL_GATHER)
    assert gather is not None
    waited = operand_of(gather)
    scatter = collective_of(waited, REDUCE_SCATTER)
    if scatter is None or len(waited.users) != 1 or axis_group(scatter) != axis_group(gather):
        return False
    operand, op, _, group = scatter.args
    reduced = Emitter(graph, scatter, scatter).collective(c10d.all_reduce.default, operand, op, group)
    if not same_layout(node, reduced):
        graph.module.graph.erase_node(reduced)
        graph.module.graph.erase_node(operand_of(reduced))
        return False
    node.replace_all_uses_with(reduced)
    for old in (node, gather, waited, scatter):
        graph.module.graph.erase_node(old)
    return True


def _gather_of_cut(graph: RankGraph, node: Node) -> bool:
    gather = collective_of(node, ALL_GATHER)
    assert gather is not None
    part = operand_of(gather)
    while schema_name(part) in ("aten::clone", "aten::detach", "aten::alias"):
        part = operand_of(part)
    cut = own_part(part, graph)
    if cut is None or graph.axis_of[axis_group(gather)] != cut[2]:
        return False
    whole, dim, axis = cut
    target = node
    if dim:
        reader = next((u for user in node.users for part in user.users for u in part.users), None)
        joined = None if reader is None else whole_part(reader, graph.place_in(axis)[1])
        if reader is None or joined != (node, dim):
            return False
        target = reader
    if not same_layout(target, whole):
        whole = Emitter(graph, target, gather)(aten.clone.default, whole, memory_format=torch.contiguous_format)
        if not same_layout(target, whole):
            graph.module.graph.erase_node(whole)
            return False
    target.replace_all_uses_with(whole)
    return True
