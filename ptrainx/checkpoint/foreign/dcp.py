"""Reading distributed checkpoints of PyTorch (DCP), as `torch.distributed.checkpoint.save` and torchtitan write them.

In: such a folder, and the tree that is wanted. Out: the tree, on any mesh; each rank reads the elements that it needs.
A leaf's name is its path with dots, as DCP has it.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from ptrainx.checkpoint.boxes import Box, inside, meet
from ptrainx.checkpoint.dtypes import DTYPES, bytes_of, dtype_name
from ptrainx.checkpoint.files import ReadFolder
from ptrainx.checkpoint.foreign.dcp_metadata import AGAIN, METADATA, DcpObject, DcpPart, DcpTensor, read_metadata
from ptrainx.checkpoint.foreign.hugging_face import dotted, near_names
from ptrainx.checkpoint.foreign.saved_tensor import SavedTensor, saved_tensor
from ptrainx.checkpoint.foreign.strided import read_box
from ptrainx.checkpoint.scalars import PYTHON
from ptrainx.checkpoint.targets import Target, fill, targets
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor, describe
from ptrainx.core.errors import CheckpointDamageError, CheckpointError, CheckpointMismatchError
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.spec_tree import SpecTree

__all__ = ["DcpFiles", "dcp_shapes", "import_dcp"]

LONGEST = 1 << 30
"""Bytes of a metadata file."""
OBJECT = 64 << 20
"""Bytes of an object that is no tensor."""


class DcpFiles:
    """A distributed checkpoint, its metadata read and checked.

    Raises:
        CheckpointError: there is none.
        CheckpointDamageError: its metadata is not what DCP writes.
    """

    def __init__(self, path: Path):
        self.path = path
        if not (path / METADATA).exists():
            raise CheckpointError(
                f"there is no distributed checkpoint of PyTorch in {path}",
                expected=f"a folder with the file {METADATA}, which is written last",
                fix="check the path",
            )
        self._folder = ReadFolder(path, links=True)
        self._known: dict[DcpPart, SavedTensor] = {}
        try:
            self.entries = read_metadata(self._folder.read(METADATA, LONGEST), path)
        except BaseException:
            self._folder.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._folder.__exit__(kind, error, tb)

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Fills `target` (CPU, of the tensor's dtype and the box's shape) with a box of a tensor.

        A part that is read whole is held against its checksum, which the archive has for the whole of it alone.
        """
        entry = self.entries[name]
        assert isinstance(entry, DcpTensor)
        for part in entry.parts:
            shared = meet(part.box, box)
            if shared is not None:
                saved = self._saved(name, part, target.dtype)
                own = Box(tuple(o - p for o, p in zip(shared.offset, part.box.offset)), shared.shape)
                place = target[inside(shared, box.offset)]
                read_box(self._reader(part), saved.begin, saved.strides, own, place)
                whole = shared == part.box and place.is_contiguous()
                if whole and saved.sum is not None and zlib.crc32(bytes_of(place)) != saved.sum:
                    where = f"{self.path / part.file}: {part.box} of {name} is not as it was written"
                    raise CheckpointDamageError(where, got="another checksum", fix=AGAIN)

    def _reader(self, part: DcpPart) -> Any:
        return lambda offset, place: self._folder.read_into(part.file, offset, place)

    def _saved(self, name: str, part: DcpPart, dtype: torch.dtype) -> SavedTensor:
        if part not in self._known:
            where = f"{self.path / part.file}: bytes {part.begin:,} to {part.begin + part.size:,} are not {name}"
            try:
                saved = saved_tensor(self._reader(part), part.begin, part.size)
            except ValueError as error:
                raise CheckpointDamageError(where, got=str(error), fix=AGAIN) from error
            if (saved.shape, saved.dtype) != (part.box.shape, dtype):
                got, expected = (describe(ShapeDtypeStruct(*pair)) for pair in (saved[2:], (part.box.shape, dtype)))
                raise CheckpointDamageError(where, got=got, expected=expected, fix=AGAIN)
            self._known[part] = saved
        return self._known[part]

    def load(self, name: str) -> Any:
        """An object that is no tensor: numbers, strings, and containers of them, nothing that runs code."""
        entry = self.entries[name]
        assert isinstance(entry, DcpObject)
        part = entry.part
        data = bytearray(min(part.size, OBJECT))
        self._folder.read_into(part.file, part.begin, memoryview(data))
        try:
            return torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:  # whatever bytes may lead a pickle to
            problem = f"{self.path / part.file}: {name} is no plain value"
            got = (str(error) or repr(error)).splitlines()[0]
            raise CheckpointDamageError(problem, got=got, fix=AGAIN) from error


def dcp_shapes(folder: str | Path) -> dict[str, ShapeDtypeStruct]:
    """The tensors of a distributed checkpoint of PyTorch, by names: for `match_rules`, and as `like` of `import_dcp`.

    Args:
        folder: as `torch.distributed.checkpoint.save` leaves it.

    Returns:
        name -> `px.ShapeDtypeStruct`; objects that are no tensors are left out.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointDamageError: its metadata is not what DCP writes.

    >>> import tempfile
    >>> from ptrainx.checkpoint import export_dcp
    >>> dcp_shapes(export_dcp(tempfile.mkdtemp(), {"layers": [{"w": torch.ones(2, 3)}], "step": 3}))
    {'layers.0.w': f32[2,3]}
    """
    with DcpFiles(Path(folder).absolute()) as files:
        return {
            name: ShapeDtypeStruct(entry.shape, DTYPES[entry.dtype].dtype)
            for name, entry in files.entries.items()
            if isinstance(entry, DcpTensor) and entry.dtype
        }


def import_dcp(folder: str | Path, like: Any, *, specs: SpecTree = None, mesh: Mesh | None = None) -> Any:
    """Reads a tree from a distributed checkpoint of PyTorch; each rank the elements that it needs.

    Of the pickles in it, nothing is called but what makes DCP's metadata, tensors and plain values.

    Args:
        folder: as `torch.distributed.checkpoint.save` leaves it.
        like: the tree that is wanted, as values or shapes; paths with dots are the names in the checkpoint. What it
            does not name is left out.
        specs, mesh: as for `restore`.

    Returns:
        the tree.

    Raises:
        CheckpointMismatchError: leaves that are missing, or of another kind, shape or dtype; all are told.
        CheckpointDamageError: files that are not as DCP writes them.
        CheckpointError: there is no such checkpoint.
    """
    with DcpFiles(Path(folder).absolute()) as files:
        wanted = targets(like, specs, mesh)
        names = [dotted([key for _, key in target.path]) for target in wanted.targets]
        loaded = _match(files, wanted.targets, names)
        values = [loaded[n] if n in loaded else _tensor(files, t, n) for t, n in zip(wanted.targets, names)]
    return px_tree.unflatten(wanted.treedef, values)


def _dtype(target: Target) -> str:
    """The dtype that a target has in a checkpoint, by its name; "" for a Python value."""
    return dtype_name(as_tensor(np.empty(0, target.numpy)).dtype) if target.numpy else target.dtype


def _match(files: DcpFiles, wanted: Sequence[Target], names: Sequence[str]) -> dict[str, Any]:
    """Makes sure that all is there; returns the Python values."""
    problems, loaded = [], {}
    for target, name in zip(wanted, names):
        entry = files.entries.get(name)
        if entry is None:
            problems.append(f"{name}: not in the checkpoint{near_names(name, list(files.entries))}")
        elif isinstance(entry, DcpObject):
            loaded[name] = files.load(name) if target.kind in PYTHON else None
            if type(loaded[name]).__name__ != target.kind:
                what = type(loaded[name]).__name__ if target.kind in PYTHON else "no tensor"
                problems.append(f"{name}: {what} in the checkpoint, like has {target.text}")
        elif (entry.shape, entry.dtype) != (target.shape, _dtype(target)) or not entry.dtype:
            dtype = DTYPES[entry.dtype].dtype if entry.dtype else None
            there = describe(ShapeDtypeStruct(entry.shape, dtype)) if dtype else f"{list(entry.shape)} of another dtype"
            problems.append(f"{name}: {there} in the checkpoint, like has {target.text}")
    if problems:
        raise CheckpointMismatchError(
            f"{files.path} does not fit like:\n    " + "\n    ".join(problems),
            fix="pass like= with the names, shapes and dtypes that px.checkpoint.dcp_shapes gives",
        )
    return loaded


def _tensor(files: DcpFiles, target: Target, name: str) -> Any:
    return target.build(fill(target, DTYPES[_dtype(target)].dtype, lambda box, place: files.read(name, box, place)))
