"""Zero-bubble ZB-H1: gradients of weights wait, and fill what would be bubbles."""

from __future__ import annotations

import dataclasses

from ptrainx.ops.schedules.actions import Action
from ptrainx.ops.schedules.schedule import Actions, Schedule

__all__ = ["ZeroBubble"]


@dataclasses.dataclass(frozen=True)
class ZeroBubble(Schedule):
    """1F1B with each backward split: I, which the stage before waits for, at once; W, which none waits for, r later.

    ZB-H1. Bubble b / (3M + b) with b = max(p - 1, 2p - 1 - M), which is (p - 1) / (3M + p - 1) from M = p on: a third
    of 1F1B's idle time. Of durations F, I, W with W no longer than the others, (p - 1)(F + I - W) is idle and
    M (F + I + W) busy on each rank. Every rank stores min(M, p) activations, what rank 0 stores in 1F1B, since those of
    a microbatch are needed until its W.

    >>> from ptrainx.ops.schedules import ZeroBubble
    >>> print(*ZeroBubble().table(2, 2).actions[1], sep=", ")
    F(stage 1, microbatch 0), I(stage 1, microbatch 0), F(stage 1, microbatch 1), I(stage 1, microbatch 1), \
W(stage 1, microbatch 0), W(stage 1, microbatch 1)

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 2.1, table 2.
    """

    chunks: int = dataclasses.field(default=1, init=False, repr=False)
    name: str = dataclasses.field(default="zero bubble ZB-H1", init=False, repr=False)

    def actions(self, num_ranks: int, num_microbatches: int) -> Actions:
        return [_of_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]

    def bound(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        return (min(num_microbatches, num_ranks),) * num_ranks

    def bubble(self, num_ranks: int, num_microbatches: int) -> float:
        idle = max(num_ranks - 1, 2 * num_ranks - 1 - num_microbatches)
        return idle / (3 * num_microbatches + idle)


def _of_rank(rank: int, p: int, m: int) -> list[Action]:
    ahead = min(m, p - 1 - rank)
    todo = [Action("F", rank, i) for i in range(ahead)]
    for i in range(m):
        if ahead + i < m:
            todo.append(Action("F", rank, ahead + i))
        todo.append(Action("I", rank, i))
        if i >= rank:
            todo.append(Action("W", rank, i - rank))
    return todo + [Action("W", rank, i) for i in range(max(0, m - rank), m)]
