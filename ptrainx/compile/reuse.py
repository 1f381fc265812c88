"""Which operators may write their result into the memory of an operand that dies there.

Enters: a graph after the passes. Leaves: for each such node, the operand whose memory it takes. Temporaries qualify,
and donated arguments: so the last operator of an update writes the new parameter where the old one was.

An operand may be overwritten by node n if n is the last to read it *and everything that shares its memory*, if it has
the result's shape, strides and dtype, and if no other operand of n shares that memory. A collective reads its operand
until it is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ptrainx.compile.graph import alias_roots, is_wait, read_until, schema_name
from ptrainx.compile.stage_loops import memory_shared_with_operands

__all__ = ["in_place_target", "last_reads", "plan_reuse", "storage_roots"]

_POINTWISE = {
    "add",
    "addcdiv",
    "addcmul",
    "clamp",
    "div",
    "exp",
    "lerp",
    "log",
    "mul",
    "neg",
    "reciprocal",
    "relu",
    "rsqrt",
    "sigmoid",
    "sqrt",
    "sub",
    "tanh",
}
_COMMUTATIVE = {"add", "mul"}


def in_place_target(node: Node) -> Any:
    """The operator that writes into its first operand: `aten::add.Tensor` -> `aten::add_.Tensor`; None if none."""
    namespace, _, name = schema_name(node).partition("::")
    if namespace != "aten" or name not in _POINTWISE:
        return None
    packet = getattr(torch.ops.aten, f"{name}_", None)
    return getattr(packet, node.target._schema.overload_name or "default", None)  # type: ignore[union-attr]


def plan_reuse(graph: Graph, donated: set[int]) -> dict[Node, int]:
    """Node -> the index of the operand (0, or 1 of a commutative operator) whose memory it takes.

    Args:
        graph: legal, without writes.
        donated: indices of placeholders whose memory may be taken.
    """
    nodes = list(graph.nodes)
    roots = storage_roots(graph)
    last_read = last_reads(nodes, roots)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    kept = {roots[n] for i, n in enumerate(placeholders) if i not in donated and n in roots}
    kept |= {roots[n] for n in nodes if n.op == "get_attr" and n in roots}
    # What is sent is read until all messages are delivered.
    kept |= {roots[n.args[0]] for n in nodes if schema_name(n) == "ptrainx::send" and n.args[0] in roots}
    plan: dict[Node, int] = {}
    for position, node in enumerate(nodes):
        if in_place_target(node) is None:
            continue
        for index in _candidates(node):
            operand = node.args[index]
            if not isinstance(operand, Node) or operand not in roots or not _same_layout(node, operand):
                continue
            root = roots[operand]
            if root in kept or last_read[root] > position or _read_otherwise(node, index, root, roots):
                continue
            plan[node] = index
            taken = roots[node]
            for other in [n for n, r in roots.items() if r == taken]:
                roots[other] = root
            last_read[root] = max(position, last_read.get(taken, position))
            break
    return plan


def storage_roots(graph: Graph) -> dict[Node, int]:
    """As `alias_roots`; a wait gives its collective's memory, and a loop's list of carries has the first one's."""
    roots = alias_roots(graph)
    waits = [(node, node.args[0]) for node in graph.nodes if is_wait(node)]
    for node, source in [*waits, *memory_shared_with_operands(graph)]:
        if node in roots and source in roots:
            old, new = roots[node], roots[source]
            for other in [n for n, r in roots.items() if r == old]:
                roots[other] = new
    return roots


def last_reads(nodes: list[Node], roots: dict[Node, int]) -> dict[int, int]:
    """Storage -> the position of its last reader; results are read at the end."""
    position = {node: i for i, node in enumerate(nodes)}
    last: dict[int, int] = {}
    for node in nodes:
        for operand in node.all_input_nodes:
            until = max(position[reader] for reader in read_until(node))
            for root in _roots_of(operand, roots):
                last[root] = max(last.get(root, -1), until)
    return last


def _roots_of(node: Node, roots: dict[Node, int]) -> list[int]:
    """The storage of a node, or those of its parts if it is a tuple."""
    if node in roots:
        return [roots[node]]
    return [roots[user] for user in node.users if user in roots]


def _candidates(node: Node) -> tuple[int, ...]:
    name = schema_name(node).partition("::")[2]
    # The parts of a complex product are rounded by the order of its operands.
    plain = len(node.args) == 2 and not node.kwargs and not node.meta["val"].is_complex()
    return (0, 1) if name in _COMMUTATIVE and plain else (0,)


def _same_layout(node: Node, operand: Node) -> bool:
    after, before = node.meta["val"], operand.meta["val"]
    return (after.shape, after.stride(), after.dtype, after.device) == (
        before.shape,
        before.stride(),
        before.dtype,
        before.device,
    ) and after.numel() == before.untyped_storage().nbytes() // max(before.element_size(), 1)


def _read_otherwise(node: Node, index: int, root: int, roots: dict[Node, int]) -> bool:
    """Whether another operand than the one at `index` shares its memory (the same node twice is fine: one element at a
    time is read before it is written)."""
    chosen = node.args[index]
    return any(operand is not chosen and roots.get(operand) == root for operand in node.all_input_nodes)
