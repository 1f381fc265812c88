"""Interleaved 1F1B: several stages on each rank, so that the pipeline fills sooner."""

from __future__ import annotations

import dataclasses

from ptrainx.core.errors import InputError
from ptrainx.ops.schedules.actions import Action
from ptrainx.ops.schedules.schedule import Actions, Schedule

__all__ = ["Interleaved1F1B"]


@dataclasses.dataclass(frozen=True)
class Interleaved1F1B(Schedule):
    """1F1B with v stages on each rank: the bubble shrinks v times, at the price of v times the sends.

    A rank takes the microbatches in groups: a whole group through its first stage, then through its second, and so on.
    There are R = max(1, M // p) groups, as even as they can be, the first of g = ceil(M / R), so that M need not be a
    multiple of p.

    Bubble b / (vM + b) with b = (p - 1) + (v - 1) max(0, p - M), which is (p - 1) / (vM + p - 1) from M = p on. Rank r
    stores min(vM, (v - 1) g + 2 (p - 1 - r) + 1) activations, each of a stage v times smaller.

    Args:
        chunks: v, stages on each rank.

    Raises:
        InputError: chunks that are no whole number from 1 on.

    >>> from ptrainx.ops.schedules import Interleaved1F1B
    >>> round(Interleaved1F1B(chunks=2).bubble(4, 8), 3)
    0.158

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training" (arXiv:2104.04473), section 2.2.
    """

    chunks: int = 2
    name: str = dataclasses.field(default="interleaved 1F1B", init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.chunks, int) or self.chunks < 1:
            raise InputError(
                "Interleaved1F1B: chunks is no number of stages",
                got=repr(self.chunks),
                expected="a whole number from 1 on",
            )

    def actions(self, num_ranks: int, num_microbatches: int) -> Actions:
        return [self._of_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]

    def _of_rank(self, rank: int, p: int, m: int) -> list[Action]:
        forwards: list[Action] = []
        backwards: list[Action] = []
        for group in _groups(p, m):
            for chunk in range(self.chunks):
                forwards += [Action("F", chunk * p + rank, i) for i in group]
                backwards += [Action("B", (self.chunks - 1 - chunk) * p + rank, i) for i in group]
        ahead = min(len(forwards), (self.chunks - 1) * len(_groups(p, m)[0]) + 2 * (p - 1 - rank))
        todo = forwards[:ahead]
        for i, backward in enumerate(backwards):
            todo += [*forwards[ahead + i : ahead + i + 1], backward]
        return todo

    def bound(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        first = len(_groups(num_ranks, num_microbatches)[0])
        most = self.chunks * num_microbatches
        return tuple(min(most, (self.chunks - 1) * first + 2 * (num_ranks - 1 - r) + 1) for r in range(num_ranks))

    def bubble(self, num_ranks: int, num_microbatches: int) -> float:
        idle = num_ranks - 1 + (self.chunks - 1) * max(0, num_ranks - num_microbatches)
        return idle / (self.chunks * num_microbatches + idle)


def _groups(p: int, m: int) -> list[range]:
    """The microbatches in max(1, m // p) runs of p or more, the longer ones first."""
    rounds = max(1, m // p)
    sizes = [m // rounds + (i < m % rounds) for i in range(rounds)]
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(rounds)]
