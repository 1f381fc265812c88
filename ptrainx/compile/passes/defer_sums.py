"""Sums over ranks are taken after sums over time: fewer all-reduces, of the same size.

    a sum of all-reduces               all_reduce(g) * 0.5 + all_reduce(h)  ->  all_reduce(g * 0.5 + h)
    an accumulation in a loop          carry = carry + all_reduce(g)        ->  carry = carry + g; all_reduce(carry)

Between the reduction and the sum may stand what commutes with a sum over ranks: products and quotients with a number,
and a sign. The carry has to be read by its own sum alone. It then starts from zeros, and what it started from is added
after the reduction. `a + b` rounds otherwise than before, so results agree up to rounding.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ptrainx.compile.graph import Loop, axis_group, is_loop, loop_of, output_node, schema_name
from ptrainx.compile.passes.emit import ALL_REDUCE, Emitter, collective_of, only_user, operand_of, same_layout
from ptrainx.compile.program import RankGraph

__all__ = ["defer_loop_sums", "merge_sums"]

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class _Paid(NamedTuple):
    """A term of a sum: `steps`, from the outermost, of an all-reduce that nobody else reads."""

    steps: list[Node]
    wait: Node
    reduce: Node

    @property
    def group(self) -> str:
        return axis_group(self.reduce)


def _paid(node: Any, reader: Node) -> _Paid | None:
    """The term as an all-reduced sum, if it is one; `reader` is its only reader."""
    steps: list[Node] = []
    while isinstance(node, Node) and only_user(node) is reader:
        reduce = collective_of(node, ALL_REDUCE)
        if reduce is not None:
            return _Paid(steps, node, reduce) if reduce.args[1] in ("sum", "avg") else None
        if not _is_scaling(node):
            return None
        steps.append(node)
        reader, node = node, node.args[0]
    return None


def _is_scaling(node: Node) -> bool:
    name, value = schema_name(node), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or node.kwargs:
        return False
    operand = node.args[0] if node.args else None
    if not isinstance(operand, Node) or not same_layout(node, operand):
        return False
    return name == "aten::neg" or (name in ("aten::mul", "aten::div") and isinstance(node.args[1], (int, float)))


def _is_sum(node: Node) -> bool:
    """Whether a node adds or subtracts two values like its own."""
    return (
        schema_name(node) in ("aten::add", "aten::sub")
        and not node.kwargs
        and len(node.args) == 2
        and all(isinstance(a, Node) and same_layout(a, node) for a in node.args)
    )


def _before(emit: Emitter, paid: _Paid) -> Node:
    """The term without its all-reduce."""
    value: Any = paid.reduce.args[0]
    for step in reversed(paid.steps):
        value = emit(step.target, value, *step.args[1:])
    return value


# --- sums of all-reduces ---------------------------------------------------------------------------------------------


def merge_sums(graph: RankGraph) -> RankGraph:
    """All-reduces over one axis whose results are only added up become one."""
    changed = True
    while changed:
        changed = False
        for node in list(graph.module.graph.nodes):
            if _is_sum(node) and not (len(node.users) == 1 and _is_sum(next(iter(node.users)))):
                changed = _merge_terms(graph, node) or changed
    return graph


def _terms(total: Node, sign: int = 1) -> list[tuple[int, Node, Node]]:
    """(sign, term, its reader) of a tree of additions and subtractions, from left to right."""
    found: list[tuple[int, Node, Node]] = []
    for i, operand in enumerate(total.args):
        assert isinstance(operand, Node)
        own = -sign if i and schema_name(total) == "aten::sub" else sign
        if _is_sum(operand) and only_user(operand) is total:
            found += _terms(operand, own)
        else:
            found.append((own, operand, total))
    return found


def _add_up(emit: Emitter, terms: list[tuple[int, Node]]) -> Node:
    sign, value = terms[0]
    if sign < 0:
        value = emit(aten.neg.default, value)
    for sign, term in terms[1:]:
        value = emit(aten.add.Tensor if sign > 0 else aten.sub.Tensor, value, term)
    return value


def _merge_terms(graph: RankGraph, total: Node) -> bool:
    kinds: dict[tuple, list[tuple[int, _Paid]]] = {}
    sums: list[tuple[int, Node]] = []
    for sign, term, reader in _terms(total):
        paid = _paid(term, reader)
        if paid is None:
            sums.append((sign, term))
        else:
            kinds.setdefault((paid.group, paid.reduce.args[1]), []).append((sign, paid))
    if all(len(members) < 2 for members in kinds.values()):
        return False
    emit = Emitter(graph, total, total)
    for (group, op), members in kinds.items():
        owed = Emitter(graph, total, members[0][1].reduce)
        local = _add_up(owed, [(sign, _before(emit, paid)) for sign, paid in members])
        sums.append((1, owed.collective(c10d.all_reduce.default, local, op, group)))
    value = _add_up(emit, sums)
    total.replace_all_uses_with(value)
    _erase_up(graph, total)
    return True


def _erase_up(graph: RankGraph, node: Node) -> None:
    """Erases a node that nobody reads, and what was there for it alone."""
    operands = node.all_input_nodes
    graph.module.graph.erase_node(node)
    for operand in operands:
        if not operand.users and operand.op == "call_function":
            _erase_up(graph, operand)


# --- accumulations in loops ------------------------------------------------------------------------------------------


def defer_loop_sums(graph: RankGraph) -> RankGraph:
    """All-reduces that a loop's carry adds up are taken once, after the loop; inner loops first."""
    for node in list(graph.module.graph.nodes):
        if is_loop(node):
            loop = loop_of(node)
            inner = RankGraph(loop.body, graph.rank, [], [], None, (), graph.fake_mode, graph.axis_of)
            inner.shape, inner.flat = graph.shape, graph.flat
            defer_loop_sums(merge_sums(inner))
            for i in range(loop.form.n_carry):
                while _defer(graph, inner, loop_of(node), i):
                    pass
            loop.body.recompile()
    return graph


def _defer(graph: RankGraph, inner: RankGraph, loop: Loop, i: int) -> bool:
    if sum(is_loop(n) and operand_of(n).target == loop.name for n in graph.module.graph.nodes) > 1:
        return False
    carry = list(loop.body.graph.find_nodes(op="placeholder"))[i]
    results: Any = output_node(loop.body.graph).args[0]
    total = results[i]
    if not isinstance(total, Node) or not _is_sum(total) or results.count(total) > 1:
        return False
    if set(total.users) != {output_node(loop.body.graph)} or set(carry.users) != {total}:
        return False
    if schema_name(total) == "aten::sub" and total.args[0] is not carry:
        return False
    term = next((a for a in total.all_input_nodes if a is not carry), None)
    paid = _paid(term, total)
    if paid is None:
        return False
    emit = Emitter(inner, total, total)
    assert term is not None
    total.replace_input_with(term, _before(emit, paid))
    _erase_up(inner, term)
    _pay_after(graph, loop, i, paid)
    return True


def _pay_after(graph: RankGraph, loop: Loop, i: int, paid: _Paid) -> None:
    start: Any = loop.node.args[2 + i]
    if not _is_zero(start):
        zeros = Emitter(graph, loop.node, paid.reduce)(aten.zeros_like.default, start)
        loop.node.args = tuple(zeros if n == 2 + i else arg for n, arg in enumerate(loop.node.args))
    results = [user for user in loop.node.users if user.target is operator.getitem]
    for user in results:
        loop.node.append(user)  # together, so that what is paid behind them can share a bucket
    for user in [r for r in results if r.args[1] == i]:
        emit = Emitter(graph, results[0].next, paid.reduce)
        whole = emit.collective(c10d.all_reduce.default, user, paid.reduce.args[1], paid.group)
        final = whole if _is_zero(start) else emit(aten.add.Tensor, start, whole)
        for reader in list(user.users):
            if reader is not operand_of(whole):
                reader.replace_input_with(user, final)


def _is_zero(node: Node) -> bool:
    """Whether a value is nothing but zeros."""
    name = schema_name(node)
    return name in ("aten::zeros", "aten::zeros_like", "aten::new_zeros") or (
        name in ("aten::full", "aten::full_like") and not isinstance(node.args[1], Node) and not node.args[1]
    )
