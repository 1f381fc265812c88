"""Reading what a checkpoint says about itself, without believing it.

In: a step's folder. Out: a `Manifest` in which every number has been held against the others and against the files:
names are ours, lengths are those of the files, chunks lie within them, leave no gap and do not overlap, tile their
tensors, and carry as many checksums as they have blocks. Nothing is allocated before that but the two JSON files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from ptrainx.checkpoint import paths
from ptrainx.checkpoint.boxes import Box, tiling_problem
from ptrainx.checkpoint.dtypes import DTYPES
from ptrainx.checkpoint.files import ReadFolder
from ptrainx.checkpoint.manifest import (
    COMMIT,
    FORMAT,
    MANIFEST,
    VERSION,
    Chunk,
    Leaf,
    Manifest,
    RankFile,
    TensorEntry,
    file_name,
)
from ptrainx.checkpoint.scalars import PYTHON, from_text
from ptrainx.core.errors import CheckpointDamageError, CheckpointError

__all__ = ["parse_manifest", "read_commit", "read_manifest"]

HUGE = 1 << 62
COMMIT_LIMIT = 1 << 16
MANIFEST_LIMIT = 4 << 30
DIMS = 64


class _Wrong(ValueError):
    """What is wrong with a part of a record."""


def read_commit(folder: ReadFolder, step: int) -> tuple[int, str]:
    """(bytes, SHA-256) of the manifest, as the commit record has them.

    Raises:
        CheckpointDamageError: there is no commit record, or none of this step.
        CheckpointError: it is of a later version of the format.
    """
    with _damage(folder, COMMIT):
        record = _json(folder.read(COMMIT, COMMIT_LIMIT))
        _header(record, step)
        about = _get(record, "manifest", dict)
        if about.get("name") != MANIFEST:
            raise _Wrong("it names another manifest")
        return _int(about, "bytes", MANIFEST_LIMIT), _get(about, "sha256", str)


def read_manifest(folder: ReadFolder, step: int) -> Manifest:
    """The manifest of a step, checked against the commit record and the lengths of the files.

    Raises:
        CheckpointDamageError: something does not fit.
        CheckpointError: it is of a later version of the format.
    """
    size, digest = read_commit(folder, step)
    with _damage(folder, MANIFEST):
        data = folder.read(MANIFEST, size)
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise _Wrong("it is not the one that was committed")
        manifest = parse_manifest(data, step)
    for file in manifest.files:
        found = folder.size(file_name(file.rank))
        if found != file.size:
            raise CheckpointDamageError(
                f"{folder.path / file_name(file.rank)} has another length than was written",
                got=f"{found:,} bytes",
                expected=f"{file.size:,} bytes",
            )
    return manifest


@contextlib.contextmanager
def _damage(folder: ReadFolder, name: str) -> Iterator[None]:
    try:
        yield
    except (_Wrong, ValueError, RecursionError) as error:
        raise CheckpointDamageError(f"{folder.path / name} is damaged: {error}") from error


def _json(data: bytes) -> dict[str, Any]:
    def refuse(text: str) -> None:
        raise _Wrong(f"{text} is no number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise _Wrong("a name is given twice")
        return found

    record = json.loads(data, parse_constant=refuse, object_pairs_hook=once)
    if not isinstance(record, dict):
        raise _Wrong("it is no record")
    return record


def _header(record: dict[str, Any], step: int) -> None:
    if record.get("format") != FORMAT:
        raise _Wrong("it is of another format")
    if _int(record, "version") > VERSION:
        raise CheckpointError(
            f"the checkpoint of step {step} is of a later version of the format",
            got=f"version {record['version']}",
            expected=f"version {VERSION} at most",
            fix="read it with a newer ptrainx",
        )
    if _int(record, "version") < 1 or _int(record, "step") != step:
        raise _Wrong("it is of another step")


def parse_manifest(data: bytes, step: int) -> Manifest:
    """A manifest from its JSON.

    Raises:
        ValueError: anything in it that does not fit.
    """
    record = _json(data)
    _header(record, step)
    block = _int(record, "block_bytes", 1 << 30)
    if block < 16 or block % 16:
        raise _Wrong("block_bytes is no multiple of 16")
    world = _int(record, "world", 1 << 32)
    files = tuple(_file(item, world) for item in _records(record, "files"))
    if len({file.rank for file in files}) < len(files):
        raise _Wrong("a file is listed twice")
    meshes = tuple(_mesh(item) for item in _records(record, "meshes"))
    tensors = tuple(
        _within(f"tensor {i}", functools.partial(_tensor, item, block, len(files), meshes))
        for i, item in enumerate(_records(record, "tensors"))
    )
    leaves = tuple(
        _within(f"leaf {i}", functools.partial(_leaf, item, tensors))
        for i, item in enumerate(_records(record, "leaves"))
    )
    if len({paths.identity(leaf.path) for leaf in leaves}) < len(leaves):
        raise _Wrong("a leaf is listed twice")
    _check_extents(files, tensors)
    metric = record.get("metric")
    if metric is not None and not (type(metric) in (int, float) and abs(metric) < 1e308):
        raise _Wrong("metric is no number")
    return Manifest(step, world, files, tensors, leaves, meshes, None if metric is None else float(metric), block)


def _within(where: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ValueError as error:
        raise _Wrong(f"{where}: {error}") from error


def _get(record: dict[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if type(value) is not kind:
        raise _Wrong(f"{name} is no {kind.__name__}")
    return value


def _int(record: dict[str, Any], name: str, limit: int = HUGE) -> int:
    return _number(record.get(name), name, limit)


def _number(value: Any, name: str, limit: int = HUGE) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise _Wrong(f"{name} is no integer from 0 to {limit}")
    return value


def _ints(record: dict[str, Any], name: str, most: int, limit: int = HUGE) -> tuple[int, ...]:
    values = _get(record, name, list)
    if len(values) > most:
        raise _Wrong(f"{name} has more than {most} entries")
    return tuple(_number(value, name, limit) for value in values)


def _records(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    items = _get(record, name, list)
    if not all(isinstance(item, dict) for item in items):
        raise _Wrong(f"{name} is no list of records")
    return items


def _file(item: dict[str, Any], world: int) -> RankFile:
    rank, size, header = _int(item, "rank", world - 1), _int(item, "bytes"), _int(item, "header_bytes")
    if item.get("name") != file_name(rank):
        raise _Wrong(f"the file of rank {rank} is not called {file_name(rank)}")
    if not 8 <= header <= size:
        raise _Wrong(f"{file_name(rank)} is shorter than its header")
    return RankFile(rank, size, header, _int(item, "header_crc32", 0xFFFFFFFF))


def _mesh(item: dict[str, Any]) -> dict[str, int]:
    axes = _get(item, "axes", list)
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in axes):
        raise _Wrong("a mesh is no list of axes")
    return {name: _number(size, "an axis", 1 << 32) for name, size in axes}


def _tensor(item: dict[str, Any], block: int, files: int, meshes: tuple[dict[str, int], ...]) -> TensorEntry:
    dtype, shape = _get(item, "dtype", str), _ints(item, "shape", DIMS)
    if dtype not in DTYPES:
        raise _Wrong(f"dtype {dtype[:40]!r} is not known")
    if math.prod(n for n in shape if n) * 16 > HUGE:
        raise _Wrong("the shape is too large")
    chunks = tuple(_chunk(part, DTYPES[dtype].itemsize, block, files) for part in _records(item, "chunks"))
    if len({(chunk.box, chunk.file) for chunk in chunks}) < len(chunks):
        raise _Wrong("a chunk is listed twice")
    problem = tiling_problem(shape, dict.fromkeys(chunk.box for chunk in chunks))
    if problem:
        raise _Wrong(problem)
    mesh, spec = item.get("mesh"), _spec([], {})
    if mesh is not None:
        _number(mesh, "mesh", len(meshes) - 1)
        spec = _spec(_get(item, "spec", list), meshes[mesh])
    return TensorEntry(dtype, shape, chunks, mesh, spec)


def _spec(entries: list[Any], mesh: dict[str, int]) -> tuple[tuple[str, ...], ...]:
    for entry in entries:
        if not isinstance(entry, list) or not all(isinstance(axis, str) and axis in mesh for axis in entry):
            raise _Wrong("the spec is no list of lists of the mesh's axes")
    return tuple(map(tuple, entries))


def _chunk(item: dict[str, Any], itemsize: int, block: int, files: int) -> Chunk:
    box = Box(_ints(item, "offset", DIMS), _ints(item, "shape", DIMS))
    if len(box.offset) != len(box.shape):
        raise _Wrong("offset and shape of a chunk have not as many dims")
    blocks = -(-box.size * itemsize // block)
    sums = _ints(item, "crc32", min(blocks, HUGE), 0xFFFFFFFF)
    if len(sums) != blocks:
        raise _Wrong("a chunk has not as many checksums as blocks")
    return Chunk(_int(item, "file", files - 1), box, _int(item, "begin"), sums)


def _check_extents(files: tuple[RankFile, ...], tensors: tuple[TensorEntry, ...]) -> None:
    """The chunks of each file follow one another, from the end of its header to its own end."""
    extents: list[list[tuple[int, int]]] = [[] for _ in files]
    for tensor in tensors:
        for chunk in tensor.chunks:
            size = chunk.box.size * DTYPES[tensor.dtype].itemsize
            extents[chunk.file].append((chunk.begin, chunk.begin + size))
    for file, parts in zip(files, extents):
        place = file.header
        for begin, end in sorted(parts):
            if begin != place:
                raise _Wrong(f"in {file_name(file.rank)}, bytes {min(begin, place)} to {max(begin, place)} don't fit")
            place = end
        if place != file.size:
            raise _Wrong(f"{file_name(file.rank)} is not filled by its chunks")


def _leaf(item: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> Leaf:
    path, kind = paths.from_json(item.get("path")), _get(item, "kind", str)
    if kind in PYTHON:
        value = _get(item, "value", str)
        from_text(kind, value)
        return Leaf(path, kind, value=value)
    if kind not in ("tensor", "numpy", "numpy scalar"):
        raise _Wrong(f"kind {kind[:40]!r} is not known")
    index = _int(item, "tensor", len(tensors) - 1)
    numpy = "" if kind == "tensor" else _get(item, "numpy", str)
    if numpy and len(numpy) > 8:
        raise _Wrong("numpy names no dtype")
    return Leaf(path, kind, index, numpy=numpy)
