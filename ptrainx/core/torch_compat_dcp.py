"""Private torch names of distributed checkpoints (DCP): the records in their metadata file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["ChunkPlace", "encode_dcp_metadata"]


class ChunkPlace(NamedTuple):
    """A part of a tensor, or an object (no offset): which, and where it lies."""

    offset: tuple[int, ...] | None
    shape: tuple[int, ...]
    file: str
    begin: int
    size: int


def encode_dcp_metadata(
    entries: Mapping[str, tuple[torch.dtype | None, tuple[int, ...], Sequence[ChunkPlace]]],
    keys: Mapping[str, tuple[Any, ...]],
) -> bytes:
    """The bytes of a file `.metadata` that `torch.distributed.checkpoint.load` reads.

    Args:
        entries: name -> (dtype, shape, parts); dtype None for an object that is no tensor.
        keys: name -> the path that it has in a nested state dict.
    """
    # Imported when it is needed: few programs write such checkpoints.
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as md

    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for name, (dtype, shape, parts) in entries.items():
        chunks = [md.ChunkStorageMetadata(torch.Size(p.offset or ()), torch.Size(p.shape)) for p in parts]
        if dtype is None:
            described[name] = md.BytesStorageMetadata()
        else:
            described[name] = md.TensorStorageMetadata(md.TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        for index, part in enumerate(parts):
            key = md.MetadataIndex(name) if dtype is None else md.MetadataIndex(name, part.offset, index)
            storage[key] = filesystem._StorageInfo(part.file, part.begin, part.size)
    found = md.Metadata(described, dict(keys), storage, md.StorageMeta())
    if hasattr(found, "version"):
        found.version = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
    return pickle.dumps(found)
