"""What a distributed checkpoint of PyTorch (DCP) says of itself: its file `.metadata`, read without belief.

The file is a pickle, by PyTorch's definition. Only the classes of DCP's metadata may be named in it, and each stands
for a plain record; of the records only what fits is taken.

Source: `torch/distributed/checkpoint/metadata.py` and `filesystem.py`; format version 1.0.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ptrainx.checkpoint.boxes import Box, tiling_problem
from ptrainx.checkpoint.dtypes import DTYPES, dtype_name
from ptrainx.checkpoint.foreign.pickles import read_pickle
from ptrainx.core.errors import CheckpointDamageError

__all__ = ["METADATA", "DcpObject", "DcpPart", "DcpTensor", "read_metadata"]

METADATA = ".metadata"
AGAIN = "bring the checkpoint from a good copy"


class DcpPart(NamedTuple):
    """A part of a tensor, or an object: which part, and where it lies."""

    box: Box
    file: str
    begin: int
    size: int


class DcpTensor(NamedTuple):
    """A tensor: its dtype by the name in `DTYPES` ("" for another), its global shape, the parts that tile it."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[DcpPart, ...]


class DcpObject(NamedTuple):
    """Something that is no tensor; where it lies."""

    part: DcpPart


class _Record:
    """An object of any of the classes that are known; what it was made with is its `state`."""

    def __init__(self, *args: Any):
        self.state: Any = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


class _Tensor(_Record): ...


class _Object(_Record): ...


_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN: Mapping[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Record,
    (_METADATA, "MetadataIndex"): _Record,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Object,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Record,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _Record,
    ("pathlib", "WindowsPath"): _Record,
    ("pathlib", "PurePosixPath"): _Record,
}
"""The names that a metadata file may have, and what they stand for here."""


def read_metadata(data: bytes, folder: Path) -> dict[str, DcpTensor | DcpObject]:
    """What a checkpoint holds, by names.

    Args:
        data: of the file `.metadata`.
        folder: for messages.

    Raises:
        CheckpointDamageError: it is no such file, or it contradicts itself.
    """
    try:
        found = read_pickle(data, _KNOWN)
        places = {_key(index.state): _place(info.state) for index, info in found["storage_data"].items()}
        return {str(name): _entry(name, record, places) for name, record in found["state_dict_metadata"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointDamageError(
            f"{folder / METADATA} is not the metadata of a distributed checkpoint",
            got=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}",
            fix=AGAIN,
        ) from error


def _key(index: Mapping[str, Any]) -> tuple[str, tuple[int, ...] | None]:
    offset = index.get("offset")
    return index["fqn"], None if offset is None else _sizes(offset)


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(n) is int and n >= 0 for n in values):
        raise ValueError(f"sizes expected, got {values!r}")
    return values


def _place(info: Mapping[str, Any]) -> tuple[str, int, int]:
    file, (begin, size) = info["relative_path"], _sizes((info["offset"], info["length"]))
    if not isinstance(file, str) or Path(file).name != file or not file.isprintable() or file in ("", ".."):
        raise ValueError(f"a file outside of the folder: {file!r}")
    if info.get("transform_descriptors"):
        raise ValueError(f"its files are compressed or encrypted: {info['transform_descriptors']}")
    return file, begin, size


def _entry(name: str, record: Any, places: Mapping[Any, tuple[str, int, int]]) -> DcpTensor | DcpObject:
    if type(record) is _Object:
        return DcpObject(DcpPart(Box((), ()), *places[name, None]))
    if type(record) is not _Tensor:
        raise ValueError(f"{name} is neither a tensor nor an object")
    shape, properties = _sizes(record["size"]), record["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    boxes = [Box(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in record["chunks"]]
    boxes = list(dict.fromkeys(box for box in boxes if box.size))
    problem = tiling_problem(shape, boxes)
    if problem:
        raise ValueError(f"{name}: {problem}")
    parts = tuple(DcpPart(box, *places[name, box.offset]) for box in boxes)
    return DcpTensor(dtype_name(dtype) if dtype_name(dtype) in DTYPES else "", shape, parts)
