"""A rank's part of a pipeline as a graph: its actions in the schedule's order, each the calls of its stage's pieces.

In: the pieces, the schedule's table, where the operands stand. Out: a graph `(*operands, seed) -> (loss, *aux of the
epilogue, *aux of the layers, *gradients)` of calls and messages, which is a graph like any other to the passes, the
lowering and the simulator. Sends follow what they send; a receive is posted one action ahead.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import Origin
from ptrainx.ops.call import CALL, call_results
from ptrainx.ops.call.messages import FLUSH, RECEIVE, RECEIVED, SEND
from ptrainx.ops.pipeline.piece import Piece
from ptrainx.ops.schedules import Action, Table

__all__ = ["Layout", "Operands", "Pieces", "closed_gradients", "rank_program", "stacked_gradients"]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of a pipeline."""

    prologue: Piece
    layer: Piece
    epilogue: Piece


@dataclasses.dataclass(frozen=True)
class Operands:
    """Where a pipeline's operands stand in the list of them; the seed comes last.

    Attributes:
        values: local tensors, in order.
        stacked: indices of the stacked leaves.
        batch: of the batch's, whose leading dim counts microbatches.
        closed: identity of a closed value -> index.
        constants: of each piece's constants, by its name.
    """

    values: list[torch.Tensor]
    stacked: list[int]
    batch: list[int]
    closed: dict[int, int]
    constants: dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where this rank stands.

    Attributes:
        rank: its place along the pipeline's axis.
        group: name of the axis's group; None without one.
        rows: stage -> this rank's rows of the stacked leaves that are its layers, in order.
    """

    rank: int
    group: str | None
    rows: dict[int, list[int]]


class _Program:
    def __init__(self, pieces: Pieces, table: Table, operands: Operands, layout: Layout, origin: Origin):
        self.pieces, self.table, self.operands, self.layout = pieces, table, operands, layout
        self.root, self.graph = torch.nn.Module(), Graph()
        self.origin = origin
        self.fake_mode: Any = operands.values[0].fake_mode  # type: ignore[attr-defined]
        self.given = [self._placeholder(value, f"operand_{i}") for i, value in enumerate(operands.values)]
        self.parts: dict[tuple[int, int], Node] = {}
        self.saved: dict[tuple[int, int], list[list[Node]]] = {}
        self.kept: dict[tuple[int, int], list[tuple[list[Node], list[Node]]]] = {}
        self.handed: dict[tuple[str, int, int], list[Node]] = {}
        self.posted: dict[tuple[str, int, int], list[Node]] = {}
        self.sums: dict[tuple[str, int], Node] = {}
        self.row_sums: dict[tuple[int, int], Node] = {}
        self.row_aux: dict[tuple[int, int], Node] = {}
        x = pieces.layer.result_specs
        self.likes = [node.meta["val"] for node in _results(pieces.layer.forward)[: len(x)]]
        self.backward_likes = [i for i, like in enumerate(self.likes) if like.is_floating_point()]

    # Nodes with their fake values.

    def _placeholder(self, value: torch.Tensor, name: str) -> Node:
        node = self.graph.placeholder(name)
        node.meta = {"val": value, "custom": {"origin": self.origin}}
        return node

    def op(self, target: Any, *args: Any) -> Node:
        """An operator."""
        node = self.graph.call_function(target, args)
        values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        with tc.no_dispatch_modes(), self.fake_mode:
            node.meta = {"val": target(*values), "custom": {"origin": self.origin}}
        return node

    def message(self, target: Any, *args: Any, like: torch.Tensor | None = None) -> Node:
        """A message's operator."""
        node = self.graph.call_function(target, args)
        with tc.no_dispatch_modes(), self.fake_mode:
            value = None if like is None else torch.empty(like.shape, dtype=like.dtype, device=like.device)
        node.meta = {"val": value, "custom": {"origin": self.origin}}
        return node

    def call(self, name: str, body: GraphModule, arguments: Sequence[Node]) -> list[Node]:
        """A call of a body, and its results."""
        if not hasattr(self.root, name):
            self.root.add_module(name, body)
        owner = self.graph.get_attr(name)
        node = self.graph.call_function(CALL, (owner, *arguments))
        with tc.no_dispatch_modes(), self.fake_mode:
            values = call_results(body)
        meta = {"custom": {"origin": self.origin}}
        owner.meta = dict(meta)
        node.meta = {**meta, "val": values}
        out = []
        for i, value in enumerate(values):
            part = self.graph.call_function(operator.getitem, (node, i))
            part.meta = {**meta, "val": value}
            out.append(part)
        return out

    def part(self, operand: int, index: int) -> Node:
        """A slice of an operand along its leading dim."""
        if (operand, index) not in self.parts:
            self.parts[operand, index] = self.op(aten.select.int, self.given[operand], 0, index)
        return self.parts[operand, index]

    # The operands of pieces.

    def weights_of(self, piece: Piece, microbatch: int, row: int | None) -> list[Node]:
        """What a piece is given beside activations."""
        layer = [] if row is None else [self.part(i, row) for i in self.operands.stacked]
        batch = [self.part(i, microbatch) for i in self.operands.batch]
        closed = [self.given[self.operands.closed[id(value)]] for value in piece.closed]
        return [*layer, *batch, *closed, *(self.given[i] for i in self.operands.constants[piece.name])]

    def run(self, piece: Piece, x: list[Node], microbatch: int, row: int | None) -> tuple[list[Node], list[Node]]:
        """(results, aux) of a piece; what its gradients need is kept."""
        arguments = [*x, *self.weights_of(piece, microbatch, row)]
        out = self.call(f"{piece.name}_forward", piece.forward, arguments)
        end = piece.n_results + piece.n_aux
        if self.table.backward:
            self.stage_saved.append([*(arguments[i] for i in piece.saved_primals), *out[end:]])
        return out[: piece.n_results], out[piece.n_results : end]

    # Actions.

    def forward(self, stage: int, m: int) -> None:
        """Prologue, layers, epilogue, as far as the stage has them."""
        last = stage == self.table.num_stages - 1
        x = [] if stage == 0 else self.take("F", stage, m)
        self.stage_saved: list[list[Node]] = []
        if stage == 0:
            x, _ = self.run(self.pieces.prologue, [], m, None)
        for row in self.layout.rows[stage]:
            x, aux = self.run(self.pieces.layer, x, m, row)
            for k, value in enumerate(aux):
                self._add(self.row_aux, (k, row), value)
        if last:
            outs, aux = self.run(self.pieces.epilogue, x, m, None)
            for k, value in enumerate([*outs, *aux]):
                self._add(self.sums, ("result", k), value)
        else:
            self.give("F", stage + 1, m, x)
        if self.table.backward:
            self.saved[stage, m] = self.stage_saved

    def pieces_of(self, stage: int) -> list[tuple[Piece, int | None]]:
        """A stage's pieces, in order, with the rows of layers."""
        out: list[tuple[Piece, int | None]] = [(self.pieces.prologue, None)] if stage == 0 else []
        out += [(self.pieces.layer, row) for row in self.layout.rows[stage]]
        return [*out, (self.pieces.epilogue, None)] if stage == self.table.num_stages - 1 else out

    def gradients(self, stage: int, m: int, split: bool) -> None:
        """B, or I if the gradients of weights come later."""
        cotangents = [self.seed()] if stage == self.table.num_stages - 1 else self.take("B", stage, m)
        saved = self.saved.pop((stage, m))
        self.kept[stage, m] = []
        for piece, row in reversed(self.pieces_of(stage)):
            cotangents = self._back(piece, row, saved.pop(), cotangents, split, (stage, m))
        if stage > 0:
            self.give("B", stage - 1, m, cotangents)

    def _back(
        self, piece: Piece, row: int | None, saved: list[Node], along: list[Node], split: bool, key: tuple[int, int]
    ) -> list[Node]:
        """The cotangents of a piece's activations from those of its results."""
        epilogue = piece.name == "epilogue"
        taken = piece.taken if epilogue else [self.backward_likes.index(i) for i in piece.taken]
        found: dict[int, Node] = {}
        if piece.backward is not None:
            arguments = [*saved, *(along[i] for i in taken)]
            if not split:
                out = self.call(f"{piece.name}_backward", piece.backward, arguments)
                self._sum_weights(piece, row, out[len(piece.input_grads) :])
            else:
                assert piece.input is not None
                out = self.call(f"{piece.name}_input", piece.input, arguments)
                self.kept[key].append((arguments, out[len(piece.input_grads) :]))
            found = dict(zip(piece.input_grads, out))
        elif split:
            self.kept[key].append(([], []))
        if piece.name == "prologue":
            return []
        return [found[i] if i in found else self.zeros(self.likes[i]) for i in self.backward_likes]

    def weights(self, stage: int, m: int) -> None:
        """W."""
        for (piece, row), (arguments, passed) in zip(reversed(self.pieces_of(stage)), self.kept.pop((stage, m))):
            if piece.weight is not None:
                self._sum_weights(piece, row, self.call(f"{piece.name}_weight", piece.weight, [*arguments, *passed]))

    def _sum_weights(self, piece: Piece, row: int | None, gradients: Sequence[Node]) -> None:
        for i, gradient in zip(piece.weight_grads, gradients):
            if i < piece.n_given:
                assert row is not None
                self._add(self.row_sums, (i - piece.n_inputs, row), gradient)
            else:
                value = piece.closed[i - piece.n_given]
                self._add(self.sums, ("closed", self.operands.closed[id(value)]), gradient)

    def _add(self, sums: dict[Any, Node], key: Any, value: Node) -> None:
        sums[key] = self.op(aten.add.Tensor, sums[key], value) if key in sums else value

    def seed(self) -> Node:
        """The cotangent of a microbatch's loss."""
        return self.given[-1]

    def zeros(self, like: torch.Tensor) -> Node:
        """Zeros like a value."""
        with tc.no_dispatch_modes():
            node = self.graph.call_function(
                aten.zeros.default, (list(like.shape),), {"dtype": like.dtype, "device": like.device}
            )
            with self.fake_mode:
                value = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        node.meta = {"val": value, "custom": {"origin": self.origin}}
        return node

    # Values from stage to stage.

    def _tag(self, kind: str, stage: int, m: int, leaf: int) -> int:
        table = self.table
        number = ((kind == "B") * table.num_stages + stage) * table.num_microbatches + m
        return number * len(self.likes) + leaf

    def give(self, kind: str, stage: int, m: int, values: list[Node]) -> None:
        """Hands values on to the stage that needs them."""
        peer = self.table.rank_of_stage[stage]
        if peer == self.layout.rank:
            self.handed[kind, stage, m] = values
            return
        reason = "activations to the next stage" if kind == "F" else "gradients to the stage before"
        for leaf, value in enumerate(values):
            node = self.message(SEND, value, peer, self._tag(kind, stage, m, leaf), self.layout.group)
            node.meta["custom"] = {"origin": dataclasses.replace(self.origin, asked=True, reason=reason)}

    def source(self, action: Action) -> tuple[str, int, int, int] | None:
        """(kind, stage, microbatch, peer) of the message that an action needs, if it needs one."""
        kind, stage, m = action
        if kind == "W" or (kind == "F" and stage == 0) or (kind != "F" and stage == self.table.num_stages - 1):
            return None
        peer = self.table.rank_of_stage[stage - 1 if kind == "F" else stage + 1]
        return None if peer == self.layout.rank else ("F" if kind == "F" else "B", stage, m, peer)

    def post(self, action: Action) -> None:
        """Starts to receive what an action needs."""
        found = self.source(action)
        if found is None or found[:3] in self.posted:
            return
        kind, stage, m, peer = found
        likes = self.likes if kind == "F" else [self.likes[i] for i in self.backward_likes]
        self.posted[kind, stage, m] = [
            self.message(
                RECEIVE, list(like.shape), like.dtype, like.device, peer, self._tag(kind, stage, m, i),
                self.layout.group, like=like,
            )
            for i, like in enumerate(likes)
        ]  # fmt: skip

    def take(self, kind: str, stage: int, m: int) -> list[Node]:
        """The values that a stage needs."""
        if (kind, stage, m) in self.handed:
            return self.handed.pop((kind, stage, m))
        return [self.message(RECEIVED, node, like=node.meta["val"]) for node in self.posted.pop((kind, stage, m))]

    # The whole.

    def write(self) -> GraphModule:
        """The graph."""
        actions = self.table.actions[self.layout.rank]
        for i, action in enumerate(actions):
            for ahead in actions[i : i + 2]:
                self.post(ahead)
            kind, stage, m = action
            line = dataclasses.replace(self.origin, phase="forward" if kind == "F" else "backward")
            self.origin = line
            if kind == "F":
                self.forward(stage, m)
            elif kind == "W":
                self.weights(stage, m)
            else:
                self.gradients(stage, m, split=kind == "I")
        if self.layout.group is not None:
            self.message(FLUSH, self.layout.group)
        self.graph.output(self._outputs())
        next(iter(self.graph.find_nodes(op="output"))).meta = {}
        module = GraphModule(self.root, self.graph)
        self.graph.lint()
        return module

    def _outputs(self) -> list[Node]:
        epilogue, layer = self.pieces.epilogue, self.pieces.layer
        results = [n.meta["val"] for n in _results(epilogue.forward)[: epilogue.n_results + epilogue.n_aux]]
        out = [self._mean(self.sums.get(("result", k)), like) for k, like in enumerate(results)]
        rows = sorted(row for own in self.layout.rows.values() for row in own)
        aux = [n.meta["val"] for n in _results(layer.forward)[layer.n_results : layer.n_results + layer.n_aux]]
        for k, like in enumerate(aux):
            found = [self._mean(self.row_aux[k, row], like) for row in rows]
            out.append(self._stack(found, like))
        if not self.table.backward:
            return out
        for k in stacked_gradients(self.pieces):
            like = self._gradient_like(k)
            out.append(self._stack([self.row_sums[k, row] for row in rows], like))
        for value, like in closed_gradients(self.pieces):
            total = self.sums.get(("closed", self.operands.closed[id(value)]))
            out.append(self.zeros(like) if total is None else total)
        return out

    def _gradient_like(self, k: int) -> torch.Tensor:
        layer = self.pieces.layer
        index = layer.weight_grads.index(k + len(self.likes)) + len(layer.input_grads)
        assert layer.backward is not None
        return _results(layer.backward)[index].meta["val"]

    def _mean(self, total: Node | None, like: torch.Tensor) -> Node:
        if total is None:
            return self.zeros(like)
        return self.op(aten.div.Tensor, total, self.table.num_microbatches)

    def _stack(self, nodes: list[Node], like: torch.Tensor) -> Node:
        if nodes:
            return self.op(aten.stack.default, nodes)
        with tc.no_dispatch_modes(), self.fake_mode:
            empty = torch.empty((0, *like.shape), dtype=like.dtype, device=like.device)
        return self.zeros(empty)


def _results(body: GraphModule) -> list[Node]:
    return list(next(iter(body.graph.find_nodes(op="output"))).args[0])


def stacked_gradients(pieces: Pieces) -> list[int]:
    """The stacked leaves that have gradients."""
    layer = pieces.layer
    return [i - layer.n_inputs for i in layer.weight_grads if i < layer.n_given]


def closed_gradients(pieces: Pieces) -> list[tuple[Any, torch.Tensor]]:
    """(closed value, its gradient's local fake) of those that have gradients, in one order on every rank."""
    found: dict[int, tuple[Any, torch.Tensor]] = {}
    for piece in (pieces.prologue, pieces.layer, pieces.epilogue):
        if piece.backward is None:
            continue
        gradients = _results(piece.backward)[len(piece.input_grads) :]
        for i, node in zip(piece.weight_grads, gradients):
            if i >= piece.n_given:
                value = piece.closed[i - piece.n_given]
                found.setdefault(id(value), (value, node.meta["val"]))
    return list(found.values())


def rank_program(pieces: Pieces, table: Table, operands: Operands, layout: Layout, origin: Origin) -> GraphModule:
    """A rank's graph.

    Args:
        pieces: of the pipeline.
        table: of the schedule, for this axis and number of microbatches.
        operands: local tensors and where they stand.
        layout: where this rank stands.
        origin: of the call of the pipeline.
    """
    return _Program(pieces, table, operands, layout, origin).write()
