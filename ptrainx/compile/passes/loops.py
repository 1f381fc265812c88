"""Trims loops: results that nobody reads, what leads only to them, and operands that the body does not read."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from ptrainx.compile.graph import Loop, copy_module, is_loop, is_pure, loop_of, loops_of, output_node
from ptrainx.ops.loop import LoopForm

__all__ = ["trim_loops"]


def trim_loops(graph: Graph) -> list[Loop]:
    """The loops of a graph, trimmed, from the last to the first, so that what one no longer reads is trimmed too."""
    _part_bodies(graph)
    for node in reversed(list(graph.nodes)):
        if is_loop(node):
            if any(user.users for user in node.users) or not is_pure(node):
                _trim(loop_of(node))
            else:
                _erase(graph, node)
        elif node.op == "call_function" and not node.users and is_pure(node):
            graph.erase_node(node)
    return loops_of(graph)


def _part_bodies(graph: Graph) -> None:
    """Gives each loop a body of its own: one that is computed again has had that of the first."""
    owner: Any = graph.owning_module
    seen: set[str] = set()
    for loop in loops_of(graph):
        if loop.name in seen:
            name = f"{loop.name}_{len(seen)}"
            owner.add_submodule(name, copy_module(loop.body))
            with graph.inserting_before(loop.node):
                attribute = graph.get_attr(name)
            first: Any = loop.node.args[0]
            loop.node.args = (attribute, *loop.node.args[1:])
            if not first.users:
                graph.erase_node(first)
            seen.add(name)
        seen.add(loop.name)


def _erase(graph: Graph, node: Node) -> None:
    owner: Any = node.args[0]
    for user in list(node.users):
        graph.erase_node(user)
    graph.erase_node(node)
    if not owner.users:
        graph.erase_node(owner)


def _trim(loop: Loop) -> None:
    form, body = loop.form, loop.body
    readers: dict[int, list[Node]] = {}
    for user in list(loop.node.users):
        if user.users:
            readers.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
        else:
            loop.node.graph.erase_node(user)
    placeholders = list(body.graph.find_nodes(op="placeholder"))
    output = output_node(body.graph)
    results: list[Node] = list(output.args[0])  # type: ignore[arg-type]
    kept = _live_results(results, placeholders, form.n_carry, set(readers))
    output.args = ([results[i] for i in kept],)
    for node in reversed(list(body.graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and is_pure(node):
            body.graph.erase_node(node)
    live = [
        (i < form.n_carry and i in kept) or (i >= form.n_carry and bool(node.users))
        for i, node in enumerate(placeholders)
    ]
    operands = [o for o, lives in zip(loop.node.args[2:], live) if lives]
    for node, lives in zip(placeholders, live):
        if not lives:
            body.graph.erase_node(node)
    n_carry = sum(live[: form.n_carry])
    n_xs = sum(live[form.n_carry : form.n_carry + form.n_xs])
    changed = LoopForm(n_carry, n_xs, form.length, form.reverse)
    loop.node.args = (loop.node.args[0], tuple(changed), *operands)
    values = loop.node.meta["val"]
    loop.node.meta["val"] = tuple(values[i] for i in kept)
    for position, i in enumerate(kept):
        for reader in readers.get(i, ()):
            reader.args = (loop.node, position)
    body.recompile()


def _live_results(results: list[Node], placeholders: list[Node], n_carry: int, read: set[int]) -> list[int]:
    """The results that somebody reads, and the carries that lead to them in a later step."""
    live = set(read)
    while True:
        needed = _reached([results[i] for i in live], placeholders[:n_carry])
        found = live | needed
        if found == live:
            return sorted(live)
        live = found


def _reached(roots: list[Node], carries: list[Node]) -> set[int]:
    seen: set[Node] = set()
    graph = carries[0].graph if carries else None
    stack = list(roots)
    if graph is not None:
        stack += [n for n in graph.nodes if n.op not in ("placeholder", "output") and not is_pure(n)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return {i for i, carry in enumerate(carries) if carry in seen}
