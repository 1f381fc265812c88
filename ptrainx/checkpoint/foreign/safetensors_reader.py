"""The tensors of a folder's safetensors files, which others may have written: nothing in them is believed.

In: a folder as `save_pretrained` leaves it. Out: which tensors it holds, and boxes of them, of which only the bytes
that they need are read.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from ptrainx.checkpoint.boxes import Box
from ptrainx.checkpoint.dtypes import DTYPES
from ptrainx.checkpoint.files import ReadFolder
from ptrainx.checkpoint.foreign.strided import read_box, row_major
from ptrainx.core.errors import CheckpointDamageError, CheckpointError

__all__ = ["INDEX", "SINGLE", "StoredTensor", "WeightFiles"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LONGEST = 100_000_000
"""Bytes of a header, as safetensors has it, or of an index."""
AGAIN = "download or export the folder again"

CODES = {stored.code: name for name, stored in reversed(DTYPES.items()) if not stored.pair}
"""What safetensors calls a dtype -> its name in `DTYPES`."""


class StoredTensor(NamedTuple):
    """A tensor in a file: its dtype by the name in `DTYPES` ("" for one that torch lacks), its shape, where it lies."""

    dtype: str
    shape: tuple[int, ...]
    code: str
    file: str
    begin: int

    def __str__(self) -> str:
        return f"{self.code}{list(self.shape)}"


class WeightFiles:
    """The weights of a folder, their headers read and checked.

    Raises:
        CheckpointError: no weights are there.
        CheckpointDamageError: a file that is no safetensors file, or an index that is none.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise CheckpointError(f"there is no folder {path}", fix="check the path")
        self._folder = ReadFolder(path, links=True)
        self.tensors: dict[str, StoredTensor] = {}
        try:
            for file, names in self._files().items():
                found = self._header(file)
                missing = [name for name in names if name not in found]
                if missing:
                    raise CheckpointDamageError(
                        f"{path / file} lacks tensors that the index says it has", got=", ".join(missing[:4]), fix=AGAIN
                    )
                self.tensors |= found
        except BaseException:
            self._folder.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._folder.__exit__(kind, error, tb)

    def read(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Fills `target` (CPU, of the tensor's dtype and the box's shape) with a box of a tensor."""
        stored = self.tensors[name]

        def read_into(offset: int, place: memoryview) -> None:
            self._folder.read_into(stored.file, offset, place)

        read_box(read_into, stored.begin, row_major(stored.shape), box, target)

    def _files(self) -> dict[str, list[str]]:
        """The files with weights, by plain names, with the tensors that the index promises of each."""
        if (self.path / SINGLE).exists():
            return {SINGLE: []}
        if not (self.path / INDEX).exists():
            raise CheckpointError(f"there is no {SINGLE} and no {INDEX} in {self.path}", fix="check the path")
        found: dict[str, list[str]] = {}
        try:
            for name, file in json.loads(self._folder.read(INDEX, LONGEST))["weight_map"].items():
                found.setdefault(file, []).append(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointDamageError(f"{self.path / INDEX} is no index: {error!r}", fix=AGAIN) from error
        for file in found:
            plain = isinstance(file, str) and Path(file).name == file and file.isprintable()
            if not plain or not file.endswith(".safetensors"):
                problem = f"{self.path / INDEX} names a file that is none of the folder's: {file!r}"
                raise CheckpointDamageError(problem, fix=AGAIN)
        return dict(sorted(found.items()))

    def _header(self, file: str) -> dict[str, StoredTensor]:
        size = self._folder.size(file)
        length = bytearray(8)
        self._folder.read_into(file, 0, memoryview(length))
        (n,) = struct.unpack("<Q", length)
        if n > min(LONGEST, size - 8):
            raise CheckpointDamageError(f"{self.path / file} is no safetensors file, or a part of one", fix=AGAIN)
        text = bytearray(n)
        self._folder.read_into(file, 8, memoryview(text))
        try:
            records = json.loads(text)
            records.pop("__metadata__", None)
            return {name: _stored(record, file, 8 + n, size) for name, record in records.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{self.path / file}: the header is not one of a safetensors file"
            raise CheckpointDamageError(problem, got=str(error) or repr(error), fix=AGAIN) from error


def _stored(record: Any, file: str, data: int, size: int) -> StoredTensor:
    """A tensor by its entry in the header; ValueError if there is something wrong with it."""
    code, shape, (begin, end) = record["dtype"], record["shape"], record["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or not isinstance(code, str):
        raise ValueError(f"sizes and offsets expected, got {record}")
    dtype = CODES.get(code, "")
    if not begin <= end <= size - data:
        raise ValueError(f"bytes {begin:,} to {end:,} of {size - data:,}")
    if dtype and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{end - begin:,} bytes for {code}{shape}")
    return StoredTensor(dtype, tuple(shape), code, file, data + begin)
