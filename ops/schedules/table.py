"""A schedule for so many ranks and microbatches: each rank's actions, in order.

In: sizes, where stages lie, actions. Out: `validate` tells whether it can be run, `timeline` when everything happens.
Next stage: an executor, which sends what an action gives to the rank whose action needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from ptrainx.core.errors import InputError, ScheduleError
from ptrainx.ops.schedules.actions import Action
from ptrainx.ops.schedules.clock import Timeline, most_stored, run
from ptrainx.ops.schedules.draw_svg import draw_svg
from ptrainx.ops.schedules.draw_text import draw_text
from ptrainx.ops.schedules.validate import Parts, validate

__all__ = ["Duration", "Table", "as_actions", "loop_placement", "v_placement"]

Duration = float | Sequence[float]
"""How long an action takes: one number, or one for each stage."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Each rank's list of actions.

    Args:
        num_ranks: p.
        num_stages: S, p times the stages on each rank.
        num_microbatches: M.
        rank_of_stage: for each stage the rank that holds it.
        actions: for each rank its actions, in order; `Action`s or tuples `(kind, stage, microbatch)`.
        activation_bound: the most activations that each rank may hold at once; see `Timeline.peak_activations`. None
            promises nothing.

    Raises:
        ScheduleError: something among the actions that is none.

    >>> one = Table(1, 1, 2, (0,), [[("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]])
    >>> one.validate().timeline().makespan
    6.0
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    activation_bound: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank_of_stage", tuple(self.rank_of_stage))
        object.__setattr__(self, "actions", as_actions(self.actions))
        if self.activation_bound is not None:
            object.__setattr__(self, "activation_bound", tuple(self.activation_bound))

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return self.num_stages // self.num_ranks

    @property
    def backward(self) -> bool:
        """Whether there are gradients, or only forwards."""
        return any(action.kind != "F" for todo in self.actions for action in todo)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    def forward_only(self) -> Table:
        """The same order without gradients."""
        actions = tuple(tuple(action for action in todo if action.kind == "F") for todo in self.actions)
        return dataclasses.replace(self, actions=actions)

    def validate(self) -> Table:
        """The table itself, if it can be run.

        Every action is there once, on the rank that holds its stage; run in order by every rank, with sends that never
        block, no action waits for ever; no rank holds more activations than `activation_bound`.

        Raises:
            ScheduleError: else; it names the first bad action, its rank and position, and what to do.
        """
        validate(Parts(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}))
        return self

    def timeline(
        self,
        forward: Duration = 1.0,
        backward: Duration = 2.0,
        input: Duration = 1.0,
        weight: Duration = 1.0,
        send: float = 0.0,
    ) -> Timeline:
        """When every action of a valid table starts and ends, if it takes so long.

        Args:
            forward: duration of F, in any unit; one number, or one for each stage.
            backward: of B.
            input: of I.
            weight: of W.
            send: how long a value takes from one rank to another. Sends overlap with computing.

        Raises:
            InputError: negative durations, or not one for each stage.
        """
        given = {"forward": forward, "backward": backward, "input": input, "weight": weight}
        durations = [self._by_stage(name, value) for name, value in given.items()]
        by_kind = dict(zip("FBIW", durations))
        spans = run(self.actions, self.rank_of_stage, lambda action: by_kind[action.kind][action.stage], send)
        stored = [most_stored(todo) for todo in self.actions]
        return Timeline(
            spans=tuple(map(tuple, spans)),
            makespan=max((had[-1].end for had in spans if had), default=0.0),
            busy=tuple(sum(by_kind[action.kind][action.stage] for action in todo) for todo in self.actions),
            peak_activations=tuple(most for most, _ in stored),
            peak_pending=tuple(pending for _, pending in stored),
        )

    def visualize(self, format: str = "text", *, title: str = "schedule", **durations: Duration) -> str:
        """A picture of the timeline, with the bubble and the activations that each rank stores.

        Args:
            format: "text", or "svg".
            title: what it is called.
            **durations: as `timeline` takes them.

        Returns:
            text, or an SVG document.

        Raises:
            InputError: another format.
        """
        if format not in ("text", "svg"):
            raise InputError("visualize: an unknown format", got=repr(format), expected='"text" or "svg"')
        draw = draw_text if format == "text" else draw_svg
        heading = f"{title}: {self.num_ranks} ranks, {self.num_microbatches} microbatches"
        return draw(self.timeline(**durations), self.rank_of_stage, heading)  # type: ignore[arg-type]

    def _by_stage(self, name: str, duration: Duration) -> list[float]:
        values = list(duration) if isinstance(duration, Sequence) else [duration] * self.num_stages
        if len(values) != self.num_stages or not all(value >= 0 for value in values):
            raise InputError(
                f"timeline: {name} is no duration",
                got=repr(duration),
                expected=f"a number from 0 on, or {self.num_stages} of them, one for each stage",
            )
        return values


def as_actions(actions: Iterable[Iterable[Any]]) -> tuple[tuple[Action, ...], ...]:
    """Lists of tuples as tuples of `Action`.

    Raises:
        ScheduleError: an entry that is no tuple of three.
    """
    return tuple(
        tuple(_as_action(value, rank, position) for position, value in enumerate(todo))
        for rank, todo in enumerate(actions)
    )


def _as_action(value: Any, rank: int, position: int) -> Action:
    if isinstance(value, tuple) and len(value) == 3:
        return Action(*value)
    raise ScheduleError(
        f"schedule: rank {rank}, position {position}: no action",
        got=repr(value),
        expected="px.schedules.Action(kind, stage, microbatch), or a tuple of these three",
    )


def loop_placement(num_ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stages dealt out to the ranks in turn: stage s lies on rank s mod p.

    >>> loop_placement(3, chunks=2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * chunks


def v_placement(num_ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Stages there and back again, so that the first and the last lie on rank 0.

    >>> v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(num_ranks))
    return tuple(rank for turn in range(chunks) for rank in (there[::-1] if turn % 2 else there))
