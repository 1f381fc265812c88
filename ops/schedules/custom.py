"""A user's own schedule: a table, or a function that makes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ptrainx.core.errors import InputError, ScheduleError
from ptrainx.ops.schedules.schedule import Actions, Schedule
from ptrainx.ops.schedules.table import Table, as_actions, loop_placement, v_placement

__all__ = ["Custom", "Placement"]

Placement = str | Sequence[int] | Callable[[int], Sequence[int]]
"""`"loop"`, `"v"`, the rank of each stage, or a function from the number of ranks to these."""

Bound = Sequence[int] | Callable[[int, int], Sequence[int]] | None


class Custom(Schedule):
    """A schedule of one's own. It is validated before anything runs.

    Args:
        table: a `Table`; or a list of actions for each rank, `(kind, stage, microbatch)`; or a function
            `(num_ranks, num_microbatches)` that returns either. A table is for its own numbers of ranks and
            microbatches alone.
        chunks: stages on each rank; a `Table` says so itself.
        placement: where the stages lie: `"loop"`, stage s on rank s mod p; `"v"`, there and back; the rank of each
            stage; or a function from the number of ranks to those. A `Table` says so itself.
        bound: the most activations that each rank may hold at once, checked; a sequence, or a function `(num_ranks,
            num_microbatches)`.
        name: what pictures and messages call it.

    Raises:
        InputError: a placement or number of chunks that is none.
        ScheduleError: a table that can't be run: here for a table, from `table(...)` for a function.

    >>> from ptrainx.ops.schedules import Custom
    >>> each_alone = lambda p, m: [[(kind, r, i) for i in range(m) for kind in "FB"] for r in range(p)]
    >>> Custom(each_alone).table(2, 3).timeline().makespan
    18.0
    """

    def __init__(
        self,
        table: Any,
        chunks: int = 1,
        *,
        placement: Placement = "loop",
        bound: Bound = None,
        name: str = "custom",
    ):
        if isinstance(placement, str) and placement not in ("loop", "v"):
            raise InputError(
                "schedules.Custom: an unknown placement",
                got=repr(placement),
                expected='"loop", "v", the rank of each stage, or a function that returns these',
            )
        if not isinstance(chunks, int) or chunks < 1:
            raise InputError("schedules.Custom: chunks", got=repr(chunks), expected="a whole number from 1 on")
        self.name = name
        self.chunks = table.chunks if isinstance(table, Table) else chunks
        self._placement = placement
        self._bound = bound
        self._made = table
        self._fixed = None if callable(table) else self._checked(table, None).validate()

    def make(self, num_ranks: int, num_microbatches: int) -> Table:
        """The table, not validated.

        Raises:
            ScheduleError: a table for other numbers of ranks or microbatches; a function that returns none.
        """
        table = self._fixed or self._checked(self._made(num_ranks, num_microbatches), (num_ranks, num_microbatches))
        if (table.num_ranks, table.num_microbatches) != (num_ranks, num_microbatches):
            raise ScheduleError(
                f"schedule {self.name}: its table is for other numbers of ranks or microbatches",
                got=f"a table for {table.num_ranks} ranks and {table.num_microbatches} microbatches",
                expected=f"{num_ranks} ranks, {num_microbatches} microbatches",
                fix="give a function (num_ranks, num_microbatches) that makes the table, or use the table's numbers",
            )
        if table.chunks != self.chunks:
            raise ScheduleError(
                f"schedule {self.name}: its table has another number of stages on each rank",
                got=f"{table.chunks} on each rank",
                expected=f"chunks={self.chunks}",
                fix=f"write Custom(..., chunks={table.chunks})",
            )
        return table

    def actions(self, num_ranks: int, num_microbatches: int) -> Actions:
        return self.make(num_ranks, num_microbatches).actions

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        if callable(self._placement):
            return tuple(self._placement(num_ranks))
        if isinstance(self._placement, str):
            place = loop_placement if self._placement == "loop" else v_placement
            return place(num_ranks, self.chunks)
        return tuple(self._placement)

    def bound(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...] | None:
        bound = self._bound(num_ranks, num_microbatches) if callable(self._bound) else self._bound
        return None if bound is None else tuple(bound)

    def _checked(self, made: Any, sizes: tuple[int, int] | None) -> Table:
        """A table of what the user gave, which for lists alone tells the sizes."""
        if isinstance(made, Table):
            return made
        if not isinstance(made, Sequence) or isinstance(made, str):
            raise ScheduleError(
                f"schedule {self.name}: no table",
                got=repr(made),
                expected="a px.schedules.Table, or for each rank a list of actions (kind, stage, microbatch)",
            )
        actions = as_actions(made)
        last = max((action.microbatch for todo in actions for action in todo), default=0)
        p, m = sizes or (len(actions), last + 1)
        return Table(p, p * self.chunks, m, self.placement(p), actions, self.bound(p, m))
