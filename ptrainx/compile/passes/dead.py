"""Removes what nobody reads. A collective is dead like any other operator: every rank drops it alike."""

from __future__ import annotations

from ptrainx.compile.graph import is_pure
from ptrainx.compile.program import RankGraph

__all__ = ["drop_dead"]


def drop_dead(graph: RankGraph) -> RankGraph:
    """Drops pure nodes without readers, from the end, so that chains go at once."""
    for node in reversed(list(graph.module.graph.nodes)):
        if not node.users and is_pure(node):
            graph.module.graph.erase_node(node)
    return graph
