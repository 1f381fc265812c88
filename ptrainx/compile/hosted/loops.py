"""The loops of logical ranks to one loop whose body is the merge of theirs.

Operands that several ranks have in common are one operand. A carry that begins as one value stays one if the body gives
one for it: the body is merged under the assumption that it does, and again with the carry divided where it does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ptrainx.compile.graph import Loop, loop_of, output_node
from ptrainx.compile.hosted.builder import Builder
from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import AgreementError
from ptrainx.ops.loop import LOOP, LoopForm
from ptrainx.ops.loop.operator import loop_results

__all__ = ["merge_loops"]

_NO_RANK = -1
Merge = Callable[[Builder, Mapping[int, GraphModule], Mapping[int, Sequence[Node]]], dict[int, list[Node]]]
Slots = dict[tuple[int, int], int]  # (rank, index of one of its carries) -> a carry of the merged loop


def merge_loops(
    build: Builder, nodes: Mapping[int, Node], known: Mapping[int, Mapping[Node, Any]], merge: Merge
) -> dict[int, list[Node]]:
    """Adds one loop for those of all ranks; nodes for each rank's results.

    Args:
        build: where to.
        nodes: each rank's loop.
        known: each rank's nodes -> those of the graph under construction.
        merge: adds what the ranks' bodies compute.
    """
    loops = {rank: loop_of(node) for rank, node in nodes.items()}
    first = next(iter(loops.values()))
    if any(loop.form != first.form for loop in loops.values()):
        raise AgreementError(
            "the logical ranks' loops differ",
            got="; ".join(f"rank {r}: {loop.form}" for r, loop in loops.items()),
            fix="choose dims that the logical mesh divides, or leave out reductions='ordered'",
        )
    operands = {rank: [[known[rank][n] for n in part] for part in loop.operands] for rank, loop in loops.items()}
    begun = [(rank, i) for rank in loops for i in range(first.form.n_carry)]
    slots = _numbered({(rank, i): (i, operands[rank][0][i]) for rank, i in begun})
    while True:
        body = _Body(build, loops, operands, slots)
        results = merge(body.build, {rank: loop.body for rank, loop in loops.items()}, body.inputs)
        finer = _numbered({(rank, i): (slots[rank, i], results[rank][i]) for rank, i in begun})
        if finer == slots:
            return _loop(build, nodes, loops, operands, slots, body, results)
        slots = finer


def _numbered(found: Mapping[tuple[int, int], Any]) -> Slots:
    """Equal things by one number, counted from 0 in order of appearance."""
    numbers: dict[Any, int] = {}
    return {key: numbers.setdefault(value, len(numbers)) for key, value in found.items()}


class _Body:
    """The merged body, so far with its arguments.

    Attributes:
        inputs: each rank's arguments.
        carries, xs, consts: the operands of the merged loop.
    """

    def __init__(self, build: Builder, loops: Mapping[int, Loop], operands: Mapping[int, Any], slots: Slots):
        self.build = Builder(build.fake_mode)
        self.inputs: dict[int, list[Node]] = {rank: [] for rank in loops}
        placeholders = {rank: list(loop.body.graph.find_nodes(op="placeholder")) for rank, loop in loops.items()}
        form = next(iter(loops.values())).form
        self.places: dict[Any, Node] = {}
        self.carries: list[Node] = []
        self.xs: list[Node] = []
        self.consts: list[Node] = []
        groups = ((self.carries, 0, 0), (self.xs, 1, form.n_carry), (self.consts, 2, form.n_carry + form.n_xs))
        for given, part, start in groups:
            for rank in loops:
                for i, operand in enumerate(operands[rank][part]):
                    key = (part, slots[rank, i] if part == 0 else operand)
                    if key not in self.places:
                        own = placeholders[rank][start + i]
                        self.places[key] = self.build.placeholder(f"a{len(self.places)}", own.meta["val"], own.meta)
                        given.append(operand)
                    self.inputs[rank].append(self.places[key])


def _loop(
    build: Builder,
    nodes: Mapping[int, Node],
    loops: Mapping[int, Loop],
    operands: Mapping[int, Any],
    slots: Slots,
    body: _Body,
    results: Mapping[int, list[Node]],
) -> dict[int, list[Node]]:
    form, n_carry = next(iter(loops.values())).form, len(body.carries)
    given: list[Node | None] = [None] * n_carry
    for (rank, i), slot in slots.items():
        given[slot] = results[rank][i]
    stacked = list(dict.fromkeys(y for own in results.values() for y in own[form.n_carry :]))
    like = next(iter(nodes.values()))
    outs = _apart(body, [*given, *stacked], like)  # type: ignore[list-item]
    module = body.build.finish(outs, output_node(next(iter(loops.values())).body.graph).meta)
    merged = LoopForm(n_carry, len(body.xs), form.length, form.reverse)
    owner = build.body(module)
    loop = build.graph.call_function(LOOP, (owner, tuple(merged), *body.carries, *body.xs, *body.consts))
    with build.fake_mode:
        loop.meta = {**like.meta, "val": loop_results(module, merged)}
    leader = next(iter(loops))
    parts = [build.add(leader, like, operator.getitem, loop, i) for i in range(len(outs))]
    place = {y: n_carry + i for i, y in enumerate(stacked)}
    return {
        rank: [
            *(parts[slots[rank, i]] for i in range(form.n_carry)),
            *(parts[place[y]] for y in results[rank][form.n_carry :]),
        ]
        for rank in loops
    }


def _apart(body: _Body, results: list[Node], like: Node) -> list[Node]:
    """The results of a body, none of which may share memory with another or with what it was given, itself apart."""
    placeholders = list(body.build.graph.find_nodes(op="placeholder"))
    taken = {tc.storage_id(node.meta["val"]) for node in placeholders}
    out = []
    for i, node in enumerate(results):
        unchanged = i < len(body.carries) and node is placeholders[i]
        while not unchanged and tc.storage_id(node.meta["val"]) in taken:
            # The builder gives who asks again another copy.
            node = body.build.add(_NO_RANK, like, torch.ops.aten.clone.default, node)
        taken.add(tc.storage_id(node.meta["val"]))
        out.append(node)
    return out
