"""An event clock: when each action of a schedule starts and ends.

In: each rank's actions in order, and how long they take. Every rank runs its list in order; an action starts as soon as
its rank is free and what it needs has arrived; sends are asynchronous and never block. Out: start and end of every
action up to where the ranks come to a stop, which is the end of their lists, or a deadlock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ptrainx.ops.schedules.actions import Action, needs

__all__ = ["Span", "Timeline", "most_stored", "run"]


class Span(NamedTuple):
    """An action with its start and end, in the unit of the durations."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When every action runs.

    Attributes:
        spans: each rank's actions with their starts and ends, in order.
        makespan: the end of the last action.
        busy: how long each rank computes.
        peak_activations: the most forwards whose activations a rank holds at once, each for one stage and microbatch: F
            stores them, B or W releases them. I releases none, since the gradients of weights need them too.
        peak_pending: the most microbatches (for each stage) that wait for a W at once, after their I: for these, a rank
            also holds gradients of what its weights give.
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_pending: tuple[int, ...]

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The fraction of the makespan during which each rank is idle."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time that is idle."""
        return sum(self.bubbles) / len(self.bubbles)


def run(
    actions: Sequence[Sequence[Action]],
    rank_of_stage: Sequence[int],
    duration: Callable[[Action], float],
    send: float = 0.0,
) -> list[list[Span]]:
    """Runs all ranks' lists until all have ended or none can go on.

    Args:
        actions: each rank's, in order.
        rank_of_stage: which rank holds which stage.
        duration: of an action.
        send: how long a value takes from one rank to another.

    Returns:
        each rank's spans; a list shorter than its actions stopped at an action whose needs never came.
    """
    num_stages = len(rank_of_stage)
    done: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in actions]

    def arrival(need: Action, rank: int) -> float:
        return done[need] + (send if rank_of_stage[need.stage] != rank else 0.0)

    moved = True
    while moved:
        moved = False
        for rank, (todo, had) in enumerate(zip(actions, spans)):
            while len(had) < len(todo):
                action = todo[len(had)]
                wanted = needs(action, num_stages)
                if any(need not in done for need in wanted):
                    break
                free = had[-1].end if had else 0.0
                start = max([free, *(arrival(need, rank) for need in wanted)])
                end = start + duration(action)
                had.append(Span(action, start, end))
                done[Action("I", *action[1:]) if action.kind == "B" else action] = end
                moved = True
    return spans


def most_stored(actions: Sequence[Action]) -> tuple[int, int]:
    """The most activations that a rank holds at once, and the most weight gradients that wait; see `Timeline`."""
    if all(action.kind == "F" for action in actions):
        return 0, 0
    stored = pending = most = most_pending = 0
    for action in actions:
        stored += (action.kind == "F") - (action.kind in "BW")
        pending += (action.kind == "I") - (action.kind == "W")
        most, most_pending = max(most, stored), max(most_pending, pending)
    return most, most_pending
