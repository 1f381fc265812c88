"""What a legal graph is, and the questions that passes ask of one.

A legal graph has its placeholders first, only ATen operators, our own operators, functional collectives and `getitem`
after them, and one output, a list. Every collective's result is read by `wait_tensor` alone, and everyone else reads
the wait. No operator writes into a placeholder.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import Origin
from ptrainx.mesh.exchange import COLLECTIVES

__all__ = [
    "IMPURE",
    "alias_roots",
    "axis_group",
    "check_legal",
    "is_collective",
    "is_pure",
    "is_wait",
    "origin_of",
    "output_node",
    "schema_name",
    "writes",
]

WAIT = "_c10d_functional::wait_tensor"
IMPURE: set[str] = {"ptrainx::debug_print"}
"""Operators whose effect is the point: kept, in order, even if nobody reads their result."""


def schema_name(node: Node) -> str:
    """`aten::add`, or "" for a node that is no operator call."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if node.op == "call_function" and schema is not None else ""


def is_collective(node: Node) -> bool:
    """Whether a node sends anything to other ranks."""
    return schema_name(node) in COLLECTIVES


def is_wait(node: Node) -> bool:
    """Whether a node waits for a collective."""
    return schema_name(node) == WAIT


def axis_group(node: Node) -> str:
    """The group name of a collective."""
    return node.args[-1]  # type: ignore[return-value]


def writes(node: Node) -> bool:
    """Whether an operator writes into an operand."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def is_pure(node: Node) -> bool:
    """Whether a node may be dropped when nobody reads it."""
    if node.op in ("placeholder", "output"):
        return False
    return not writes(node) and schema_name(node) not in IMPURE


def output_node(graph: Graph) -> Node:
    """The output."""
    return next(iter(graph.find_nodes(op="output")))


def origin_of(node: Node) -> Origin:
    """Where a node comes from."""
    return (node.meta.get("custom") or {}).get("origin") or Origin()


def alias_roots(graph: Graph) -> dict[Node, int]:
    """Each tensor node's storage: nodes with one number share memory."""
    roots = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            roots[node] = tc.storage_id(value)
    return roots


def _tensors(values: Any) -> Iterator[Node]:
    for value in values:
        if isinstance(value, Node):
            yield value


def check_legal(graph: Graph) -> None:
    """Raises AssertionError at the first node that makes a graph illegal; for our own mistakes."""
    body = False
    for node in graph.nodes:
        if node.op == "placeholder":
            assert not body, f"{node}: a placeholder after an operator"
            continue
        body = True
        assert node.op in ("call_function", "get_attr", "output"), f"{node}: a {node.op} node"
        if node.op == "call_function":
            known = schema_name(node) or node.target is operator.getitem
            assert known, f"{node}: {node.target} is no operator"
        if is_collective(node) and not schema_name(node).startswith("_dtensor"):
            assert all(is_wait(u) for u in node.users), f"{node}: read without a wait"
    graph.lint()
