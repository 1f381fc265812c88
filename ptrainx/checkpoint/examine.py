"""Looking at checkpoints without restoring them: which steps there are, whether they are intact, how two differ.

For the command line (`ptrainx checkpoint`) and for scripts. One process, no mesh.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from ptrainx.checkpoint import paths, scalars, steps
from ptrainx.checkpoint.boxes import Box, cut, whole
from ptrainx.checkpoint.dtypes import DTYPES, bytes_of
from ptrainx.checkpoint.manifest import COMMIT, Leaf, Manifest, TensorEntry, step_of
from ptrainx.checkpoint.match import saved_text
from ptrainx.checkpoint.read import OpenStep
from ptrainx.core.errors import CheckpointError

__all__ = ["Difference", "StepSummary", "differences", "find_step", "summaries", "verify_step"]

PART = 64 << 20
"""Bytes of a tensor that are compared at once."""


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """A step in short.

    Attributes:
        step: its number.
        saved: when it was committed, seconds since 1970.
        manifest: None if it is damaged.
        problem: what is damaged, as far as manifest and lengths of files tell; "" if nothing.
    """

    step: int
    saved: float | None
    manifest: Manifest | None
    problem: str = ""


def summaries(folder: str | Path) -> list[StepSummary]:
    """All steps of a folder, in order."""
    return [_summary(Path(folder).absolute(), step) for step in steps.found_steps(Path(folder))]


def _summary(folder: Path, step: int) -> StepSummary:
    path = steps.step_folder(folder, step)
    try:
        saved = (path / COMMIT).lstat().st_mtime
    except OSError:
        saved = None
    try:
        with OpenStep(path, step) as opened:
            return StepSummary(step, saved, opened.manifest)
    except CheckpointError as error:
        return StepSummary(step, saved, None, error.problem)


def find_step(path: str | Path, step: int | None = None) -> tuple[Path, int]:
    """(folder, number) of a step: the folder of one, or of a folder of steps the one asked for, or the newest.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(path).absolute()
    found = steps.found_steps(folder)
    own = step_of(folder.name)
    if own is not None and not found and step in (None, own) and folder.is_dir():
        return folder, own
    if not found or (step is not None and step not in found):
        raise CheckpointError(
            f"there is no {'checkpoint' if step is None else f'step {step}'} in {folder}",
            expected=f"one of {', '.join(map(str, found[-8:]))}" if found else None,
            fix="check the path",
        )
    chosen = found[-1] if step is None else step
    return steps.step_folder(folder, chosen), chosen


def verify_step(path: Path, step: int) -> list[str]:
    """Reads all of a step, and tells everything that is not as it was written."""
    try:
        with OpenStep(path, step) as opened:
            return list(opened.problems())
    except CheckpointError as error:
        return [error.problem]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A leaf in which two checkpoints differ: where, and how."""

    path: str
    how: str


def differences(a: OpenStep, b: OpenStep) -> Iterator[Difference]:
    """The leaves in which two checkpoints differ, in types or in bits; how they lie in files does not matter.

    Raises:
        CheckpointDamageError: a block is not as it was written.
    """
    ours = {paths.identity(leaf.path): leaf for leaf in a.manifest.leaves}
    theirs = {paths.identity(leaf.path): leaf for leaf in b.manifest.leaves}
    for key, leaf in ours.items():
        other = theirs.get(key)
        how = "only in the first" if other is None else _difference(leaf, a, other, b)
        if how:
            yield Difference(paths.name(leaf.path), how)
    for key, leaf in theirs.items():
        if key not in ours:
            yield Difference(paths.name(leaf.path), "only in the second")


def _difference(leaf: Leaf, a: OpenStep, other: Leaf, b: OpenStep) -> str:
    kinds = [
        (leaf.kind, leaf.numpy, saved_text(leaf, a.manifest)),
        (other.kind, other.numpy, saved_text(other, b.manifest)),
    ]
    if kinds[0] != kinds[1]:
        return f"{kinds[0][2]} and {kinds[1][2]}"
    if leaf.tensor is None or other.tensor is None:
        values = [f"{scalars.from_text(leaf.kind, text)!r}"[:40] for text in (leaf.value, other.value)]
        return f"{leaf.kind} {' and '.join(values)}" if leaf.value != other.value else ""
    mine, yours = a.manifest.tensors[leaf.tensor], b.manifest.tensors[other.tensor]
    if _sums(mine, a.manifest) == _sums(yours, b.manifest):
        return ""
    return _values_differ(mine, leaf.tensor, a, other.tensor, b)


def _sums(tensor: TensorEntry, manifest: Manifest) -> tuple:
    """Equal where the same parts have the same checksums, which a difference hits once in 4 billion blocks."""
    return manifest.block, *((chunk.box, chunk.sums) for chunk in tensor.chunks)


def _values_differ(entry: TensorEntry, mine: int, a: OpenStep, yours: int, b: OpenStep) -> str:
    dtype = DTYPES[entry.dtype].dtype
    count, largest = 0, 0.0
    for box in _parts(entry):
        left, right = torch.empty(box.shape, dtype=dtype), torch.empty(box.shape, dtype=dtype)
        a.read(mine, box, left)
        b.read(yours, box, right)
        if bytes_of(left) == bytes_of(right):
            continue
        raw = [value.reshape(-1).view(torch.uint8).view(-1, dtype.itemsize) for value in (left, right)]
        unlike = (raw[0] != raw[1]).any(1)
        count += int(unlike.sum())
        wide = torch.complex128 if dtype.is_complex else torch.float64
        gaps = (left.reshape(-1)[unlike].to(wide) - right.reshape(-1)[unlike].to(wide)).abs()
        largest = max(largest, float(gaps.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    if not count:
        return ""
    return f"{count:,} of {whole(entry.shape).size:,} elements differ, by {largest:.3g} at most"


def _parts(entry: TensorEntry) -> list[Box]:
    box = whole(entry.shape)
    return cut(box, -(-entry.nbytes // PART)) if box.size else []
