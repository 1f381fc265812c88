"""ZB-V: two stages on each rank, laid out there and back, with gradients of weights in the gaps."""

from __future__ import annotations

import dataclasses

from ptrainx.ops.schedules.actions import Action
from ptrainx.ops.schedules.schedule import Actions, Schedule, keep
from ptrainx.ops.schedules.table import v_placement

__all__ = ["ZBV"]


@dataclasses.dataclass(frozen=True)
class ZBV(Schedule):
    """Two stages on each rank, r and 2p - 1 - r, and I split from W. As many activations as 1F1B, and hardly a bubble.

    The order is made for at least 2p - 1 microbatches; for fewer, the actions of the others are left out. Bubble
    b / (6M + b) with b = max(p - 1, 4p - 2 - 2M) in units of a stage's F, which is p - 1 from M = 3p / 2 on: the time
    in which the first forward reaches the last rank, and no schedule can avoid it. Every rank stores at most
    min(2M, 2p) activations, each of a stage of half the size.

    >>> from ptrainx.ops.schedules import ZBV
    >>> ZBV().table(4, 8).rank_of_stage
    (0, 1, 2, 3, 3, 2, 1, 0)

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241).
    """

    chunks: int = dataclasses.field(default=2, init=False, repr=False)
    name: str = dataclasses.field(default="zero bubble ZB-V", init=False, repr=False)

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        return v_placement(num_ranks)

    def actions(self, num_ranks: int, num_microbatches: int) -> Actions:
        enough = max(num_microbatches, 2 * num_ranks - 1)
        return keep([_of_rank(rank, num_ranks, enough) for rank in range(num_ranks)], num_microbatches)

    def bound(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        return (2 * min(num_microbatches, num_ranks),) * num_ranks

    def bubble(self, num_ranks: int, num_microbatches: int) -> float:
        idle = max(num_ranks - 1, 4 * num_ranks - 2 - 2 * num_microbatches)
        return idle / (6 * num_microbatches + idle)


def _of_rank(rank: int, p: int, m: int) -> list[Action]:
    there, back = rank, 2 * p - 1 - rank
    todo: list[Action] = []
    count = {(kind, stage): 0 for kind in "FIW" for stage in (there, back)}

    def do(kinds: str, stage: int) -> None:
        for kind in kinds:
            todo.append(Action(kind, stage, count[kind, stage]))
            count[kind, stage] += 1

    # Fill: the microbatches go there, and the first ones back.
    do("F" * (2 * (p - rank) - 1), there)
    for _ in range(rank):
        do("F", back)
        do("F", there)
    # Until the first gradient has come all the way back, only the way back has backwards.
    for _ in range(p - rank):
        do("FIW", back)
    # Steady: each stage's forward and backward in turn.
    while count["F", back] < m:
        if count["F", there] < m:
            do("F", there)
        do("IW", there)
        do("FIW", back)
    # Drain: no forwards remain; weights wait until nobody waits for this rank.
    for _ in range(rank):
        do("I", there)
        do("I", back)
    for _ in range(p - rank):
        do("IW", there)
    for stage in (back, there):
        do("W" * (m - count["W", stage]), stage)
    return todo
