"""What passes that rewrite collectives have in common: adding nodes with their fake values, and reading patterns."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ptrainx.compile.graph import is_wait, origin_of, schema_name
from ptrainx.compile.program import RankGraph
from ptrainx.core.trace_context import Origin

__all__ = [
    "ALL_GATHER",
    "ALL_GATHERS",
    "ALL_REDUCE",
    "REDUCE_SCATTER",
    "REDUCE_SCATTERS",
    "VIEWS",
    "Emitter",
    "bytes_of",
    "collective_of",
    "last_placeholder",
    "only_user",
    "operand_of",
    "own_part",
    "same_layout",
    "value_of",
    "whole_part",
]

c10d = torch.ops._c10d_functional
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = (
    f"_c10d_functional::{name}" for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
)
ALL_GATHERS = {ALL_GATHER, "ptrainx::all_gather_pieces"}
REDUCE_SCATTERS = {REDUCE_SCATTER, "ptrainx::reduce_scatter_pieces"}
VIEWS = {
    "aten::view",
    "aten::_unsafe_view",
    "aten::reshape",
    "aten::unsqueeze",
    "aten::squeeze",
    "aten::detach",
    "aten::alias",
}
"""Operators whose result holds the elements of their operand in the same order, if that is contiguous."""


class Emitter:
    """Adds nodes in front of another, in order, with fake values and with what a node like them knows of its origin.

    Args:
        graph: where.
        before: the node in front of which they go.
        like: a node that they stand for; its `meta` is theirs, but for the value.
        origin: instead of that node's.
    """

    def __init__(self, graph: RankGraph, before: Node, like: Node, origin: Origin | None = None):
        self.graph, self.before = graph, before
        self.meta = {name: value for name, value in like.meta.items() if name not in ("val", "tensor_meta")}
        if origin is not None:
            self.meta["custom"] = {"origin": origin}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """The new node."""
        with self.graph.module.graph.inserting_before(self.before):
            node = self.graph.module.graph.call_function(target, args, kwargs)
        values, options = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.graph.fake_mode:
            value = target(*values, **options)
        node.meta = {**self.meta, "val": value}
        return node

    def collective(self, target: Any, *args: Any) -> Node:
        """The wait for a new collective."""
        return self(c10d.wait_tensor.default, self(target, *args))


def value_of(node: Any) -> torch.Tensor:
    """A node's fake value."""
    return node.meta["val"]


def bytes_of(node: Any) -> int:
    """The size of a node's value."""
    return value_of(node).numel() * value_of(node).element_size()


def last_placeholder(graph: Graph) -> Node | None:
    """The last argument."""
    return next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)


def operand_of(node: Node) -> Node:
    """A node's first argument."""
    operand: Any = node.args[0]
    return operand


def only_user(node: Node) -> Node | None:
    """The one reader of a node; None if there are none or more."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def collective_of(node: Any, *names: str) -> Node | None:
    """The collective of one of these names that a node waits for."""
    if not isinstance(node, Node) or not is_wait(node):
        return None
    made: Any = node.args[0]
    return made if schema_name(made) in names and len(made.users) == 1 else None


def same_layout(a: Node, b: Node) -> bool:
    """Whether two values are tensors of the same shape, strides and dtype."""
    x, y = value_of(a), value_of(b)
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return False
    return (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def own_part(node: Node, graph: RankGraph) -> tuple[Node, int, str] | None:
    """(whole, dim, axis) of a node that is this rank's part, along an axis, of a value that every rank along it holds.

    Only what DTensor cut counts: a user's `x[:4]` may look like the first rank's part, and is the same on all.
    """
    axis = origin_of(node).cut
    if node.target is not operator.getitem or not axis:
        return None
    split: Any = node.args[0]
    if schema_name(split) != "aten::split":
        return None
    whole, size, dim = (*split.args, 0)[:3]
    place, n = graph.place_in(axis)
    if node.args[1] != place or value_of(whole).shape[dim] != size * n:
        return None
    return whole, dim % value_of(whole).ndim, axis


def whole_part(node: Node, n: int) -> tuple[Node, int] | None:
    """(stacked, dim) of a node that joins along `dim` the n equal parts of a value that are stacked along dim 0."""
    if schema_name(node) != "aten::cat":
        return None
    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    if len(parts) != n or any(p.target is not operator.getitem or p.args[1] != i for i, p in enumerate(parts)):
        return None
    split = parts[0].args[0]
    if schema_name(split) != "aten::split" or any(p.args[0] is not split for p in parts):
        return None
    stacked, size, along = (*split.args, 0)[:3]
    if along != 0 or value_of(stacked).shape[0] != size * n:
        return None
    return stacked, dim % value_of(node).ndim
