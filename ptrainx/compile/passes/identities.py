"""Removes operators that give back what they are given: autograd's detach, aliases, views to the same shape, casts to a
wider dtype and back.

They hide outputs from the analysis of aliases and cost dispatch time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.graph import schema_name
from ptrainx.compile.program import RankGraph

__all__ = ["drop_identities"]

_ALWAYS = {"aten::detach", "aten::alias", "aten::lift_fresh", "aten::lift_fresh_copy"}
_IF_SAME = {
    "aten::view",
    "aten::_unsafe_view",
    "aten::reshape",
    "aten::expand",
    "aten::permute",
    "aten::slice",
    "aten::_to_copy",
}


def drop_identities(graph: RankGraph) -> RankGraph:
    """Readers of an identity read its operand instead."""
    for node in list(graph.module.graph.nodes):
        same = node.args[0] if _is_identity(node) else _cast_there_and_back(node)
        if isinstance(same, Node):
            node.replace_all_uses_with(same)
            graph.module.graph.erase_node(node)
    return graph


def _is_identity(node: Node) -> bool:
    name = schema_name(node)
    if name in _ALWAYS:
        return isinstance(node.args[0], Node) and node.args[0].op != "get_attr"
    if name not in _IF_SAME or not node.args or not isinstance(node.args[0], Node):
        return False
    return _is_like(node, node.args[0])


def _is_like(node: Node, other: Node) -> bool:
    after, before = node.meta.get("val"), other.meta.get("val")
    return (
        isinstance(after, torch.Tensor)
        and isinstance(before, torch.Tensor)
        and (after.shape, after.stride(), after.dtype, after.device)
        == (before.shape, before.stride(), before.dtype, before.device)
    )


def _cast_there_and_back(node: Node) -> Node | None:
    """The value that a node casts back, if it was cast to a floating-point dtype that holds all of its own's."""
    wide: Any = node.args[0] if node.args else None
    if schema_name(node) != "aten::_to_copy" or not isinstance(wide, Node) or schema_name(wide) != "aten::_to_copy":
        return None
    start: Any = wide.args[0]
    if not isinstance(start, Node) or not _is_like(node, start):
        return None
    narrow, through = start.meta["val"].dtype, wide.meta["val"].dtype
    holds = narrow.is_floating_point and through.is_floating_point and torch.promote_types(narrow, through) == through
    return start if holds else None
