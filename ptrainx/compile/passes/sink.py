"""Moves waits, and what only reshapes or converts a gathered value, to right before the first reader.

A step that begins with `params = cast(reshard(params, P()))` would otherwise have all of its parameters waited for, and
converted, before its first product.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from ptrainx.compile.graph import is_pure, is_wait, schema_name
from ptrainx.compile.passes.emit import ALL_GATHERS
from ptrainx.compile.program import RankGraph

__all__ = ["is_light", "sink_waits"]

_LIGHT = {
    "aten::_to_copy",
    "aten::_unsafe_view",
    "aten::cat",
    "aten::clone",
    "aten::constant_pad_nd",
    "aten::permute",
    "aten::reshape",
    "aten::slice",
    "aten::split_with_sizes",
    "aten::t",
    "aten::transpose",
    "aten::unsqueeze",
    "aten::view",
}


def is_light(node: Node) -> bool:
    """Whether a node moves or converts a value, and computes nothing."""
    return node.target is operator.getitem or (schema_name(node) in _LIGHT and is_pure(node))


def sink_waits(graph: RankGraph) -> RankGraph:
    """The graph with waits, and what is made of gathers alone, as late as they can be."""
    gathered: set[Node] = set()
    nodes = list(graph.module.graph.nodes)
    for node in nodes:
        operands = node.all_input_nodes
        if (is_wait(node) and schema_name(operands[0]) in ALL_GATHERS) or (
            len(operands) == 1 and operands[0] in gathered and is_light(node)
        ):
            gathered.add(node)
    for node in reversed(nodes):
        if node.users and (is_wait(node) or node in gathered):
            first: Any = min(node.users)  # nodes compare by their place in the graph
            first.prepend(node)
    return graph
