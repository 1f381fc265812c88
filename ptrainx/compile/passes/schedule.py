"""Orders collectives for overlap: each starts right after its operand exists and is waited for right before its
first reader."""

from __future__ import annotations

from torch.fx import Node

from ptrainx.compile.graph import is_collective, is_wait
from ptrainx.compile.trace import RankGraph

__all__ = ["issue_early"]


def issue_early(graph: RankGraph) -> RankGraph:
    """Moves collectives up and waits down. The order of collectives among each other stays that of their operands,
    which is the same on every rank."""
    nodes = list(graph.module.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if is_collective(node):
            last = max((n for n in node.all_input_nodes), key=position.__getitem__, default=None)
            if last is not None and last.op != "placeholder" and not _between(last, node):
                last.append(node)
    _sink_waits(graph)
    return graph


def _between(last: Node, node: Node) -> bool:
    """Whether the node follows its operand already, behind other collectives of the same operand's making."""
    current = last.next
    while is_collective(current):
        if current is node:
            return True
        current = current.next
    return False


def _sink_waits(graph: RankGraph) -> None:
    order = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    for node in reversed(list(graph.module.graph.nodes)):
        if is_wait(node) and node.users:
            first = min(node.users, key=order.__getitem__)
            first.prepend(node)
