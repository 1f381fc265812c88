"""DualPipeV: two stages on each rank, there and back, forwards paired with backwards of other microbatches."""

from __future__ import annotations

import dataclasses
from collections import deque

from ptrainx.ops.schedules.actions import Action
from ptrainx.ops.schedules.schedule import Actions, Schedule, keep
from ptrainx.ops.schedules.table import v_placement

__all__ = ["DualPipeV"]


@dataclasses.dataclass(frozen=True)
class DualPipeV(Schedule):
    """Two stages on each rank, r and 2p - 1 - r; forwards alternate with whole backwards, and the ends split I and W.

    Made for models whose layers send much: a forward and the backward after it belong to different microbatches, so
    that what one sends can overlap with what the other computes. The order is made for at least 2p microbatches; for
    fewer, the actions of the others are left out.

    Bubble (p - 1) / (6M + p - 1) in units of a stage's F, from M = 2p on. Every rank stores at most min(2M, 2p + 1)
    activations, each of a stage of half the size.

    >>> from ptrainx.ops.schedules import DualPipeV
    >>> max(DualPipeV().table(4, 16).timeline().peak_activations)
    9

    Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 3.2.1, and github.com/deepseek-ai/DualPipe; halved to a V by
    Qi et al. 2025, "DualPipe could be better without the Dual".
    """

    chunks: int = dataclasses.field(default=2, init=False, repr=False)
    name: str = dataclasses.field(default="DualPipeV", init=False, repr=False)

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        return v_placement(num_ranks)

    def actions(self, num_ranks: int, num_microbatches: int) -> Actions:
        enough = max(num_microbatches, 2 * num_ranks)
        return keep([_of_rank(rank, num_ranks, enough) for rank in range(num_ranks)], num_microbatches)

    def bound(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        return (min(2 * num_microbatches, 2 * num_ranks + 1),) * num_ranks

    def bubble(self, num_ranks: int, num_microbatches: int) -> float | None:
        if num_microbatches < 2 * num_ranks:
            return None
        return (num_ranks - 1) / (6 * num_microbatches + num_ranks - 1)


def _of_rank(rank: int, p: int, m: int) -> list[Action]:
    there, back = rank, 2 * p - 1 - rank
    todo: list[Action] = []
    count = {(way, stage): 0 for way in ("forward", "backward") for stage in (there, back)}
    waiting: deque[Action] = deque()

    def do(kind: str, stage: int) -> None:
        way = "forward" if kind == "F" else "backward"
        todo.append(Action(kind, stage, count[way, stage]))
        count[way, stage] += 1
        if kind == "I":
            waiting.append(Action("W", stage, todo[-1].microbatch))

    def weight() -> None:
        if waiting:
            todo.append(waiting.popleft())

    beyond = p - 1 - rank  # ranks between this one and the turn
    for _ in range(2 * beyond):
        do("F", there)
    for _ in range(rank + 1):
        do("F", there)
        do("F", back)
    for _ in range(beyond):
        do("I", back)
        weight()
        do("F", back)
    # Steady: a forward on one stage with a backward on the other.
    for _ in range(m - 2 * p + rank + 1):
        do("F", there)
        do("B", back)
        do("F", back)
        do("B", there)
    for _ in range(beyond):
        do("B", back)
        do("F", back)
        do("B", there)
    # Drain: of the last rank + 1 pairs of backwards, the second half split, so that their weights fill the end.
    for i in range(2 * (rank + 1)):
        do("B" if i <= rank else "I", there if i % 2 else back)
    for _ in range(beyond):
        weight()
        do("I", there)
    while waiting:
        weight()
    return todo
