"""From passes to lowering: which kernels run, and what Inductor takes.

Enters: the graphs of the ranks that this process plays, after the passes. Leaves: copies that `lower` writes out. The
graphs themselves stay as they are, for reports.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

from ptrainx.compile.inductor import CompileReport, FallbackWarning, compile_regions, no_compiler
from ptrainx.compile.trace import Program, RankGraph

__all__ = ["Preparation", "prepare"]


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What was decided before lowering.

    Attributes:
        backend: that runs: "graph" or "inductor".
        regions: what Inductor did; None on the graph backend.
    """

    backend: str
    regions: CompileReport | None

    def __str__(self) -> str:
        return "\n".join([f"backend {self.backend}", *([str(self.regions)] if self.regions else [])])


def prepare(program: Program, graphs: Sequence[RankGraph], backend: str) -> tuple[list[RankGraph], Preparation]:
    """The graphs as they are to be lowered, and what was decided.

    Args:
        program: what was traced.
        graphs: after the passes.
        backend: "graph" or "inductor"; the latter becomes the former, with a warning, where there is no compiler.
    """
    if backend == "inductor":
        problem = no_compiler(program.device)
        if problem is not None:
            warn_no_compiler(problem)
            backend = "graph"
    if backend == "graph":
        return list(graphs), Preparation(backend, None)
    # Simulated ranks may hold one tensor in common, so there a donated argument is let go of, not overwritten.
    simulated = getattr(program.mesh, "simulated", False)
    donated = [] if simulated else [i for i, a in enumerate(program.arguments) if a.donated]
    report = CompileReport()
    return [compile_regions(graph, donated, report) for graph in graphs], Preparation(backend, report)


def warn_no_compiler(problem: str) -> None:
    """Says that the graph backend runs in Inductor's place; Python shows a warning from one place once."""
    warnings.warn(
        f'backend="inductor" runs as backend="graph": {problem}. Install one, for example g++ '
        "(apt install g++, or conda install gxx), or ask for the graph backend",
        FallbackWarning,
        stacklevel=2,
    )
