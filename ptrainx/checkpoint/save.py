"""`save`: a tree into a folder of steps, now."""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Any

from ptrainx.checkpoint.dtypes import bytes_of
from ptrainx.checkpoint.meeting import Meeting, telling_failure
from ptrainx.checkpoint.plan import Task, plan
from ptrainx.checkpoint.values import contents
from ptrainx.checkpoint.write import Job, write_step
from ptrainx.core.errors import InputError

__all__ = ["check_metric", "check_step", "save"]


def save(path: str | Path, tree: Any, step: int, *, metric: float | None = None, timeout: float | None = None) -> Path:
    """Writes a tree as a step of a folder, so that it is there whole or not at all, and returns when it is on the disk.

    Every rank of the world calls it; each writes what it owns, copies are shared among the ranks that hold them.

    Args:
        path: the folder of steps, seen by all processes; made if it is missing.
        tree: any pytree of placed values, tensors, numpy arrays and Python values. Plain values are the same on every
            rank. Tied leaves (one tensor in two places) are written once.
        step: 0 or more; never overwritten.
        metric: kept with the step, for `Manager(best=...)`.
        timeout: seconds without a sign of life after which another rank is taken for dead; by default
            `PTRAINX_CHECKPOINT_TIMEOUT`.

    Returns:
        the step's folder.

    Raises:
        CheckpointError: on every rank, if one can't write, dies, or would save another tree; or the step exists.
        InputError, TreeError: leaves or keys that can't be saved, owed sums among them; all are told.
        MeshError, DonationError: values that are no longer there.

    >>> import tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> save(folder.name, {"w": torch.ones(2)}, 10).name
    'step-000000000010'
    """
    step, metric = check_step(step), check_metric(metric)
    meeting = Meeting(f"saving step {step}", timeout)
    with telling_failure(meeting):
        held = contents(tree)
        tasks = plan(held.sources, held.writers.size)

    def read(rank: int, task: Task) -> memoryview:
        return bytes_of(held.sources[task.tensor].part(rank, task.box).cpu().contiguous())

    return write_step(Job(Path(path).absolute(), step, held, tasks, read, metric), meeting)


def check_step(step: Any) -> int:
    """A step as an int.

    Raises:
        InputError: it is none, or negative.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number < 1 << 62:
        raise InputError("a step is an integer, 0 or more", got=repr(step)[:80], fix="pass int(state.step)")
    return number


def check_metric(metric: Any) -> float | None:
    """A metric as a float.

    Raises:
        InputError: it is no finite number.
    """
    if metric is None:
        return None
    try:
        number = float(metric)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError("a metric is a finite number", got=repr(metric)[:80], expected="a float or an int")
    return number
