"""Writing distributed checkpoints that PyTorch reads (DCP): `torch.distributed.checkpoint.load`, torchtitan.

In: a tree. Out: a folder. Each rank writes the parts that are its own, as in a save of ours; then rank 0 the metadata,
without which the folder is no checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ptrainx.checkpoint import scalars
from ptrainx.checkpoint.boxes import whole
from ptrainx.checkpoint.dtypes import DTYPES
from ptrainx.checkpoint.files import NewFile, make_folder, remove_file, rename_folder, sync_folder, write_file
from ptrainx.checkpoint.foreign.dcp_metadata import METADATA
from ptrainx.checkpoint.foreign.hugging_face import dotted
from ptrainx.checkpoint.meeting import Meeting, telling_failure
from ptrainx.checkpoint.plan import Task, plan
from ptrainx.checkpoint.values import Contents, contents
from ptrainx.checkpoint.write import agree
from ptrainx.core.errors import CheckpointError, InputError
from ptrainx.core.torch_compat_dcp import ChunkPlace, encode_dcp_metadata

__all__ = ["export_dcp", "write_dcp"]


def export_dcp(folder: str | Path, tree: Any, *, timeout: float | None = None) -> Path:
    """Writes a tree as a distributed checkpoint of PyTorch, which `torch.distributed.checkpoint.load` reads.

    Every rank of the world calls it; each writes its own parts. Names are paths with dots. Numpy arrays are written as
    tensors, tied leaves once, under both names.

    Args:
        folder: made if it is missing; holds no such checkpoint yet.
        tree: any pytree of placed values, tensors, numpy arrays and Python values, as for `save`.
        timeout: seconds without a sign of life after which another rank is taken for dead.

    Returns:
        the folder.

    Raises:
        InputError, TreeError: leaves that can't be saved; names that are not distinct; all are told.
        CheckpointError: on every rank, if one can't write, dies, or would write another tree.

    >>> import tempfile
    >>> folder = export_dcp(tempfile.mkdtemp(), {"model": {"w": torch.ones(2)}, "step": 3})
    >>> sorted(file.name for file in folder.iterdir())
    ['.metadata', '__0_0.distcp']
    """
    folder = Path(folder).absolute()
    meeting = Meeting(f"exporting to {folder}", timeout)
    with telling_failure(meeting):
        held = contents(tree)
    return write_dcp(folder, held, meeting)


def write_dcp(folder: Path, held: Contents, meeting: Meeting) -> Path:
    """What `export_dcp` does, of tensors that need not be in memory."""
    made: list[Path] = []
    try:
        with telling_failure(meeting), _as_checkpoint_errors(meeting):
            names = _names(held)
            agree("an export", held, meeting)
            if meeting.rank == 0:
                _prepare(folder)
                meeting.post("prepared", True)
            meeting.gather("prepared", [0])
            tasks = plan(held.sources, held.writers.size)
            places = [place for rank in held.writers.mine for place in _write(folder, rank, held, tasks[rank], made)]
            meeting.post("places", places)
            found = meeting.gather("places")
            if meeting.rank == 0:
                _commit(folder, _metadata(names, held, [place for own in found for place in own]), made)
                meeting.post("committed", True)
            meeting.gather("committed", [0])
    except BaseException:
        if not (folder / METADATA).exists():  # rank 0 may have committed, and ended before it could say so
            for path in made:
                with contextlib.suppress(OSError):
                    remove_file(path)
        raise
    return folder


@contextlib.contextmanager
def _as_checkpoint_errors(meeting: Meeting) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{meeting.what}: rank {meeting.rank} can't write",
            got=f"{type(error).__name__}: {error}",
            fix="look at the disk: space, quota, permissions; export into an empty folder",
        ) from error


def _names(held: Contents) -> list[str]:
    names = [dotted([key for _, key in leaf.path]) for leaf in held.leaves]
    double = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if double:
        raise InputError("export_dcp: names for several leaves:\n    " + "\n    ".join(double), fix="rename keys")
    return names


def _prepare(folder: Path) -> None:
    make_folder(folder, parents=True)
    if (folder / METADATA).exists():
        raise FileExistsError(f"{folder} holds a distributed checkpoint already")


class _Stream:
    """A file being written, as `torch.save` wants one."""

    def __init__(self, file: NewFile):
        self._file, self.size = file, 0

    def write(self, data: Any) -> int:
        self._file.write(memoryview(data).cast("B"))
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held here."""


def _write(folder: Path, rank: int, held: Contents, tasks: list[Task], made: list[Path]) -> list[list[Any]]:
    """A rank's file; returns what lies where in it: [tensor or ~leaf, offset, shape, file, begin, size]."""
    objects = [i for i, leaf in enumerate(held.leaves) if leaf.tensor is None and rank == 0]
    empty = [i for i, source in enumerate(held.sources) if 0 in source.shape and rank == 0]
    if not tasks and not objects and not empty:
        return []
    path = folder / f"__{rank}_0.distcp"
    found: list[list[Any]] = []
    with NewFile(path) as file:
        made.append(path)
        stream = _Stream(file)

        def put(what: int, offset: tuple[int, ...], value: Any) -> None:
            begin = stream.size
            torch.save(value, stream)  # type: ignore[arg-type]
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            found.append([what, offset, shape, path.name, begin, stream.size - begin])

        for i in objects:
            put(~i, (), scalars.from_text(held.leaves[i].kind, held.leaves[i].value))
        for i in empty:
            source = held.sources[i]
            put(i, whole(source.shape).offset, torch.empty(source.shape, dtype=DTYPES[source.dtype].dtype))
        for task in tasks:
            part = held.sources[task.tensor].part(rank, task.box).detach().cpu()
            put(task.tensor, task.box.offset, part.clone(memory_format=torch.contiguous_format))
        file.sync()
    return found


def _metadata(names: list[str], held: Contents, places: list[list[Any]]) -> bytes:
    parts: dict[int, list[ChunkPlace]] = {}
    for what, offset, shape, *where in sorted(places):
        parts.setdefault(what, []).append(ChunkPlace(tuple(offset), tuple(shape), *where))
    entries: dict[str, Any] = {}
    for i, (name, leaf) in enumerate(zip(names, held.leaves)):
        if leaf.tensor is None:
            entries[name] = (None, (), parts[~i])
        else:
            source = held.sources[leaf.tensor]
            entries[name] = (DTYPES[source.dtype].dtype, source.shape, parts[leaf.tensor])
    keys = {name: tuple(key for _, key in leaf.path) for name, leaf in zip(names, held.leaves)}
    return encode_dcp_metadata(entries, keys)


def _commit(folder: Path, data: bytes, made: list[Path]) -> None:
    """The metadata, whole or not at all."""
    sync_folder(folder)
    made.append(folder / f"{METADATA}.tmp")
    write_file(made[-1], data)
    rename_folder(made[-1], folder / METADATA)
    sync_folder(folder)
