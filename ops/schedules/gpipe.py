"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

import dataclasses

from ptrainx.ops.schedules.actions import Action
from ptrainx.ops.schedules.schedule import Actions, Schedule

__all__ = ["GPipe"]


@dataclasses.dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards. The bubble of 1F1B, and every microbatch's activations stored.

    Bubble (p - 1) / (M + p - 1); stores M activations.

    >>> from ptrainx.ops.schedules import GPipe
    >>> print(*GPipe().table(2, 2).actions[1], sep=", ")
    F(stage 1, microbatch 0), F(stage 1, microbatch 1), B(stage 1, microbatch 0), B(stage 1, microbatch 1)

    Source: Huang et al. 2019, "GPipe" (arXiv:1811.06965), section 2.3.
    """

    chunks: int = dataclasses.field(default=1, init=False, repr=False)
    name: str = dataclasses.field(default="GPipe", init=False, repr=False)

    def actions(self, num_ranks: int, num_microbatches: int) -> Actions:
        return [[Action(kind, rank, m) for kind in "FB" for m in range(num_microbatches)] for rank in range(num_ranks)]

    def bound(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        return (num_microbatches,) * num_ranks

    def bubble(self, num_ranks: int, num_microbatches: int) -> float:
        return (num_ranks - 1) / (num_microbatches + num_ranks - 1)
