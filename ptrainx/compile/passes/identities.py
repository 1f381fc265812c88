"""Removes operators that give back what they are given: autograd's detach, aliases, views to the same shape.

They hide outputs from the analysis of aliases and cost dispatch time.
"""

from __future__ import annotations

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
        if _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.module.graph.erase_node(node)
    return graph


def _is_identity(node: Node) -> bool:
    name = schema_name(node)
    if name in _ALWAYS:
        return isinstance(node.args[0], Node) and node.args[0].op != "get_attr"
    if name not in _IF_SAME or not node.args or not isinstance(node.args[0], Node):
        return False
    after, before = node.meta.get("val"), node.args[0].meta.get("val")
    return (
        isinstance(after, torch.Tensor)
        and isinstance(before, torch.Tensor)
        and (after.shape, after.stride(), after.dtype, after.device)
        == (before.shape, before.stride(), before.dtype, before.device)
    )
