"""One gather for all that gather the same: directly, through views, through a cast of what is gathered anyway.

    g = all_gather(x)                 g = all_gather(x)
    h = all_gather(x.view(8))     ->  h = g.view(16)
    k = all_gather(x.bfloat16())      k = g.bfloat16()

A gather that a remat repeats on purpose stays: sharing would keep its result alive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.graph import axis_group, schema_name
from ptrainx.compile.passes.emit import ALL_GATHER, VIEWS, Emitter, collective_of, same_layout, value_of
from ptrainx.compile.program import RankGraph

__all__ = ["share_gathers"]

aten = torch.ops.aten


def share_gathers(graph: RankGraph) -> RankGraph:
    """Later gathers of a value over one axis read the first one."""
    first: dict[tuple, Node] = {}
    for node in list(graph.module.graph.nodes):
        gather = collective_of(node, ALL_GATHER)
        if gather is None:
            continue
        root, casts = _root(gather.args[0])
        place = (axis_group(gather), gather.meta.get("recomputed"))
        # The same casts first; or the value itself, to be cast after it was gathered.
        for key, missing in (((*place, root, casts), ()), ((*place, root, ()), casts)):
            if key in first and _read(graph, first[key], node, missing):
                break
        else:
            first.setdefault((*place, root, casts), node)
    return graph


def _root(operand: Any) -> tuple[Node, tuple[torch.dtype, ...]]:
    """(what a value is made of by views and casts, the dtypes that it was cast to)."""
    casts: list[torch.dtype] = []
    while operand.op == "call_function":
        source = operand.args[0] if operand.args else None
        if not isinstance(source, Node) or not isinstance(source.meta.get("val"), torch.Tensor):
            break
        if not (value_of(source).is_contiguous() and value_of(operand).is_contiguous()):
            break
        if schema_name(operand) == "aten::_to_copy" and set(operand.kwargs) == {"dtype"}:
            casts.append(value_of(operand).dtype)
        elif schema_name(operand) not in VIEWS:
            break
        operand = source
    return operand, tuple(reversed(casts))


def _read(graph: RankGraph, earlier: Node, node: Node, casts: tuple[torch.dtype, ...]) -> bool:
    """Makes readers of `node` read the earlier gather, viewed and cast."""
    emit = Emitter(graph, node, node)
    new = emit(aten.view.default, earlier, list(value_of(node).shape))
    for dtype in casts:
        new = emit(aten._to_copy.default, new, dtype=dtype)
    if not same_layout(node, new):
        return False
    node.replace_all_uses_with(new)
    gather: Any = node.args[0]
    graph.module.graph.erase_node(node)
    graph.module.graph.erase_node(gather)
    return True
