"""A tensor as `torch.save` writes it: an archive in which the elements lie as they are in memory.

In: a part of a file. Out: where the elements lie, so that only those that are needed are read. The archive's record of
the tensor is a pickle; only the functions that rebuild a tensor are known in it, and none of them is called.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ptrainx.checkpoint.foreign.pickles import read_pickle
from ptrainx.checkpoint.foreign.strided import row_major
from ptrainx.core.errors import CheckpointError

__all__ = ["SavedTensor", "saved_tensor"]

RECORD = 1 << 20
"""Bytes that the record of one tensor may have."""


class SavedTensor(NamedTuple):
    """Where the elements are.

    Attributes:
        begin: the byte of the first one in the file.
        strides: in elements.
        shape, dtype: of the tensor.
        sum: CRC-32 of the elements in order, if they are all of the archive's and it has one.
    """

    begin: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sum: int | None


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    key: str


class _View(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype | None


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


class _Window(io.RawIOBase):
    """A part of a file, to be read and moved in."""

    def __init__(self, read_into: Callable[[int, memoryview], None], begin: int, size: int):
        self._read_into, self._begin, self._size, self._at = read_into, begin, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        data = bytearray(max(0, min(len(target), self._size - self._at)))
        if data:
            self._read_into(self._begin + self._at, memoryview(data))
            self._at += len(data)
        target[: len(data)] = data
        return len(data)


def _rebuilt(storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, metadata: Any = None) -> _View:
    return _rebuilt_as(storage, offset, shape, strides, grad, hooks, None, metadata)


def _rebuilt_as(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> _View:
    del grad, hooks
    if metadata:
        raise ValueError(f"a conjugated or negated view: {metadata}")
    return _View(storage, offset, shape, strides, dtype)


def _parameter(data: Any, grad: Any, hooks: Any) -> Any:
    del grad, hooks
    return data


_KNOWN: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuilt_as,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("collections", "OrderedDict"): dict,
    ("torch.storage", "UntypedStorage"): None,
    **{("torch", storage): dtype for storage, dtype in _STORAGES.items()},
}
"""What the record of a tensor may name, and what it stands for here."""


def _storage(pid: Any) -> _Storage:
    kind, dtype, key, _, _ = pid
    if kind != "storage" or not isinstance(key, str) or not isinstance(dtype, torch.dtype | None):
        raise ValueError("a storage expected")
    return _Storage(dtype, key)


def saved_tensor(read_into: Callable[[int, memoryview], None], begin: int, size: int) -> SavedTensor:
    """Where the elements of a saved tensor lie.

    Args:
        read_into: reads from the file: (offset, what to fill).
        begin, size: the bytes that `torch.save` wrote.

    Raises:
        ValueError: they are no saved tensor.
        CheckpointDamageError: the file can't be read.
    """
    try:
        with zipfile.ZipFile(_Window(read_into, begin, size)) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            record = entries["data.pkl"]
            if max(record.file_size, record.compress_size) > RECORD:
                raise ValueError("a record of a tensor is not that long")
            for small in (entries[name] for name in ("data.pkl", "byteorder") if name in entries):
                if small.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is compressed")
                small.CRC = small.CRC or None  # type: ignore[assignment]  # 0: checksums were not asked for
            view = read_pickle(archive.read(record), _KNOWN, _storage)
            if "byteorder" in entries and archive.read(entries["byteorder"])[:8] != b"little":
                raise ValueError("it was written on a big-endian machine")
        return _checked(view, entries, read_into, begin, size)
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, KeyError, TypeError, EOFError, OSError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _checked(
    view: Any, entries: dict[str, zipfile.ZipInfo], read_into: Callable[[int, memoryview], None], begin: int, size: int
) -> SavedTensor:
    if not isinstance(view, _View) or not isinstance(view.storage, _Storage):
        raise ValueError("it is something else than a tensor")
    dtype = view.storage.dtype or view.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has no dtype")
    dims = (view.shape, view.strides)
    if not all(type(sizes) is tuple for sizes in dims) or len(view.shape) != len(view.strides):
        raise ValueError(f"a shape and strides expected, got {dims}")
    numbers = (view.offset, *view.shape, *view.strides)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"sizes and strides expected, got {numbers}")
    data = entries[f"data/{view.storage.key}"]
    local = bytearray(30)  # the entry's own header, whose lengths of name and padding count
    read_into(begin + data.header_offset, memoryview(local))
    start = data.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    if data.compress_type != zipfile.ZIP_STORED or local[:4] != b"PK\x03\x04" or start + data.file_size > size:
        raise ValueError("its elements are not as they are in memory")
    last = view.offset + sum((n - 1) * stride for n, stride in zip(view.shape, view.strides)) + 1
    if 0 not in view.shape and last * dtype.itemsize > data.file_size:
        raise ValueError(f"{data.file_size:,} bytes for {list(view.shape)} of {dtype}")
    in_order = view.strides == row_major(view.shape) and math.prod(view.shape) * dtype.itemsize == data.file_size
    place = begin + start + view.offset * dtype.itemsize
    return SavedTensor(place, view.strides, view.shape, dtype, data.CRC or None if in_order else None)
