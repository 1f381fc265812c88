"""JAX's stages: `step.trace(*args)` -> Traced -> Lowered -> Compiled.

Traced and Lowered work on an `AbstractMesh`; Compiled needs devices, real or simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ptrainx.compile.agreement import Agreement, hash_tensor, meeting_of
from ptrainx.compile.comms import CommReport, report_comms
from ptrainx.compile.executable import Executable
from ptrainx.compile.lower import collective_summary
from ptrainx.compile.passes import run_passes
from ptrainx.compile.text import as_text
from ptrainx.compile.trace import Program, RankGraph, trace_program
from ptrainx.core.avals import as_tensor
from ptrainx.core.errors import MeshError
from ptrainx.mesh.mesh import Mesh

__all__ = ["Compiled", "Lowered", "Traced", "compile_program"]


class Traced:
    """A function's graph as it was traced, before any pass.

    Attributes:
        program: the function with its abstract arguments and specs.
        graphs: one graph a rank that this process plays.
    """

    def __init__(self, program: Program):
        self.program = program
        self.graphs = [trace_program(program, rank) for rank in program.mesh.ranks]

    def as_text(self, rank: int = 0) -> str:
        """The graph, one line a node."""
        return as_text(self.program, self.graphs[rank])

    def lower(self) -> Lowered:
        """The graph after all passes."""
        return Lowered(self.program, [run_passes(_copied(graph)) for graph in self.graphs])


class Lowered:
    """A function's graph after all passes."""

    def __init__(self, program: Program, graphs: list[RankGraph]):
        self.program, self.graphs = program, graphs

    def as_text(self, rank: int = 0) -> str:
        """The graph, one line a node: global shapes as `f32[2048@data,256]` at the ends, local shapes between."""
        return as_text(self.program, self.graphs[rank])

    def comms(self, rank: int = 0) -> CommReport:
        """Every collective: kind, axis, bytes, count, source line, phase, asked or implied, reason."""
        return report_comms(self.graphs[rank], self.program.mesh.shape)

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
            compiled = Compiled(self, Executable(self.program, self.graphs))
            meeting.settle(collective_summary(self.graphs[0]), {})
        return compiled


class Compiled:
    """A program that runs: called with arguments like those it was traced for, the static ones among them."""

    def __init__(self, lowered: Lowered, executable: Executable):
        self.lowered, self.program = lowered, lowered.program
        self.run: Callable[[list[Any]], Any] = executable
        self.executable = executable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.executable(self.program.flatten(*args, **kwargs))

    def as_text(self) -> str:
        """The generated Python of the first rank that this process plays."""
        return self.executable.sources[0]

    def comms(self) -> CommReport:
        """As `Lowered.comms`."""
        return self.lowered.comms()


def compile_program(
    program: Program, leaves: list[Any], meeting: Agreement, check: Callable[[Lowered], None] | None = None
) -> Compiled:
    """Traces, lowers and compiles; on a real mesh of several processes the ranks agree before they return.

    Args:
        program: what to compile.
        leaves: the leaves of the call that asked for it; plain ones are compared between ranks.
        meeting: of the ranks.
        check: called with the lowered program; may refuse it.
    """
    lowered = Lowered(program, [run_passes(trace_program(program, rank)) for rank in program.mesh.ranks])
    if check is not None:
        check(lowered)
    compiled = Compiled(lowered, Executable(program, lowered.graphs))
    if not meeting.alone:
        meeting.settle(collective_summary(lowered.graphs[0]), plain_hashes(program, leaves))
    return compiled


def plain_hashes(program: Program, leaves: list[Any]) -> dict[str, str]:
    """A hash of every plain leaf: what has to be equal on every rank."""
    return {
        argument.path: hash_tensor(as_tensor(leaf))
        for argument, leaf in zip(program.arguments, leaves)
        if argument.plain
    }


def _copied(graph: RankGraph) -> RankGraph:
    """A copy that passes may change, sharing no nodes."""
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph.module.graph, {}))
    last = next(iter(copy.find_nodes(op="output")))
    last.meta = dict(next(iter(graph.module.graph.find_nodes(op="output"))).meta)
    return RankGraph(
        torch.fx.GraphModule(graph.module, copy),
        graph.rank,
        graph.captures,
        graph.capture_versions,
        graph.out_tree,
        graph.outputs,
        graph.fake_mode,
        graph.axis_of,
    )
