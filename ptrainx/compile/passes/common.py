"""Computes once what is computed twice: one operator on the same operands, collectives included."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ptrainx.compile.graph import is_pure, schema_name
from ptrainx.compile.program import RankGraph

__all__ = ["NEVER_SHARED", "key_of", "share_common"]

NEVER_SHARED = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
"""Their values are what was in memory: no two are the same."""


def share_common(graph: RankGraph) -> RankGraph:
    """Readers of a repeated computation read the first one. Draws with one key are one draw, as they should be."""
    first: dict[Any, Node] = {}
    for node in list(graph.module.graph.nodes):
        if node.op != "call_function" or not is_pure(node) or schema_name(node) in NEVER_SHARED:
            continue
        earlier = first.setdefault(
            (node.target, key_of(node.args), key_of(node.kwargs), node.meta.get("recomputed")), node
        )
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.module.graph.erase_node(node)
    return graph


def key_of(value: Any) -> Any:
    """Something hashable that is equal for equal arguments; 1, 1.0 and True are three."""
    if isinstance(value, Node):
        return value
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(key_of(v) for v in value))
    if isinstance(value, dict):
        return tuple(sorted((k, key_of(v)) for k, v in value.items()))
    return type(value).__name__, repr(value)
