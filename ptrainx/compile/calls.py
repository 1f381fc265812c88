"""What the calls of a graph may overwrite: operands that die there, at every call of a body alike."""

from __future__ import annotations

from torch.fx import Graph, Node

from ptrainx.compile.graph import called_bodies, is_call, schema_name
from ptrainx.compile.reuse import last_reads, storage_roots

__all__ = ["owned_operands"]


def owned_operands(graph: Graph, donated: set[int]) -> dict[str, frozenset[int]]:
    """Body -> the operands (indices) whose memory it may take.

    An operand qualifies if it is a temporary, or a donated placeholder, that nobody reads later or shares.

    Args:
        graph: after the passes.
        donated: indices of its placeholders whose memory may be taken.
    """
    bodies = called_bodies(graph)
    if not bodies:
        return {}
    nodes = list(graph.nodes)
    roots = storage_roots(graph)
    last_read = last_reads(nodes, roots)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    kept = {roots[n] for i, n in enumerate(placeholders) if i not in donated and n in roots}
    kept |= {roots[n.args[0]] for n in nodes if schema_name(n) == "ptrainx::send" and n.args[0] in roots}
    kept |= {roots[n] for n in nodes if n.op == "get_attr" and n in roots}
    owned: dict[str, frozenset[int]] = {}
    for position, node in enumerate(nodes):
        if not is_call(node):
            continue
        operands: list[Node] = list(node.args[1:])
        given = [roots.get(o) for o in operands]
        mine = frozenset(
            i
            for i, root in enumerate(given)
            if root is not None and root not in kept and last_read[root] <= position and given.count(root) == 1
        )
        name = str(node.args[0].target)
        owned[name] = owned.get(name, mine) & mine
    return owned
