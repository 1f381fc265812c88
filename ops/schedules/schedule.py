"""What every schedule has: a table for any number of ranks and microbatches, what it promises, a picture.

In: an order of actions, which each schedule's own file makes. Out: validated tables.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence

from ptrainx.core.errors import InputError
from ptrainx.ops.schedules.actions import Action
from ptrainx.ops.schedules.table import Duration, Table, loop_placement

__all__ = ["Actions", "Schedule", "keep"]

Actions = Sequence[Sequence[Action]]


class Schedule(abc.ABC):
    """In which order the ranks of a pipeline run their stages on the microbatches.

    A schedule is a value: it knows no mesh and no model. Derive from it to write one, or use `Custom`.

    Attributes:
        chunks: stages on each rank.
        name: what pictures and messages call it.
    """

    chunks: int
    name: str

    @abc.abstractmethod
    def actions(self, num_ranks: int, num_microbatches: int) -> Actions:
        """Each rank's actions, in order, gradients included."""

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """Which rank holds which of the num_ranks * chunks stages: in turn, unless a schedule says otherwise."""
        return loop_placement(num_ranks, self.chunks)

    def bound(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...] | None:
        """The most activations that each rank holds at once, or None for no promise.

        Counted as by `Timeline.peak_activations`: each is of one stage, which has 1 / chunks of a rank's layers.
        """
        return None

    def bubble(self, num_ranks: int, num_microbatches: int) -> float | None:
        """The idle fraction of all ranks' time by the schedule's formula, or None where none is known.

        For stages that all take the same time, F, I and W equally long, B as long as both, sends in no time. For other
        durations, `table(...).timeline(...).bubble`.
        """
        return None

    def make(self, num_ranks: int, num_microbatches: int) -> Table:
        """The table, not validated."""
        return Table(
            num_ranks,
            num_ranks * self.chunks,
            num_microbatches,
            self.placement(num_ranks),
            tuple(map(tuple, self.actions(num_ranks, num_microbatches))),
            self.bound(num_ranks, num_microbatches),
        )

    def table(self, num_ranks: int, num_microbatches: int, backward: bool = True) -> Table:
        """The validated table.

        Args:
            num_ranks: p, the size of the pipeline's axis.
            num_microbatches: M, any number from 1 on.
            backward: False for the same order without gradients.

        Raises:
            InputError: a size that is no whole number from 1 on.
            ScheduleError: an order that can't be run.
        """
        for name, size in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
            if not isinstance(size, int) or size < 1:
                raise InputError(
                    f"{self.name}: {name} is no size",
                    got=repr(size),
                    expected="a whole number from 1 on",
                )
        return _validated(self, num_ranks, num_microbatches, backward)

    def visualize(
        self,
        num_ranks: int,
        num_microbatches: int,
        format: str = "text",
        *,
        forward_only: bool = False,
        **durations: Duration,
    ) -> str:
        """A picture of the timeline, with the bubble and the activations that each rank stores.

        Args:
            num_ranks: p.
            num_microbatches: M.
            format: "text", or "svg".
            forward_only: without gradients.
            **durations: `forward`, `backward`, `input`, `weight`, `send`, as `Table.timeline` takes them.

        Returns:
            text, or an SVG document.
        """
        table = self.table(num_ranks, num_microbatches, not forward_only)
        return table.visualize(format, title=self.name, **durations)


@functools.lru_cache(maxsize=256)
def _validated(schedule: Schedule, num_ranks: int, num_microbatches: int, backward: bool) -> Table:
    table = schedule.make(num_ranks, num_microbatches).validate()
    return table if backward else table.forward_only()


def keep(actions: Actions, num_microbatches: int) -> Actions:
    """The actions of the first microbatches.

    No microbatch needs another's results, so what remains of a valid order is valid.
    """
    return [[action for action in todo if action.microbatch < num_microbatches] for todo in actions]
