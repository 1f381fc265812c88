"""Writing a step: each rank its file, then rank 0 the manifest and the commit record, then one rename.

    every rank   what it would save is compared
    rank 0       a new folder beside the steps
    every rank   its parts, a checksum a block; the file is on the disk
    rank 0       manifest, commit record; both, and the folder, are on the disk
    rank 0       the folder gets the step's name; the folder above is on the disk

Before the rename there is no step, after it the whole step is there. A rank that fails tells the others, one that
dies is missed; the new folder is then removed, and earlier steps are as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ptrainx.checkpoint import files, steps
from ptrainx.checkpoint.boxes import Box
from ptrainx.checkpoint.dtypes import DTYPES
from ptrainx.checkpoint.manifest import (
    BLOCK,
    COMMIT,
    MANIFEST,
    Chunk,
    Manifest,
    RankFile,
    TensorEntry,
    chunk_name,
    encode_commit,
    encode_manifest,
    file_name,
)
from ptrainx.checkpoint.manifest_reader import parse_manifest
from ptrainx.checkpoint.meeting import Meeting, telling_failure
from ptrainx.checkpoint.plan import Task
from ptrainx.checkpoint.progress import Progress
from ptrainx.checkpoint.read import OpenStep
from ptrainx.checkpoint.safetensors_file import header
from ptrainx.checkpoint.values import Contents, alike
from ptrainx.core.errors import CheckpointDamageError, CheckpointError

__all__ = ["Job", "agree", "write_step"]


class Job(NamedTuple):
    """A step to write.

    Attributes:
        folder: of steps.
        step: its number.
        contents: what the tree holds.
        tasks: what each rank writes.
        read: (rank, task) -> the bytes of that part, contiguous; asked for the ranks of this process, in order.
        metric: goes into the manifest.
    """

    folder: Path
    step: int
    contents: Contents
    tasks: list[list[Task]]
    read: Callable[[int, Task], memoryview]
    metric: float | None = None

    @property
    def own_bytes(self) -> int:
        """Bytes that this process writes."""
        own = [task for rank in self.contents.writers.mine for task in self.tasks[rank]]
        return sum(task.box.size * DTYPES[self.contents.sources[task.tensor].dtype].itemsize for task in own)


def write_step(job: Job, meeting: Meeting) -> Path:
    """Writes and commits a step; returns its folder.

    Raises:
        CheckpointError: on every rank, whichever has failed; what it had written is removed.
    """
    with telling_failure(meeting), _as_checkpoint_errors(meeting):
        agree(f"step {job.step}", job.contents, meeting)
        if meeting.rank == 0:
            return _lead(job, meeting)
        (name,) = meeting.gather("folder", [0])
        _write_own(job, meeting, job.folder / name)
        try:
            meeting.gather("committed", [0])
        except CheckpointError:
            # Rank 0 may have ended, and the store with it, once it had committed.
            if not meeting.lost or job.step not in steps.committed_steps(job.folder):
                raise
        return steps.step_folder(job.folder, job.step)


@contextlib.contextmanager
def _as_checkpoint_errors(meeting: Meeting) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError):  # rank 0 removes what can't be finished
            meeting.check_others()
        raise CheckpointError(
            f"{meeting.what}: rank {meeting.rank} can't write",
            got=f"{type(error).__name__}: {error}",
            fix="look at the disk: space, quota, permissions; earlier steps are as they were",
        ) from error


def agree(what: str, held: Contents, meeting: Meeting) -> None:
    """Makes sure that all ranks save the same tree, and the same thing."""
    if meeting.size == 1:
        return
    leaves = alike(held)
    digest = hashlib.sha256("\n".join(leaves).encode("utf-8", "surrogatepass")).hexdigest()
    meeting.post("tree", [what, digest])
    same = [record == [what, digest] for record in meeting.gather("tree")]
    if all(same):
        return
    meeting.post("leaves", [what, *leaves])
    other = same.index(False) if meeting.rank == 0 else 0 if not same[0] else same.index(False)
    ours, theirs = meeting.gather("leaves", [meeting.rank, other])
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    mine, yours = ([*lines, "nothing more"][at] for lines in (ours, theirs))
    raise CheckpointError(
        f"{meeting.what}: the ranks would save different trees",
        got=f"rank {meeting.rank}: {mine}\n            rank {other}: {yours}",
        expected="the same leaves on every rank, and plain values alike",
        fix="place values that differ between ranks on the mesh, or leave them out",
    )


def _lead(job: Job, meeting: Meeting) -> Path:
    """Rank 0's way through a save."""
    aside = _is_taken(job)
    files.make_folder(job.folder, parents=True)
    steps.sweep(job.folder)
    path, lock = steps.new_folder(job.folder, job.step)
    try:
        # The others hear of a failure before the folder goes.
        with telling_failure(meeting), _as_checkpoint_errors(meeting):
            meeting.post("folder", path.name)
            _write_own(job, meeting, path)
            records = meeting.gather("parts")
            manifest = encode_manifest(_merge(job, [part for record in records for part in record]))
            parse_manifest(manifest, job.step)  # as strictly as who reads it will
            _check_lengths(path, records)
            files.write_file(path / MANIFEST, manifest)
            files.write_file(path / COMMIT, encode_commit(manifest, job.step))
            files.sync_folder(path)
            if aside:
                steps.set_aside(job.folder, job.step)
            final = steps.step_folder(job.folder, job.step)
            _commit(job, path, final)
    except BaseException:
        with contextlib.suppress(OSError):
            steps.discard(path)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    meeting.post("committed", True)
    return final


def _commit(job: Job, path: Path, final: Path) -> None:
    try:
        files.rename_folder(path, final)
    except FileExistsError as error:  # another writer was first
        raise _exists(job) from error
    files.sync_folder(job.folder)


def _exists(job: Job) -> CheckpointError:
    return CheckpointError(
        f"step {job.step} exists already in {job.folder}",
        expected="a step is never overwritten",
        fix="save under another step or into another folder, or remove the step first",
    )


def _is_taken(job: Job) -> bool:
    """Refuses a step that is there; True if one is there that is damaged, and has to make way."""
    path = steps.step_folder(job.folder, job.step)
    if not os.path.lexists(path):
        return False
    try:
        with OpenStep(path, job.step) as step:
            problem = next(step.problems(), None)
    except CheckpointDamageError as error:
        problem = error.problem
    if problem is None:
        raise _exists(job)
    warnings.warn(
        f"step {job.step} is there but damaged ({problem}): it is set aside, and saved again",
        RuntimeWarning,
        stacklevel=2,
    )
    return True


def _write_own(job: Job, meeting: Meeting, folder: Path) -> None:
    progress = Progress(meeting, job.own_bytes)
    parts = [_write_file(job, meeting, folder, rank, progress) for rank in job.contents.writers.mine if job.tasks[rank]]
    if parts:
        files.sync_folder(folder)
    meeting.post("parts", parts)


def _write_file(job: Job, meeting: Meeting, folder: Path, rank: int, progress: Progress) -> dict[str, Any]:
    """Writes a rank's file; returns what the manifest needs to know of it."""
    tasks, sources = job.tasks[rank], job.contents.sources
    named = [(chunk_name(task.tensor, task.box), sources[task.tensor].dtype, task.box) for task in tasks]
    head, begins = header(named)
    chunks = []
    size = len(head)
    with files.NewFile(folder / file_name(rank)) as file:
        file.write(head)
        for task, begin in zip(tasks, begins):
            data = job.read(rank, task)
            assert len(data) == task.box.size * DTYPES[sources[task.tensor].dtype].itemsize
            sums = []
            for start in range(0, len(data), BLOCK):
                block = data[start : start + BLOCK]
                sums.append(zlib.crc32(block))
                file.write(block)
                progress.add(len(block))
            chunks.append([task.tensor, task.box.offset, task.box.shape, begin, sums])
            size = begin + len(data)
        file.sync()
    return {"rank": rank, "bytes": size, "header": len(head), "sum": zlib.crc32(head), "chunks": chunks}


def _merge(job: Job, parts: list[dict[str, Any]]) -> Manifest:
    """The manifest of all ranks' parts."""
    chunks: list[list[Chunk]] = [[] for _ in job.contents.sources]
    for index, part in enumerate(parts):
        for tensor, offset, shape, begin, sums in part["chunks"]:
            chunks[tensor].append(Chunk(index, Box(tuple(offset), tuple(shape)), begin, tuple(sums)))
    meshes: list[dict[str, int]] = []
    tensors = []
    for source, held in zip(job.contents.sources, chunks):
        if source.mesh is not None and source.mesh not in meshes:
            meshes.append(source.mesh)
        mesh = None if source.mesh is None else meshes.index(source.mesh)
        held.sort(key=lambda chunk: (chunk.box, chunk.file))
        tensors.append(TensorEntry(source.dtype, source.shape, tuple(held), mesh, source.spec))
    return Manifest(
        step=job.step,
        world=job.contents.writers.size,
        files=tuple(RankFile(part["rank"], part["bytes"], part["header"], part["sum"]) for part in parts),
        tensors=tuple(tensors),
        leaves=tuple(job.contents.leaves),
        meshes=tuple(meshes),
        metric=job.metric,
    )


def _check_lengths(path: Path, records: list[list[dict[str, Any]]]) -> None:
    """Makes sure that rank 0 sees the files that the others say they have written."""
    with files.ReadFolder(path) as folder:
        for part in (part for record in records for part in record):
            name = file_name(part["rank"])
            if folder.size(name) != part["bytes"]:
                raise CheckpointError(
                    f"the file of rank {part['rank']} has another length for rank 0",
                    got=f"{path / name}: {folder.size(name):,} bytes",
                    expected=f"{part['bytes']:,} bytes",
                    fix="save into a folder that all processes share",
                )
