"""`Progress`: how a run is getting on: a live bar on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from ptrainx.mesh.world import current_world

__all__ = ["COLUMNS", "Progress"]

COLUMNS: Mapping[str, str] = {
    "loss": "loss {:.4f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "rss_mib": "{:,.0f} MiB",
}
"""What is shown of a record, and how."""

# A rate that jumps with every step can't be read: each value shown moves this far towards the new one.
_SMOOTHED = {"tokens_per_s": 0.1}


class Progress:
    """Shows steps done and a record's values, on rank 0; on other ranks it does nothing.

    Args:
        total: steps of the run.
        columns: name of a value in the records -> how it is written, a format string; by default `COLUMNS`. A value
            that a record lacks keeps its last one.
        description: what stands before the bar.
        every: seconds between two lines where the output is no terminal.
        console: a rich Console; by default standard output.

    >>> with Progress(2, every=0, console=Console(file=sys.stdout, width=80)) as progress:
    ...     progress.update(1, {"loss": 0.5})
    ...     progress.update(2, {"loss": 0.25, "tokens_per_s": 1234.0})
    train  step 1/2  loss 0.5000
    train  step 2/2  loss 0.2500  1,234 tokens/s
    """

    def __init__(
        self,
        total: int,
        *,
        columns: Mapping[str, str] = COLUMNS,
        description: str = "train",
        every: float = 5.0,
        console: Console | None = None,
    ):
        self.total, self.columns, self.description, self.every = total, columns, description, every
        self._active = current_world().rank == 0
        self._console = console or Console(file=sys.stdout)
        self._values: dict[str, float] = {}
        self._last_line = -float("inf")
        self._bar: RichProgress | None = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._active and self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),  # gives way to the values
                TextColumn("[green]{task.completed}/{task.total}"),
                _Values(self._texts),
                TimeRemainingColumn(compact=True),
                console=self._console,
                expand=True,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(self.description, total=self.total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, step: int, record: Mapping[str, Any]) -> None:
        """Tells that `step` steps are done, and the values of the last one."""
        if not self._active:
            return
        for name in self.columns:
            if record.get(name) is not None:
                new = float(record[name])
                old = self._values.get(name, new)
                self._values[name] = old + _SMOOTHED.get(name, 1.0) * (new - old)
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        else:
            self._line(step)

    def print(self, text: str) -> None:
        """Prints a line of text, above the bar where there is one."""
        if self._active:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _texts(self) -> list[str]:
        return [self.columns[name].format(value) for name, value in self._values.items()]

    def _line(self, step: int) -> None:
        """A line, if the last one was long enough ago; the first and the last step always get theirs."""
        now = time.monotonic()
        if step >= self.total or now - self._last_line >= self.every:
            self._last_line = now
            width = len(str(self.total))
            words = [self.description, f"step {step:>{width}}/{self.total}", *self._texts()]
            self.print("  ".join(words))


class _Values(ProgressColumn):
    """The values of the last record, as rich wants a column."""

    def __init__(self, texts: Any):
        super().__init__()
        self._texts = texts

    def render(self, task: Task) -> Text:
        """The text of this column."""
        return Text("  ".join(self._texts()), style="cyan", no_wrap=True)
