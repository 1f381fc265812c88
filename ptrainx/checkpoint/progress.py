"""How far a long save is: a sign of life for the other ranks, a line now and then on rank 0's standard error."""

from __future__ import annotations

import sys
import time

from ptrainx.checkpoint.meeting import Meeting

__all__ = ["Progress"]

EVERY = 10.0
"""Seconds between two lines; a save that is shorter says nothing."""


class Progress:
    """Counts the bytes that a process has written of a step.

    Args:
        meeting: told that this rank works on.
        total: bytes to write.
    """

    def __init__(self, meeting: Meeting, total: int):
        self._meeting, self._total = meeting, total
        self._done = 0
        self._began = self._told = time.monotonic()

    def add(self, size: int) -> None:
        """So many more bytes are written."""
        self._done += size
        self._meeting.beat()
        now = time.monotonic()
        if self._meeting.rank == 0 and now - self._told > EVERY:
            self._told = now
            rate = self._done / (now - self._began)
            print(
                f"ptrainx: {self._meeting.what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB on rank 0, "
                f"{rate / 1e6:.0f} MB/s",
                file=sys.stderr,
                flush=True,
            )
