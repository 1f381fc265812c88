"""A pipeline as a differentiable function of global values: one call in the graph, forwards and backwards together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.errors import GradientError, SpecError
from ptrainx.core.trace_context import TraceContext, user_source
from ptrainx.mesh.axes import split_axes
from ptrainx.mesh.placement import contiguous_strides, spec_of_placements
from ptrainx.ops.call import trace_call
from ptrainx.ops.loop.joint import slice_spec, stack_spec
from ptrainx.ops.pipeline.moves import Move, layer_homes
from ptrainx.ops.pipeline.piece import Call, Piece, Slot, paid, placed, trace_piece, try_piece
from ptrainx.ops.pipeline.rank_program import (
    Layout,
    Operands,
    Pieces,
    closed_gradients,
    rank_program,
    stacked_gradients,
)
from ptrainx.ops.random import fold_in
from ptrainx.ops.schedules import Schedule, Table

__all__ = ["run_pipeline"]

_TRIALS = 8


def run_pipeline(
    functions: Any,
    schedule: Schedule,
    axis: str,
    num_microbatches: int,
    args: tuple[Any, Any, Any, Any],
    layers: int,
    trace: TraceContext,
) -> Any:
    """The loss, or (loss, aux), as a node of the graph that is being traced."""
    run = _Run(functions, schedule, axis, num_microbatches, args, layers, trace)
    operands = [trace.inside(value) for value in [*run.stacked, *run.closed, *run.rows]]
    with tc.DisableTorchFunction():
        results: Any = _PipelineFunction.apply(run, *operands)
    return run.package(results)


class _Run:
    """One call of a pipeline: its pieces traced, its operands placed."""

    def __init__(
        self,
        functions: Any,
        schedule: Schedule,
        axis: str,
        num_microbatches: int,
        args: tuple[Any, Any, Any, Any],
        layers: int,
        trace: TraceContext,
    ):
        self.functions, self.axis, self.m, self.layers, self.trace = functions, axis, num_microbatches, layers, trace
        stacked, self.shared, rows, key = args
        self.view, names = trace.view, trace.mesh.axis_names
        self.dim = names.index(axis) if axis in names else None
        self.size = self.view.size(self.dim) if self.dim is not None else 1
        self.source = user_source()
        self.origin = dataclasses.replace(trace.origin, source=self.source)
        as_global: Callable[[Any], Any] = trace.as_global
        pairs, self.stacked_tree = px_tree.flatten_with_path(stacked)
        self.stacked = [as_global(leaf) for _, leaf in pairs]
        for (path, _), leaf in zip(pairs, self.stacked):
            self._check_stacked(px_tree.path_expr(path, "stacked"), leaf)
        rows, self.rows_tree = px_tree.flatten(rows)
        self.rows = [as_global(leaf) for leaf in rows]
        self.key = None if key is None else as_global(key)
        if self.key is not None:
            self.stacked.append(self._on_axis(as_global(torch.arange(layers))))
            self.rows.append(as_global(torch.arange(num_microbatches)))
        self.pieces, self.closed = self._trace_pieces()
        self.grads = any(p.backward is not None for p in self._all()) and torch.is_grad_enabled()
        self.table = self._table(schedule)

    def _all(self) -> tuple[Piece, Piece, Piece]:
        return self.pieces.prologue, self.pieces.layer, self.pieces.epilogue

    def _table(self, schedule: Schedule) -> Table:
        return schedule.table(self.size, self.m, backward=self.grads)

    def _on_axis(self, leaf: Any) -> Any:
        if self.dim is None:
            return leaf
        return leaf.redistribute(self.view, [Shard(0) if i == self.dim else p for i, p in enumerate(leaf.placements)])

    def _check_stacked(self, where: str, leaf: Any) -> None:
        for i, p in enumerate(leaf.placements):
            on = p.is_shard(0)
            if on != (i == self.dim) and self.view.size(i) > 1:
                raise SpecError(
                    f"pipeline: {where} is not placed on {self.axis!r} by layers",
                    got=str(spec_of_placements(leaf.placements, self.trace.mesh.axis_names, leaf.ndim)),
                    expected=f"P({self.axis!r}, ...) on a mesh with that axis, and no other axis on the leading dim",
                    fix=f"give stacked leaves the spec P({self.axis!r}, ...)",
                    source=self.source,
                )

    # The pieces.

    def _shared(self) -> Any:
        """The shared leaves as a piece may use them, whatever it does with them first."""
        return px_tree.map(lambda leaf: self.trace.inside(self.trace.as_global(leaf)), self.shared)

    def _key(self, rest: list[DTensor]) -> Any:
        return None if self.key is None else fold_in(self.key, rest[-1])

    def _microbatch(self, leaves: Sequence[DTensor]) -> Any:
        return px_tree.unflatten(self.rows_tree, list(leaves[: len(self.rows) - (self.key is not None)]))

    def _call_prologue(self, x: list[DTensor], given: list[DTensor]) -> tuple[list[DTensor], list[DTensor]]:
        out = self.functions.first(self._shared(), self._microbatch(given), self._key(given))
        leaves, self.x_tree = px_tree.flatten(px_tree.map(self.trace.as_global, out))
        return leaves, []

    def _call_layer(self, x: list[DTensor], given: list[DTensor]) -> tuple[list[DTensor], list[DTensor]]:
        n = len(self.stacked)
        own, rows = given[:n], given[n:]
        n_own = n - (self.key is not None)
        layer = px_tree.unflatten(self.stacked_tree, own[:n_own])
        index = own[-1] if self.key is not None else None
        new, aux = self.functions.layer(
            layer, px_tree.unflatten(self.x_tree, x), self._microbatch(rows), self._key(rows), index
        )
        found, self.stage_aux_tree = px_tree.flatten(px_tree.map(self.trace.as_global, aux))
        return [self.trace.as_global(leaf) for leaf in px_tree.leaves(new)], found

    def _call_epilogue(self, x: list[DTensor], given: list[DTensor]) -> tuple[list[DTensor], list[DTensor]]:
        loss, aux = self.functions.last(
            self._shared(), px_tree.unflatten(self.x_tree, x), self._microbatch(given), self._key(given), self.layers
        )
        found, self.last_aux_tree = px_tree.flatten(px_tree.map(self.trace.as_global, aux))
        return [self.trace.as_global(loss)], found

    def _trace_pieces(self) -> tuple[Pieces, list[DTensor]]:
        trace, grads = self.trace, torch.is_grad_enabled()
        with trace.marked(source=self.source):
            stacked = [self._slot_of_layer(leaf) for leaf in self.stacked]
            rows = [self._slot_of_row(leaf) for leaf in self.rows]
            first, closed_first = try_piece(self._call_prologue, [], rows, [], trace)
            specs = [self._off_axis(placed(x._spec, x.placements)) for x in first]
            closed_layer: list[DTensor] = []
            for _ in range(_TRIALS):
                x = [Slot.of(spec, grads and spec.tensor_meta.dtype.is_floating_point) for spec in specs]
                new, closed_layer = try_piece(self._call_layer, x, [*stacked, *rows], closed_layer, trace)
                settled = [placed(s, _settled(s, n)) for s, n in zip(specs, new)]
                stable = all(tuple(a.placements) == tuple(b.placements) for a, b in zip(settled, specs))
                specs = settled
                if stable:
                    break
            x = [Slot.of(spec, grads and spec.tensor_meta.dtype.is_floating_point) for spec in specs]
            _, closed_last = try_piece(self._call_epilogue, x, rows, [], trace)

            def first_at(call: Call) -> Call:
                def placed_call(given: list[DTensor], rest: list[DTensor]) -> tuple[list[DTensor], list[DTensor]]:
                    out, aux = call(given, rest)
                    return [self._at(leaf, spec) for leaf, spec in zip(out, specs)], aux

                return placed_call

            calls: list[tuple[str, Call, list[Slot], list[Slot], list[DTensor]]] = [
                ("prologue", first_at(self._call_prologue), [], rows, closed_first),
                ("stage", first_at(self._call_layer), x, [*stacked, *rows], closed_layer),
                ("epilogue", self._call_epilogue, x, rows, closed_last),
            ]
            pieces = [trace_piece(*call, trace, {}) for call in calls]
            wanted = _different(pieces)
            if wanted:
                pieces = [trace_piece(*call, trace, wanted) for call in calls]
        for piece in pieces:
            self._check_piece(piece)
        closed = {id(value): value for piece in pieces for value in piece.closed}
        return Pieces(*pieces), list(closed.values())

    def _at(self, leaf: DTensor, spec: Any) -> DTensor:
        if tuple(leaf.placements) == tuple(spec.placements):
            return leaf
        with self.trace.marked(asked=False, reason="a pipeline's x keeps its placement"):
            return leaf.redistribute(leaf.device_mesh, spec.placements)

    def _off_axis(self, spec: Any) -> Any:
        if self.dim is not None and not spec.placements[self.dim].is_replicate():
            raise SpecError(
                f"pipeline: x is placed on {self.axis!r}",
                got=str(spec_of_placements(spec.placements, self.trace.mesh.axis_names, len(spec.shape))),
                fix="px.reshard x to other axes, and gather weights that are stored in parts before their use",
                source=self.source,
            )
        return spec

    def _slot_of_layer(self, leaf: DTensor) -> Slot:
        spec, local = leaf._spec, leaf._local_tensor
        meta: Any = spec.tensor_meta
        placements = [
            Replicate() if i == self.dim or p.is_shard(0) else tc.shifted_shard(p, -1)
            for i, p in enumerate(spec.placements)
        ]
        own = tc.make_spec(self.view, tuple(placements), meta.shape[1:], meta.stride[1:], meta.dtype)
        wants = torch.is_grad_enabled() and leaf.requires_grad
        shape = tuple(local.shape[1:])
        return Slot(own, shape, contiguous_strides(shape), wants)

    def _slot_of_row(self, leaf: DTensor) -> Slot:
        spec, local = self._off_axis(leaf._spec), leaf._local_tensor
        return Slot(slice_spec(spec), tuple(local.shape[1:]), tuple(local.stride()[1:]), False)

    def _check_piece(self, piece: Piece) -> None:
        """Nothing in a stage may send over the pipeline's axis: the others are busy with other microbatches."""
        groups = {g for g, axes in self.trace.joint_groups.items() if self.axis in split_axes(axes)}
        for body in (piece.forward, piece.backward):
            for node in body.graph.nodes if body is not None else ():
                if node.args and isinstance(node.args[-1], str) and node.args[-1] in groups:
                    raise SpecError(
                        f"pipeline: the {piece.name} communicates over {self.axis!r}",
                        got=str(getattr(node.target, "_schema", node.target)).split("(")[0],
                        expected="communication over other axes alone",
                        fix="gather weights that are stored in parts with px.reshard(w, P()) before their use, "
                        f"and place what comes from outside on other axes than {self.axis!r}",
                        source=self.source,
                    )

    # The operands and results.

    def operands(self, local: list[torch.Tensor]) -> Operands:
        """Where they stand; constants and the seed are added."""
        n, n_closed = len(self.stacked), len(self.closed)
        values, constants = list(local), {}
        for piece in self._all():
            constants[piece.name] = list(range(len(values), len(values) + len(piece.constants)))
            values += piece.constants
        loss = self.pieces.epilogue.result_specs[0].tensor_meta.dtype
        values.append(torch.full((), 1.0 / self.m, dtype=loss, device=self.view.device_type))
        return Operands(
            values,
            list(range(n)),
            list(range(n + n_closed, n + n_closed + len(self.rows))),
            {id(value): n + i for i, value in enumerate(self.closed)},
            constants,
        )

    def move(self) -> Move:
        """How the stacked leaves' rows come to their stages."""
        place = self.trace.mesh.rank_coords(self.trace.rank)[self.dim] if self.dim is not None else 0
        owners = [self.table.rank_of_stage[stage] for stage in layer_homes(self.layers, self.table.num_stages)]
        group = None if self.size == 1 else next(g for g, a in self.trace.joint_groups.items() if a == self.axis)
        return Move(layer_homes(self.layers, self.size), owners, place, self.size, group)

    def layout(self, move: Move) -> Layout:
        """Where this rank stands, and which rows of the stacked leaves are whose."""
        stage_of = layer_homes(self.layers, self.table.num_stages)
        rows = {
            stage: [row for row, layer in enumerate(move.held) if stage_of[layer] == stage]
            for stage in self.table.stages_of(move.place)
        }
        return Layout(move.place, move.group, rows)

    def result_specs(self) -> list[Any]:
        """Of the loss, the epilogue's aux, the layers' aux."""
        epilogue, layer = self.pieces.epilogue, self.pieces.layer
        last = [self._owed(spec) for spec in (*epilogue.result_specs, *epilogue.aux_specs)]
        return [*last, *(self._by_layer(spec) for spec in layer.aux_specs)]

    def gradient_specs(self) -> tuple[list[int], list[Any]]:
        """(operands that have gradients, the specs of these)."""
        layer = self.pieces.layer
        index, specs = list(stacked_gradients(self.pieces)), []
        for k in index:
            position = len(layer.input_grads) + layer.weight_grads.index(k + layer.n_inputs)
            specs.append(self._by_layer(layer.gradient_specs[position]))
        place = {id(value): len(self.stacked) + i for i, value in enumerate(self.closed)}
        known: dict[int, Any] = {}
        for piece in self._all():
            for i, spec in zip([*piece.input_grads, *piece.weight_grads], piece.gradient_specs):
                if i >= piece.n_given:
                    known.setdefault(id(piece.closed[i - piece.n_given]), spec)
        for value, _ in closed_gradients(self.pieces):
            index.append(place[id(value)])
            specs.append(self._owed(known[id(value)]))
        return index, specs

    def _owed(self, spec: Any) -> Any:
        """One rank of the axis has it: the others owe zeros."""
        return placed(
            spec, [Partial("sum") if i == self.dim and self.size > 1 else p for i, p in enumerate(spec.placements)]
        )

    def _by_layer(self, spec: Any) -> Any:
        stacked = stack_spec(spec, self.layers)
        return placed(stacked, [Shard(0) if i == self.dim else p for i, p in enumerate(stacked.placements)])

    def package(self, results: Sequence[Any]) -> Any:
        """The results in the form that the caller expects."""
        if not self.functions.has_aux:
            return results[0]
        n = 1 + len(self.pieces.epilogue.aux_specs)
        last = px_tree.unflatten(self.last_aux_tree, list(results[1:n]))
        return results[0], {"stages": px_tree.unflatten(self.stage_aux_tree, list(results[n:])), "epilogue": last}


def _settled(spec: Any, new: DTensor) -> list[Any]:
    """The placements that x should have had from the start: sharded where a layer shards it, owed sums paid."""

    def one(old: Any, after: Any) -> Any:
        if old.is_replicate() and isinstance(after, Shard):
            return after
        if old.is_partial() and after != old:
            return after if isinstance(after, Shard) else Replicate()
        return old

    return [one(p, q) for p, q in zip(spec.placements, new.placements)]


def _different(pieces: Sequence[Piece]) -> dict[int, tuple[Any, ...]]:
    """Closed values whose gradients pieces place differently -> where they are to be placed."""
    found: dict[int, list[Any]] = {}
    values = {}
    for piece in pieces:
        for i, spec in zip([*piece.input_grads, *piece.weight_grads], piece.gradient_specs):
            if i >= piece.n_given:
                value = piece.closed[i - piece.n_given]
                values[id(value)] = value
                found.setdefault(id(value), []).append(tuple(spec.placements))
    return {
        key: tuple(paid(values[key]._spec).placements)
        for key, placements in found.items()
        if any(p != placements[0] for p in placements)
    }


class _PipelineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *operands: DTensor) -> Any:
        move, local = run.move(), [value._local_tensor for value in operands]
        n = len(run.stacked)
        local[:n] = [x.contiguous() for x in local[:n]]
        if move.needed:
            local[:n] = [move.there(x, run.trace) for x in local[:n]]
        given = run.operands(local)
        body = rank_program(run.pieces, run.table, given, run.layout(move), run.origin)
        outs = list(trace_call(body, *given.values))
        specs = run.result_specs()
        results, gradients = outs[: len(specs)], outs[len(specs) :]
        if move.needed:
            n_last = len(specs) - run.pieces.layer.n_aux
            results[n_last:] = [move.back(x, run.trace) for x in results[n_last:]]
        ctx.run, ctx.n, ctx.move = run, len(operands), move
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        wrapped = [tc.wrap_local(_summed(t, s), _sums(s)) for t, s in zip(results, specs)]
        ctx.mark_non_differentiable(*wrapped[1:])
        return tuple(wrapped)

    @staticmethod
    def backward(ctx: Any, cotangent: DTensor | None, *_: Any) -> Any:
        run = ctx.run
        if torch.is_grad_enabled():
            raise GradientError(
                "pipeline is differentiated twice by torch.autograd.grad(create_graph=True)",
                fix="nest px.grad instead",
                source=run.source,
            )
        found: list[Any] = [None] * ctx.n
        if cotangent is not None:
            index, specs = run.gradient_specs()
            with run.trace.marked(source=run.source, phase="backward"):
                whole: Any = cotangent.redistribute(run.view, [Replicate()] * run.view.ndim)
                for i, spec, gradient in zip(index, specs, ctx.gradients):
                    if ctx.move.needed and i < len(run.stacked):
                        gradient = ctx.move.back(gradient, run.trace)
                    found[i] = tc.wrap_local(gradient * whole._local_tensor.to(gradient.dtype), spec)
        ctx.gradients = None
        return None, *found


def _averages(spec: Any) -> int:
    return math.prod(spec.mesh.size(i) for i, p in enumerate(spec.placements) if p.is_partial("avg"))


def _summed(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """An addend of a sum for one of an average."""
    return local / _averages(spec) if _averages(spec) > 1 else local


def _sums(spec: Any) -> Any:
    return placed(spec, [Partial("sum") if p.is_partial("avg") else p for p in spec.placements])
