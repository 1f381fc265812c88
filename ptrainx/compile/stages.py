"""JAX's stages: `step.trace(*args)` -> Traced -> Lowered -> Compiled.

Traced and Lowered work on an `AbstractMesh`; Compiled needs devices, real or simulated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ptrainx.compile.agreement import Agreement, hash_tensor, meeting_of
from ptrainx.compile.backend import Preparation, prepare
from ptrainx.compile.check_passes import History, check_history
from ptrainx.compile.comms import CommReport, report_comms
from ptrainx.compile.cost import CostReport, report_cost
from ptrainx.compile.executable import Executable
from ptrainx.compile.graph import copy_module
from ptrainx.compile.hosted import host_graphs
from ptrainx.compile.memory import report_memory
from ptrainx.compile.memory_report import MemoryReport
from ptrainx.compile.passes import run_passes
from ptrainx.compile.text import as_text
from ptrainx.compile.timeline import Hardware, Timeline, predict_time
from ptrainx.compile.trace import Program, RankGraph, trace_program
from ptrainx.core import flags
from ptrainx.core.avals import as_tensor
from ptrainx.core.errors import MeshError
from ptrainx.mesh.mesh import Mesh

__all__ = ["Compiled", "Lowered", "Traced", "compile_program"]


class Traced:
    """A function's graph as it was traced, before any pass.

    Attributes:
        program: the function with its abstract arguments and specs.
        graphs: one graph a rank that this process plays; a logical rank, where reductions are ordered.
        backend: that is to run it.
    """

    def __init__(self, program: Program, backend: str = "graph"):
        self.program, self.backend = program, backend
        self.graphs = _trace(program)

    def as_text(self, rank: int = 0) -> str:
        """The graph, one line a node."""
        return as_text(self.program.traced, self.graphs[rank])

    def lower(self) -> Lowered:
        """The graph after all passes."""
        return _lower(self.program, [_copied(graph) for graph in self.graphs], self.backend)


class Lowered:
    """A function's graph after all passes.

    Attributes:
        program: the function with its abstract arguments and specs.
        graphs: one graph a rank that this process plays.
        backend: that is to run it.
        histories: each rank's graphs between the passes, under `PTRAINX_CHECK_PASSES=1`; else empty.
    """

    def __init__(
        self, program: Program, graphs: list[RankGraph], backend: str = "graph", histories: Sequence[History] = ()
    ):
        self.program, self.graphs, self.backend, self.histories = program, graphs, backend, histories

    def as_text(self, rank: int = 0) -> str:
        """The graph, one line a node: global shapes as `f32[2048@data,256]` at the ends, local shapes between."""
        return as_text(self.program, self.graphs[rank])

    def comms(self, rank: int = 0) -> CommReport:
        """Every collective: kind, axis, bytes, count, layer, source line, phase, asked or implied, reason."""
        return report_comms(self.graphs[rank], self.program.mesh.shape)

    def cost(self, rank: int = 0) -> CostReport:
        """Floating-point operations and bytes read and written, by phase and layer."""
        return report_cost(self.graphs[rank])

    def memory(self, rank: int = 0) -> MemoryReport:
        """The predicted peak of live tensors, and who holds it."""
        return report_memory(self.program, self.graphs[rank])

    def timeline(self, hardware: Hardware, rank: int = 0) -> Timeline:
        """The time of a step by a cost model, with the overlap of this graph's order and without any."""
        return predict_time(self.graphs[rank], self.program.mesh.shape, hardware)

    def compile(self) -> Compiled:
        """The program, ready to run.

        Raises:
            MeshError: the mesh is abstract.
        """
        if not isinstance(self.program.mesh, Mesh):
            raise MeshError(
                f"{self.program.name} is lowered for {self.program.mesh}, which has no devices",
                fix="make the mesh with px.make_mesh, simulate=True for one process",
            )
        with meeting_of(self.program.mesh, self.program.name) as meeting:
            compiled = _compile(self, meeting)
            meeting.settle(self.graphs[0], {})
        return compiled


class Compiled:
    """A program that runs: called with arguments like those it was traced for, the static ones among them."""

    def __init__(self, lowered: Lowered, executable: Executable, preparation: Preparation):
        self.lowered, self.program, self.preparation = lowered, lowered.program, preparation
        self.run: Callable[[list[Any]], Any] = executable
        self.executable = executable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.executable(self.program.flatten(*args, **kwargs))

    def as_text(self) -> str:
        """The generated Python of the first rank that this process plays."""
        return self.executable.sources[0]

    def kernels(self) -> Preparation:
        """What was chosen to run: the backend, its compiled regions, kernels of matrix products. Prints as a report."""
        return self.preparation

    def comms(self) -> CommReport:
        """As `Lowered.comms`."""
        return self.lowered.comms()


def compile_program(
    program: Program,
    leaves: list[Any],
    meeting: Agreement,
    check: Callable[[Lowered], None] | None = None,
    backend: str = "graph",
) -> Compiled:
    """Traces, lowers and compiles; on a real mesh of several processes the ranks agree before they return.

    Args:
        program: what to compile.
        leaves: the leaves of the call that asked for it; plain ones are compared between ranks.
        meeting: of the ranks.
        check: called with the lowered program; may refuse it.
        backend: "graph" or "inductor".
    """
    lowered = _lower(program, _trace(program), backend)
    if check is not None:
        check(lowered)
    compiled = _compile(lowered, meeting)
    if not meeting.alone:
        meeting.settle(lowered.graphs[0], plain_hashes(program, leaves))
    return compiled


def _compile(lowered: Lowered, meeting: Agreement) -> Compiled:
    graphs, preparation = prepare(lowered.program, lowered.graphs, lowered.backend, meeting)
    executable = Executable(lowered.program, graphs)
    if lowered.histories:
        executable.before_first = functools.partial(check_history, lowered.program, lowered.histories)
    return Compiled(lowered, executable, preparation)


def _trace(program: Program) -> list[RankGraph]:
    """A graph for each rank, or logical rank, that this process plays."""
    traced = program.traced
    return [trace_program(traced, rank) for rank in traced.mesh.ranks]


def _lower(program: Program, graphs: list[RankGraph], backend: str) -> Lowered:
    """All passes over each rank's graph, which they change."""
    if program.logical is not None:
        return Lowered(program, host_graphs(program, [run_passes(graph) for graph in graphs]), backend)
    if not flags.check_passes():
        return Lowered(program, [run_passes(graph) for graph in graphs], backend)
    histories = [History.of(graph) for graph in graphs]
    return Lowered(program, [run_passes(g, h.watch) for g, h in zip(graphs, histories)], backend, histories)


def plain_hashes(program: Program, leaves: list[Any]) -> dict[str, str]:
    """A hash of every plain leaf: what has to be equal on every rank."""
    return {
        argument.path: hash_tensor(as_tensor(leaf))
        for argument, leaf in zip(program.arguments, leaves)
        if argument.plain
    }


def _copied(graph: RankGraph) -> RankGraph:
    """A copy that passes may change, sharing no nodes."""
    return dataclasses.replace(graph, module=copy_module(graph.module))
