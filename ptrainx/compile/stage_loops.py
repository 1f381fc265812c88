"""A loop's body to the pieces that overlap: communication that can start a step ahead, and what may finish a step late.

*Ahead*: collectives that need nothing but the step's slices and values from outside the loop, such as the gathers of a
layer's parameters. They start one step before they are used. *Core*: the rest. *Late*: what follows a collective and
leads only to stacked results, such as a reduce-scatter of a layer's gradients. It is waited for after the next step's
core. The meaning is that of the body; only the order changes, alike on every rank.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ptrainx.compile.graph import Loop, alias_roots, is_collective, is_loop, is_pure, is_wait, loop_of, output_node
from ptrainx.ops.loop.partition import extract

__all__ = ["StagedLoop", "is_list", "memory_shared_with_operands", "stage_loop"]


@dataclasses.dataclass
class StagedLoop:
    """A loop in pieces.

    Attributes:
        loop: the loop.
        ahead: (*placeholders that it reads) -> collectives that have started; None if there are none.
        ahead_reads: indices of the body's operands that `ahead` takes.
        core: (*operands, *started collectives) -> (*carry, *early ys, *what `late` takes).
        late: (*what the core gives for it) -> late ys; None if there are none.
        early_ys, late_ys: which ys the core and `late` give.
        lists: ys that stay a list of single values, since only other loops read them, slice by slice.
        taken: operands (indices) that are lists which only this loop reads: a value goes when its step is done.
        owned: operands of the core (indices) that it may overwrite.
    """

    loop: Loop
    ahead: GraphModule | None
    ahead_reads: tuple[int, ...]
    core: GraphModule
    late: GraphModule | None
    early_ys: tuple[int, ...]
    late_ys: tuple[int, ...]
    lists: frozenset[int]
    taken: frozenset[int]
    owned: frozenset[int]


def stage_loop(node: Node) -> StagedLoop:
    """The pieces of a loop in a graph that has been through the passes."""
    loop = loop_of(node)
    body, form = loop.body, loop.form
    placeholders = list(body.graph.find_nodes(op="placeholder"))
    results: list[Node] = list(output_node(body.graph).args[0])  # type: ignore[arg-type]
    carry, ys = results[: form.n_carry], results[form.n_carry :]
    started = _ahead(body.graph, placeholders[form.n_carry :])
    late, held = _late(body.graph, carry, ys)
    early_ys = tuple(i for i, y in enumerate(ys) if y not in late)
    late_ys = tuple(i for i, y in enumerate(ys) if y in late)
    core_results = [*carry, *(ys[i] for i in early_ys), *held]
    ahead: GraphModule | None = None
    reads: tuple[int, ...] = ()
    if started:
        needed = _ancestors(started)
        reads = tuple(i for i, p in enumerate(placeholders) if p in needed)
        ahead = extract(body, [placeholders[i] for i in reads], started, needed)
    impure = [n for n in body.graph.nodes if n.op == "call_function" and not is_pure(n)]
    core = extract(body, [*placeholders, *started], core_results, _ancestors([*core_results, *impure], set(started)))
    late_piece = None
    if late_ys:
        results_late = [ys[i] for i in late_ys]
        late_piece = extract(body, held, results_late, _ancestors(results_late, set(held)))
    lists = frozenset(_list_ys(loop))
    taken = frozenset(_taken(loop))
    return StagedLoop(
        loop, ahead, reads, core, late_piece, early_ys, late_ys, lists, taken, _owned(loop, [*ys, *held], taken)
    )


def _ancestors(roots: list[Node], stop: set[Node] | None = None) -> set[Node]:
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if stop is None or node not in stop:
                stack.extend(node.all_input_nodes)
    return found


def _ahead(graph: Graph, outside: list[Node]) -> list[Node]:
    """The collectives that can start before the carry is there, in order; not those that follow another one."""
    independent = set(outside)
    started: list[Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or is_loop(node) or is_wait(node) or not is_pure(node):
            continue
        operands = node.all_input_nodes
        if not operands or not all(n in independent for n in operands):
            continue
        if is_collective(node):
            if node.users and all(is_wait(user) for user in node.users):
                started.append(node)
        else:
            independent.add(node)
    return started


def _late(graph: Graph, carry: list[Node], ys: list[Node]) -> tuple[set[Node], list[Node]]:
    """(nodes that can be computed after the next step, what they need: started collectives and other values)."""
    needed_soon = _ancestors(carry)
    late: set[Node] = set()
    held: list[Node] = []
    given = set(ys)
    for node in graph.nodes:
        if not (is_collective(node) and node.users and all(is_wait(user) for user in node.users)):
            continue
        after = _descendants(list(node.users))
        if needed_soon & after or not given & after:
            continue
        if any(is_collective(n) or is_loop(n) or not is_pure(n) for n in after):
            continue
        late |= after
        held.append(node)
    for node in graph.nodes:
        if node in late:
            held += [n for n in node.all_input_nodes if n not in late and n not in held]
    return late, held


def _descendants(roots: list[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found and node.op != "output":
            found.add(node)
            stack.extend(node.users)
    return found


def _results_of(loop: Loop) -> dict[int, list[Node]]:
    readers: dict[int, list[Node]] = {}
    for user in loop.node.users:
        if user.target is operator.getitem:
            readers.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
    return readers


def _reads_slices(reader: Node, value: Node) -> bool:
    """Whether a node is a loop that takes a value as xs only."""
    if not is_loop(reader):
        return False
    carry, xs, consts = loop_of(reader).operands
    return value in xs and value not in carry and value not in consts


def _list_ys(loop: Loop) -> list[int]:
    out = []
    for index, items in _results_of(loop).items():
        readers = [(user, item) for item in items for user in item.users]
        if index >= loop.form.n_carry and readers and all(_reads_slices(user, item) for user, item in readers):
            out.append(index - loop.form.n_carry)
    return out


def is_list(value: Any) -> bool:
    """Whether an operand is a list: a result of a loop that is never stacked."""
    if not (isinstance(value, Node) and value.target is operator.getitem and is_loop(value.args[0])):  # type: ignore[arg-type]
        return False
    source = loop_of(value.args[0])  # type: ignore[arg-type]
    return int(value.args[1]) - source.form.n_carry in _list_ys(source)  # type: ignore[arg-type]


def _taken(loop: Loop) -> list[int]:
    carry, xs, _ = loop.operands
    return [
        len(carry) + i
        for i, value in enumerate(xs)
        if is_list(value) and len(value.users) == 1 and xs.count(value) == 1
    ]


def _owned(loop: Loop, given: list[Node], taken: frozenset[int]) -> frozenset[int]:
    """Operands that die in the step: the carry (whose first value the caller makes its own), and taken list items."""
    roots = alias_roots(loop.body.graph)
    held = {roots.get(node) for node in given}
    placeholders = list(loop.body.graph.find_nodes(op="placeholder"))
    results: list[Node] = output_node(loop.body.graph).args[0]  # type: ignore[assignment]
    carries = {
        i for i in range(loop.form.n_carry) if roots[placeholders[i]] not in held and roots[results[i]] not in held
    }
    # A list's item may be a carry that came out as it went in, which the loop before still holds as its first one.
    return frozenset(carries | {i for i in taken if not _is_carry_through(loop, i)})


def memory_shared_with_operands(graph: Graph) -> list[tuple[Node, Node]]:
    """(result of a loop, operand) pairs that share memory: a list of carries begins with the one that came in."""
    pairs = []
    for node in graph.nodes:
        if not is_loop(node):
            continue
        loop = loop_of(node)
        placeholders = list(loop.body.graph.find_nodes(op="placeholder"))
        results: list[Node] = output_node(loop.body.graph).args[0]  # type: ignore[assignment]
        lists = set(_list_ys(loop))
        for index, readers in _results_of(loop).items():
            if index - loop.form.n_carry in lists and results[index] in placeholders:
                operand: Any = node.args[2 + placeholders.index(results[index])]
                pairs += [(reader, operand) for reader in readers]
    return pairs


def _is_carry_through(loop: Loop, index: int) -> bool:
    value: Any = loop.node.args[2 + index]
    source = loop_of(value.args[0])
    result: list[Node] = output_node(source.body.graph).args[0]  # type: ignore[assignment]
    return result[int(value.args[1])].op == "placeholder"
