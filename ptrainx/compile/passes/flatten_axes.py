"""Collectives over one axis after another become one over both.

    all_reduce(all_reduce(x, data), model)  ->  all_reduce(x, data*model)
    all_gather(all_gather(x, model), data)  ->  all_gather(x, data*model)

An all-reduce over a and b ranks in turn sends (2 - 1/a - 1/b) twice the value, over both at once (1 - 1/ab). A gather
sends the same either way, in one message instead of two. On a mesh whose axes have backends of their own there is no
group over both, and nothing is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.graph import axis_group
from ptrainx.compile.passes.emit import ALL_GATHER, ALL_REDUCE, Emitter, collective_of, only_user, same_layout
from ptrainx.compile.program import RankGraph
from ptrainx.mesh.axes import split_axes

__all__ = ["flatten_axes"]

c10d = torch.ops._c10d_functional


def flatten_axes(graph: RankGraph) -> RankGraph:
    """The graph with neighbouring all-reduces of one operation, and neighbouring gathers, merged."""
    if not graph.flat or len(graph.shape) < 2:
        return graph
    for node in list(graph.module.graph.nodes):
        _reduction(graph, node) or _gather(graph, node)
    return graph


def _reduction(graph: RankGraph, node: Node) -> bool:
    outer, inner = _pair(node, ALL_REDUCE)
    if outer is None or inner is None or outer.args[1] != inner.args[1]:
        return False
    group = _joint_group(graph, outer, inner)
    if group is None:
        return False
    emit = Emitter(graph, inner, inner)
    _replace(graph, node, emit.collective(c10d.all_reduce.default, inner.args[0], inner.args[1], group))
    return True


def _gather(graph: RankGraph, node: Node) -> bool:
    outer, inner = _pair(node, ALL_GATHER)
    if outer is None or inner is None:
        return False
    group = _joint_group(graph, outer, inner)
    # The members of the joint group are counted along the axes as the mesh has them: the inner gather's is the minor.
    order = list(graph.shape)
    major, minor = (split_axes(graph.axis_of[axis_group(n)]) for n in (outer, inner))
    if group is None or max(map(order.index, major)) > min(map(order.index, minor)):
        return False
    emit = Emitter(graph, inner, inner)
    n: Any = outer.args[1] * inner.args[1]  # type: ignore[operator]
    _replace(graph, node, emit.collective(c10d.all_gather_into_tensor.default, inner.args[0], n, group))
    return True


def _pair(node: Node, name: str) -> tuple[Node | None, Node | None]:
    """(outer, inner) where one collective's only reader is the other."""
    outer = collective_of(node, name)
    if outer is None:
        return None, None
    waited: Any = outer.args[0]
    inner = collective_of(waited, name)
    return outer, inner if inner is not None and only_user(waited) is outer else None


def _joint_group(graph: RankGraph, outer: Node, inner: Node) -> str | None:
    groups = [axis_group(outer), axis_group(inner)]
    axes = [axis for group in groups for axis in split_axes(graph.axis_of[group])]
    if len(set(axes)) < len(axes) or not set(axes) <= set(graph.shape):
        return None
    return graph.group_over(groups)


def _replace(graph: RankGraph, node: Node, new: Node) -> None:
    assert same_layout(node, new)
    node.replace_all_uses_with(new)
    for _ in range(2):  # the outer and the inner collective, each with its wait
        made: Any = node.args[0]
        operand = made.args[0]
        graph.module.graph.erase_node(node)
        graph.module.graph.erase_node(made)
        node = operand
