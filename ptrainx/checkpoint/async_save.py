"""`save_async`: the caller waits for a copy in memory; a thread writes it while training goes on.

One save is in flight in a process. The thread is no daemon: a program that ends waits for it, as does one that ends
because of a signal whose handler raises. A signal that kills the process leaves the step unborn, as any kill does.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ptrainx.checkpoint.meeting import Meeting, telling_failure
from ptrainx.checkpoint.plan import plan
from ptrainx.checkpoint.recipe import Recipe
from ptrainx.checkpoint.save import check_metric, check_step
from ptrainx.checkpoint.snapshot import Snapshot, SnapshotBuffer
from ptrainx.checkpoint.values import contents
from ptrainx.checkpoint.write import Job, write_step
from ptrainx.core.errors import CheckpointError, InputError

__all__ = ["SaveHandle", "finish_saves", "save_async"]

WhenBusy = Literal["wait", "refuse"]

NICE = 5
"""How much the writer's thread stands back behind others for the processor."""


class SaveHandle:
    """A save under way.

    Attributes:
        step: its number.
    """

    def __init__(self, step: int):
        self.step = step
        self._finished = threading.Event()
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._told = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> Path:
        """Waits for the end, and returns the step's folder.

        Raises:
            CheckpointError: the save failed.
            TimeoutError: it has not ended after `timeout` seconds.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"step {self.step} is still being saved after {timeout:g} s")
        self._told = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
            self._path = write()
        except BaseException as error:
            self._error = error
        finally:
            self._finished.set()

    def _raise_untold(self) -> None:
        self._finished.wait()
        if self._error is not None and not self._told:
            self._told = True
            raise CheckpointError(
                f"the save of step {self.step}, which went on beside the program, has failed",
                got=str(self._error),
                fix="mend what it tells; earlier steps are as they were",
            ) from self._error


class _Saver:
    """The save in flight, and the memory of its snapshot."""

    def __init__(self) -> None:
        self.buffer = SnapshotBuffer()
        self.recipe: Recipe | None = None
        self.latest: SaveHandle | None = None
        self.watches_exit = False

    def take(self, tree: Any) -> Snapshot:
        """A snapshot of a tree; quickly, if the tree has the form of the last one."""
        again = None if self.recipe is None else self.recipe.take(tree, self.buffer)
        if again is not None:
            return again
        self.recipe = None
        held = contents(tree)
        tasks = plan(held.sources, held.writers.size)
        snapshot = self.buffer.take(held, tasks)
        self.recipe = Recipe.of(tree, held, tasks, self.buffer, snapshot)
        return snapshot

    def start(self, handle: SaveHandle, write: Callable[[], Path]) -> None:
        if not self.watches_exit:
            atexit.register(self._at_exit)
            self.watches_exit = True
        self.latest = handle
        threading.Thread(target=handle._run, args=(write,), name=f"ptrainx-save-{handle.step}").start()

    def _at_exit(self) -> None:
        """Ends the process with a status that tells of a failure that nobody has asked about."""
        handle = self.latest
        if handle is None or handle._told or handle._error is None:
            return
        print(f"ptrainx: the save of step {handle.step} has failed:", file=sys.stderr)
        traceback.print_exception(handle._error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # nothing else changes the status of a process that is ending


_saver = _Saver()


def finish_saves() -> None:
    """Waits for the save in flight.

    Raises:
        CheckpointError: it, or the one before, has failed, and nobody was told.
    """
    if _saver.latest is not None:
        _saver.latest._raise_untold()


def save_async(
    path: str | Path,
    tree: Any,
    step: int,
    *,
    metric: float | None = None,
    when_busy: WhenBusy = "wait",
    timeout: float | None = None,
    then: Callable[[Path], None] | None = None,
) -> SaveHandle:
    """Saves a tree beside the program: the caller waits until a copy of it is in memory, a thread writes the copy.

    After the call the values may be changed or donated. Every rank of the world calls it. The copy's memory, once what
    this rank writes, is kept for the next save.

    Args:
        path, tree, step, metric, timeout: as for `save`.
        when_busy: what to do while an earlier save is under way: "wait" for its end, or "refuse", on all ranks alike.
        then: called in the thread, with the step's folder, once it is committed.

    Returns:
        a handle: `.done()`, `.result()`.

    Raises:
        CheckpointError: an earlier save has failed, and `result()` was not asked; or one is under way ("refuse"). A
            failure that no call tells of ends the process with status 1.
        InputError, TreeError, MeshError, DonationError: as for `save`, at once.

    >>> import tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> handle = save_async(folder.name, {"w": torch.ones(2)}, 10)
    >>> handle.result().name
    'step-000000000010'
    """
    step, metric = check_step(step), check_metric(metric)
    if when_busy not in ("wait", "refuse"):
        raise InputError(
            "save_async: when_busy is neither 'wait' nor 'refuse'", got=repr(when_busy), expected="'wait' or 'refuse'"
        )
    if when_busy == "refuse":
        _refuse_if_busy(step, timeout)
    finish_saves()
    meeting = Meeting(f"saving step {step}", timeout)
    with telling_failure(meeting):
        snapshot = _saver.take(tree)
    job = Job(Path(path).absolute(), step, snapshot.contents, snapshot.tasks, snapshot.read, metric)

    def write() -> Path:
        written = write_step(job, meeting)
        if then is not None:
            then(written)
        return written

    handle = SaveHandle(step)
    _saver.start(handle, write)
    return handle


def _refuse_if_busy(step: int, timeout: float | None) -> None:
    """Refuses on every rank if the earlier save is under way on any."""
    busy = _saver.latest is not None and not _saver.latest.done()
    meeting = Meeting(f"starting to save step {step}", timeout)
    meeting.post("busy", busy)
    if any(meeting.gather("busy")):
        raise CheckpointError(
            f"step {step} is not saved: an earlier save is still under way",
            fix="save less often, or pass when_busy='wait'",
        )
