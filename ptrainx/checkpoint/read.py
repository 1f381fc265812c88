"""Reading parts of a committed step: only the blocks that a part needs, each checked before its bytes are used.

In: a step's folder. Out: boxes of tensors, in any cut, whatever mesh they were saved from.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from ptrainx.checkpoint.boxes import Box, inside, meet
from ptrainx.checkpoint.dtypes import DTYPES, bytes_of
from ptrainx.checkpoint.files import ReadFolder
from ptrainx.checkpoint.manifest import Chunk, Manifest, chunk_name, file_name
from ptrainx.checkpoint.manifest_reader import read_manifest
from ptrainx.checkpoint.safetensors_file import header_problem
from ptrainx.core.errors import CheckpointDamageError

__all__ = ["OpenStep"]

SPAN = 64 << 20
"""Bytes that are held at once of a chunk that is not read straight to its place."""


class OpenStep:
    """A committed step, its manifest read and checked.

    Args:
        path: the step's folder.
        step: its number.

    Raises:
        CheckpointDamageError: commit record, manifest or lengths of files don't fit.
    """

    def __init__(self, path: Path, step: int):
        self.path = path
        self._folder = ReadFolder(path)
        try:
            self.manifest: Manifest = read_manifest(self._folder, step)
        except BaseException:
            self._folder.__exit__(None, None, None)
            raise
        self._checked: set[int] = set()
        self._last: tuple[tuple[int, int, int], bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._folder.__exit__(kind, error, tb)

    def read(self, tensor: int, box: Box, target: torch.Tensor) -> None:
        """Fills `target` with a box of a tensor.

        Args:
            tensor: place in the manifest.
            box: which part.
            target: CPU, of the tensor's dtype and the box's shape, any strides.

        Raises:
            CheckpointDamageError: a block is not as it was written.
        """
        done: set[Box] = set()
        for chunk in self.manifest.tensors[tensor].chunks:
            part = meet(chunk.box, box)
            if part is not None and chunk.box not in done:  # a chunk may be there twice
                done.add(chunk.box)
                self._check_header(chunk.file)
                self._read_part(tensor, chunk, part, target[inside(part, box.offset)])

    def _check_header(self, file: int) -> bytes:
        about = self.manifest.files[file]
        if file in self._checked:
            return b""
        data = bytearray(about.header)
        self._folder.read_into(file_name(about.rank), 0, memoryview(data))
        if zlib.crc32(data) != about.header_sum:
            raise CheckpointDamageError(f"{self.path / file_name(about.rank)}: the header is not as it was written")
        self._checked.add(file)
        return bytes(data)

    def _read_part(self, tensor: int, chunk: Chunk, part: Box, target: torch.Tensor) -> None:
        itemsize = DTYPES[self.manifest.tensors[tensor].dtype].itemsize
        strides = _strides(chunk.box.shape)
        if part == chunk.box and target.is_contiguous():
            self._read_blocks(tensor, chunk, range(len(chunk.sums)), 0, bytes_of(target))
            return
        start = sum((o - c) * s for o, c, s in zip(part.offset, chunk.box.offset, strides))
        end = start + sum((n - 1) * s for n, s in zip(part.shape, strides)) + 1
        dim = next((d for d, n in enumerate(part.shape) if n > 1), None)
        if (end - start) * itemsize > SPAN and dim is not None:
            half = part.shape[dim] // 2
            for first, n in ((0, half), (half, part.shape[dim] - half)):
                offset = tuple(o + first * (d == dim) for d, o in enumerate(part.offset))
                shape = tuple(n if d == dim else m for d, m in enumerate(part.shape))
                rows = target.narrow(dim, first, n)
                self._read_part(tensor, chunk, Box(offset, shape), rows)
            return
        block = self.manifest.block
        first_block = start * itemsize // block
        base = first_block * block
        size = min(-(-end * itemsize // block) * block, chunk.box.size * itemsize) - base
        held = torch.empty(size, dtype=torch.uint8)
        self._read_blocks(tensor, chunk, _needed(part, chunk.box, itemsize, block), base, bytes_of(held))
        items = held.view(target.dtype)
        target.copy_(items.as_strided(part.shape, strides, start - base // itemsize))

    def _read_blocks(self, tensor: int, chunk: Chunk, blocks: Sequence[int], base: int, target: memoryview) -> None:
        """Fills the bytes of some blocks of a chunk; `target` starts at byte `base` of the chunk."""
        block = self.manifest.block
        size = chunk.box.size * DTYPES[self.manifest.tensors[tensor].dtype].itemsize
        name = file_name(self.manifest.files[chunk.file].rank)
        for index in blocks:
            begin = index * block
            place = target[begin - base : min(begin + block, size) - base]
            key = (chunk.file, chunk.begin, index)
            if self._last is not None and self._last[0] == key:  # two halves of a part share a block
                place[:] = self._last[1]
                continue
            self._folder.read_into(name, chunk.begin + begin, place)
            if zlib.crc32(place) != chunk.sums[index]:
                raise CheckpointDamageError(
                    f"{self.path / name}: a block is not as it was written",
                    got=f"another checksum of bytes {chunk.begin + begin:,} to {chunk.begin + begin + len(place):,}, "
                    f"in {chunk_name(tensor, chunk.box)}",
                    fix="restore an earlier step, and look at the disk",
                )
            if len(target) < size and index == blocks[-1]:
                self._last = key, bytes(place)

    def problems(self) -> Iterator[str]:
        """Reads all files whole, and tells everything that is not as it was written."""
        for index, about in enumerate(self.manifest.files):
            held = [
                (chunk_name(i, chunk.box), tensor.dtype, chunk.box, chunk.begin)
                for i, tensor in enumerate(self.manifest.tensors)
                for chunk in tensor.chunks
                if chunk.file == index
            ]
            try:
                problem = header_problem(self._check_header(index), held)
            except CheckpointDamageError as error:
                problem = error.problem
            if problem:
                yield f"{file_name(about.rank)}: {problem}"
        sizes = [c.box.size * DTYPES[t.dtype].itemsize for t in self.manifest.tensors for c in t.chunks]
        buffer = memoryview(bytearray(min(self.manifest.block, max(sizes, default=0))))
        for i, tensor in enumerate(self.manifest.tensors):
            for chunk in tensor.chunks:
                size = chunk.box.size * DTYPES[tensor.dtype].itemsize
                for index in range(len(chunk.sums)):
                    begin = index * self.manifest.block
                    part = buffer[: min(self.manifest.block, size - begin)]
                    try:
                        self._read_blocks(i, chunk, [index], begin, part)
                    except CheckpointDamageError as error:
                        yield f"{error.problem}: {error.got}" if error.got else error.problem


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _needed(part: Box, chunk: Box, itemsize: int, block: int) -> list[int]:
    """The blocks of a chunk in which bytes of a part lie."""
    strides = _strides(chunk.shape)
    # From the right, dims that the part has whole make one run; the first that it has not whole ends the run.
    inner = len(part.shape)
    run = 1
    while inner > 0 and run == math.prod(chunk.shape[inner:]):
        inner -= 1
        run *= part.shape[inner]
    starts = np.zeros((), dtype=np.int64)
    for d in range(inner):
        own = (part.offset[d] - chunk.offset[d] + np.arange(part.shape[d], dtype=np.int64)) * strides[d]
        starts = np.add.outer(starts, own)
    below = sum((part.offset[d] - chunk.offset[d]) * strides[d] for d in range(inner, len(part.shape)))
    begins = np.ravel(starts + below) * itemsize
    firsts, lasts = begins // block, (begins + run * itemsize - 1) // block
    longest = int((lasts - firsts).max())
    found = np.unique(np.concatenate([np.minimum(firsts + i, lasts) for i in range(longest + 1)]))
    return found.tolist()
