"""Runs cells of the table: a case at a placement, forward and gradient, against one device.

A cell is *equal*, *refused* with a typed error that says what to do, or *wrong*: another value on some rank without a
word, or an error that is none of ours.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import ptrainx as px
from ptrainx import P
from ptrainx.compile.interpret import interpret
from ptrainx.compile.lockstep import Lockstep
from ptrainx.compile.program import RankGraph
from ptrainx.errors import PtrainxError
from ptrainx.mesh.placement import local_block
from ptrainx.mesh.simulated import local_tensors
from tests.ops.coverage.case import Case, values
from tests.ops.coverage.placements import place

__all__ = ["Cell", "Outcome", "expected", "gradients", "run_cells"]

BATCH = 32


@dataclasses.dataclass(frozen=True)
class Cell:
    """A case at a placement of each argument."""

    case: Case
    specs: tuple[P, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a cell gave: "equal", "refused" or "wrong", and why."""

    kind: str
    why: str = ""


def gradients(case: Case, args: Sequence[Any]) -> tuple[Any, Any]:
    """The case's result, and the gradients of its floating-point arguments for fixed cotangents."""
    weights = cotangents(case)

    def weighed(floats: tuple, rest: tuple) -> tuple[torch.Tensor, Any]:
        mine, others = iter(floats), iter(rest)
        out = case.fn(*[next(mine) if x.is_floating_point() else next(others) for x in case.args])
        products = [(leaf * w).sum() for leaf, w in zip(px.tree.leaves(out), weights) if w is not None]
        return (sum(products[1:], products[0]) if products else torch.zeros(())), out

    floats = tuple(x for x, y in zip(args, case.args) if y.is_floating_point())
    rest = tuple(x for x, y in zip(args, case.args) if not y.is_floating_point())
    (_, out), gradient = px.value_and_grad(weighed, has_aux=True)(floats, rest)
    return out, gradient


@functools.cache
def cotangents(case: Case) -> list[torch.Tensor | None]:
    """A weight for each floating-point result."""
    leaves = px.tree.leaves(case.fn(*case.args))
    return [
        values(*leaf.shape, seed=i + 3).to(leaf.dtype) if leaf.is_floating_point() else None
        for i, leaf in enumerate(leaves)
    ]


@functools.cache
def expected(case: Case) -> tuple[Any, Any]:
    """What one device gives."""
    return gradients(case, case.args)


def run_cells(cells: Sequence[Cell], mesh: px.Mesh, backend: str = "traced") -> list[Outcome]:
    """Runs cells, several in one program, since a trace takes longer than they do; one that fails is told apart.

    `backend` is one of jit's, or "traced": each rank's graph as it was traced, run node by node in lockstep.
    """
    if len(cells) > BATCH:
        return run_cells(cells[:BATCH], mesh, backend) + run_cells(cells[BATCH:], mesh, backend)

    def together(several: list[tuple]) -> list[tuple[Any, Any]]:
        return [gradients(cell.case, args) for cell, args in zip(cells, several)]

    outcomes: dict[int, Outcome] = {}
    placed: dict[int, tuple] = {}
    for i, cell in enumerate(cells):
        expected(cell.case)
        try:
            placed[i] = tuple(place(x, spec, mesh) for x, spec in zip(cell.case.args, cell.specs))
        except PtrainxError as error:
            outcomes[i] = _raised(error)
    if len(placed) == len(cells):
        try:
            return _compared(together, [placed[i] for i in range(len(cells))], cells, mesh, backend)
        except Exception as error:
            if len(cells) == 1:
                return [_raised(error)]
            half = len(cells) // 2
            return run_cells(cells[:half], mesh, backend) + run_cells(cells[half:], mesh, backend)
    rest = run_cells([cells[i] for i in placed], mesh, backend) if placed else []
    outcomes.update(zip(placed, rest))
    return [outcomes[i] for i in range(len(cells))]


def _raised(error: Exception) -> Outcome:
    """What an error makes of a cell: a typed one that says what to do is a refusal."""
    if not isinstance(error, PtrainxError):
        return Outcome("wrong", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return Outcome("refused" if error.fix else "wrong", f"{type(error).__name__}: {error.problem}")


def _compared(together: Any, placed: list[tuple], cells: Sequence[Cell], mesh: px.Mesh, backend: str) -> list[Outcome]:
    step = px.jit(together, mesh=mesh, backend="graph" if backend == "traced" else backend)
    if backend != "traced":
        return [_outcome(got, cell) for got, cell in zip(step(placed), cells)]
    graphs = step.trace(placed).graphs
    ranks = _run_traced(graphs, px.tree.leaves(placed), mesh)
    parts = [[rank[k] for rank in ranks] for k in range(len(ranks[0]))]
    specs = [output.spec for output in graphs[0].outputs]
    pairs = px.tree.unflatten(graphs[0].out_tree, [Parts(*pair) for pair in zip(parts, specs)])
    return [_outcome(got, cell, mesh) for got, cell in zip(pairs, cells)]


@dataclasses.dataclass(frozen=True)
class Parts:
    """Each rank's part of a value, and its placement."""

    every: list[torch.Tensor]
    spec: P


def _run_traced(graphs: Sequence[RankGraph], leaves: list[Any], mesh: px.Mesh) -> list[list[torch.Tensor]]:
    """Each rank's local results of the graphs as they were traced."""
    args = [
        [(local_tensors(leaf)[rank] if isinstance(leaf, DTensor) else leaf).contiguous() for leaf in leaves]
        + graph.captures
        for rank, graph in enumerate(graphs)
    ]
    calls: list[list[Any]] = [[] for _ in graphs]

    def step(graph: RankGraph, made: list[Any]) -> Any:
        def run(given: list[torch.Tensor]) -> Any:
            running, result = interpret(graph, given), None
            while True:
                try:
                    call, operand = running.send(result)
                except StopIteration as stop:
                    return stop.value
                made.append(call)
                result = yield len(made) - 1, operand

        return run

    with torch.no_grad():
        return Lockstep([(step(g, made), made) for g, made in zip(graphs, calls)], mesh.shape).run(args)


def _outcome(got: Any, cell: Cell, mesh: px.Mesh | None = None) -> Outcome:
    want = expected(cell.case)
    if px.tree.structure(got) != px.tree.structure(want):
        return Outcome("wrong", "another structure")
    for (path, a), b in zip(px.tree.flatten_with_path(got)[0], px.tree.leaves(want)):
        where = f"{'value' if path[0] == 0 else 'gradient'} {list(path[1:])}"
        limit = cell.case.tolerance * max(1.0, _largest(b)) if b.is_floating_point() or b.is_complex() else 0.0
        parts = a.every if isinstance(a, Parts) else [px.device_get(a)]
        for rank, part in enumerate(parts):
            whole = b if mesh is None else b[local_block(a.spec, mesh, b.shape, rank)]
            if part.shape != whole.shape or part.dtype != whole.dtype:
                return Outcome("wrong", f"{where} is {part.dtype}{list(part.shape)}, not {b.dtype}{list(whole.shape)}")
            if not torch.allclose(part, whole, rtol=0, atol=limit, equal_nan=True):
                kind = torch.complex128 if b.is_complex() else torch.float64
                worst = float((part.to(kind) - whole.to(kind)).abs().max())
                return Outcome("wrong", f"{where} on rank {rank} is off by {worst:.3g}")
    return Outcome("equal")


def _largest(value: torch.Tensor) -> float:
    finite = torch.nan_to_num(value.abs().double(), 0, 0, 0)
    return float(finite.max()) if finite.numel() else 0.0
