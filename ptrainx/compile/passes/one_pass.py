"""What a pass is to the pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ptrainx.compile.program import RankGraph

__all__ = ["Pass"]


@dataclasses.dataclass(frozen=True)
class Pass:
    """A graph -> graph function with what it promises.

    Attributes:
        name: what reports call it.
        run: takes a rank's graph, which it may change, and returns it. It decides alike on every rank.
        exact: whether results stay the same in every bit. Others may take sums in another order.
    """

    name: str
    run: Callable[[RankGraph], RankGraph]
    exact: bool = True

    def __call__(self, graph: RankGraph) -> RankGraph:
        return self.run(graph)
