"""From passes to lowering: which kernels run, and what Inductor takes.

Enters: the graphs of the ranks that this process plays, after the passes. Leaves: copies that `lower` writes out. The
graphs themselves stay as they are, for reports.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence

from ptrainx.compile.agreement import Agreement
from ptrainx.compile.disk_cache import open_cache
from ptrainx.compile.graph import copy_module
from ptrainx.compile.inductor import CompileReport, FallbackWarning, compile_regions, no_compiler
from ptrainx.compile.kernels import choose_products, products_of, settled_products, use_onednn
from ptrainx.compile.trace import Program, RankGraph

__all__ = ["Preparation", "prepare"]


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What was decided before lowering.

    Attributes:
        backend: that runs: "graph" or "inductor".
        products: kernel of each matrix product that is large enough for a choice.
        regions: what Inductor did; None on the graph backend.
    """

    backend: str
    products: Mapping[str, str]
    regions: CompileReport | None

    def __str__(self) -> str:
        lines = [f"backend {self.backend}"]
        if self.regions is not None:
            lines.append(str(self.regions))
        lines += [f"{product}: {kernel}" for product, kernel in self.products.items()]
        return "\n".join(lines)


def prepare(
    program: Program, graphs: Sequence[RankGraph], backend: str, meeting: Agreement | None = None
) -> tuple[list[RankGraph], Preparation]:
    """The graphs as they are to be lowered, and what was decided.

    Args:
        program: what was traced.
        graphs: after the passes.
        backend: "graph" or "inductor"; the latter becomes the former, with a warning, where there is no compiler.
        meeting: of the mesh's ranks, not yet settled.
    """
    if backend == "inductor":
        problem = no_compiler(program.device)
        if problem is not None:
            warn_no_compiler(problem)
            backend = "graph"
    products = products_of(graph.module.graph for graph in graphs)
    alone = meeting is None or meeting.alone
    if program.logical is not None:
        kernels = settled_products(products)
    else:
        kernels = choose_products(products, open_cache(), meeting) if products or not alone else {}
    if backend == "graph" and "onednn" not in kernels.values():
        return list(graphs), Preparation(backend, kernels, None)
    copies = [dataclasses.replace(graph, module=copy_module(graph.module)) for graph in graphs]
    for graph in copies:
        use_onednn(graph.module.graph, kernels)
        graph.module.recompile()
    if backend == "graph":
        return copies, Preparation(backend, kernels, None)
    # Simulated ranks may hold one tensor in common, so there a donated argument is let go of, not overwritten.
    simulated = getattr(program.mesh, "simulated", False)
    donated = [] if simulated else [i for i, a in enumerate(program.arguments) if a.donated]
    report = CompileReport()
    for graph in copies:
        compile_regions(graph, donated, report)
    return copies, Preparation(backend, kernels, report)


@functools.cache
def warn_no_compiler(problem: str) -> None:
    """Says, once a process, that the graph backend runs in Inductor's place."""
    warnings.warn(
        f'backend="inductor" runs as backend="graph": {problem}. Install one, for example g++ '
        "(apt install g++, or conda install gxx), or ask for the graph backend",
        FallbackWarning,
        stacklevel=2,
    )
