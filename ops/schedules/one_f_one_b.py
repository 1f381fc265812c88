"""1F1B: as soon as a rank can, it does one backward after each forward."""

from __future__ import annotations

import dataclasses

from ptrainx.ops.schedules.actions import Action
from ptrainx.ops.schedules.schedule import Actions, Schedule

__all__ = ["OneFOneB"]


@dataclasses.dataclass(frozen=True)
class OneFOneB(Schedule):
    """One forward, one backward, after p - 1 - r forwards on rank r. GPipe's bubble, and far fewer activations.

    Bubble (p - 1) / (M + p - 1); rank r stores min(M, p - r) activations.

    >>> from ptrainx.ops.schedules import OneFOneB
    >>> OneFOneB().table(4, 8).timeline().peak_activations
    (4, 3, 2, 1)

    Source: Narayanan et al. 2019, "PipeDream"; with a flush, Narayanan et al. 2021 (arXiv:2006.09503), figure 2.
    """

    chunks: int = dataclasses.field(default=1, init=False, repr=False)
    name: str = dataclasses.field(default="1F1B", init=False, repr=False)

    def actions(self, num_ranks: int, num_microbatches: int) -> Actions:
        return [_of_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]

    def bound(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        return tuple(min(num_microbatches, num_ranks - rank) for rank in range(num_ranks))

    def bubble(self, num_ranks: int, num_microbatches: int) -> float:
        return (num_ranks - 1) / (num_microbatches + num_ranks - 1)


def _of_rank(rank: int, p: int, m: int) -> list[Action]:
    ahead = min(m, p - 1 - rank)
    todo = [Action("F", rank, i) for i in range(ahead)]
    for i in range(m):
        if ahead + i < m:
            todo.append(Action("F", rank, ahead + i))
        todo.append(Action("B", rank, i))
    return todo
