"""What a checkpoint says about itself: the commit record and the manifest; see docs/reference/checkpoint-format.md.

Here is what they hold and how they are written; `manifest_reader.py` reads them and believes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ptrainx.checkpoint import paths
from ptrainx.checkpoint.boxes import Box
from ptrainx.checkpoint.dtypes import DTYPES
from ptrainx.checkpoint.paths import TypedPath

__all__ = [
    "BLOCK",
    "COMMIT",
    "FORMAT",
    "MANIFEST",
    "VERSION",
    "Chunk",
    "Leaf",
    "Manifest",
    "RankFile",
    "TensorEntry",
    "chunk_name",
    "encode_commit",
    "encode_manifest",
    "file_name",
    "step_name",
    "step_of",
]

FORMAT = "ptrainx-checkpoint"
VERSION = 1
COMMIT = "commit.json"
MANIFEST = "manifest.json"
BLOCK = 4 << 20
"""Bytes under one checksum."""


class Chunk(NamedTuple):
    """A part of a tensor in a file.

    Attributes:
        file: place in `Manifest.files`.
        box: which part.
        begin: offset of its first byte in the file.
        sums: CRC-32 of each `BLOCK` bytes, the last ones fewer.
    """

    file: int
    box: Box
    begin: int
    sums: tuple[int, ...]


class TensorEntry(NamedTuple):
    """A tensor: its name in `DTYPES`, its global shape, chunks that tile it, and how it was placed: an index of
    `Manifest.meshes` and per dim the axes that split it; None for a plain one."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    mesh: int | None = None
    spec: tuple[tuple[str, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return Box((), self.shape).size * DTYPES[self.dtype].itemsize


class Leaf(NamedTuple):
    """A leaf of the tree.

    Attributes:
        path: where it stands.
        kind: `tensor`, `numpy`, `numpy scalar`, or a Python type: `int float bool complex str bytes`.
        tensor: place in `Manifest.tensors`; tied leaves have the same.
        value: of a Python value, as text.
        numpy: numpy's name of the dtype, with its byte order.
    """

    path: TypedPath
    kind: str
    tensor: int | None = None
    value: str = ""
    numpy: str = ""


class RankFile(NamedTuple):
    """The file that a rank wrote: its length, the length of what comes before its data, and the CRC-32 of that."""

    rank: int
    size: int
    header: int
    header_sum: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All that a checkpoint holds. `meshes` are axis names and sizes, for people."""

    step: int
    world: int
    files: tuple[RankFile, ...]
    tensors: tuple[TensorEntry, ...]
    leaves: tuple[Leaf, ...]
    meshes: tuple[dict[str, int], ...] = ()
    metric: float | None = None
    block: int = BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of all files with data."""
        return sum(file.size for file in self.files)


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def chunk_name(tensor: int, box: Box) -> str:
    """What a chunk is called inside its file.

    >>> chunk_name(3, Box((0, 4), (2, 4)))
    '3[0:2,4:8]'
    """
    return f"{tensor}{box}"


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:012d}"


def step_of(name: str) -> int | None:
    """The step whose folder has this name, or None."""
    found = re.fullmatch(r"step-([0-9]{12,19})", name)
    step = int(found[1]) if found else -1
    return step if step >= 0 and step_name(step) == name else None


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as JSON."""
    whole = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world": manifest.world,
        **({} if manifest.metric is None else {"metric": manifest.metric}),
        "block_bytes": manifest.block,
        "meshes": [{"axes": list(map(list, mesh.items()))} for mesh in manifest.meshes],
        "files": [
            {
                "name": file_name(file.rank),
                "rank": file.rank,
                "bytes": file.size,
                "header_bytes": file.header,
                "header_crc32": file.header_sum,
            }
            for file in manifest.files
        ],
        "tensors": list(map(_tensor, manifest.tensors)),
        "leaves": list(map(_leaf, manifest.leaves)),
    }
    return json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    placed = {} if entry.mesh is None else {"mesh": entry.mesh, "spec": list(map(list, entry.spec))}
    chunks = [
        {"file": c.file, "begin": c.begin, "offset": c.box.offset, "shape": c.box.shape, "crc32": c.sums}
        for c in entry.chunks
    ]
    return {"dtype": entry.dtype, "shape": entry.shape, **placed, "chunks": chunks}


def _leaf(leaf: Leaf) -> dict[str, Any]:
    holds: Mapping[str, Any] = {"value": leaf.value} if leaf.tensor is None else {"tensor": leaf.tensor}
    return {
        "path": paths.to_json(leaf.path),
        "kind": leaf.kind,
        **holds,
        **({"numpy": leaf.numpy} if leaf.numpy else {}),
    }


def encode_commit(manifest: bytes, step: int) -> bytes:
    """The commit record of a step with this manifest."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "manifest": {"name": MANIFEST, "bytes": len(manifest), "sha256": hashlib.sha256(manifest).hexdigest()},
    }
    return json.dumps(record, indent=1).encode() + b"\n"
