"""A copy of what a rank is to write, in memory that is kept for the next copy.

The caller of an asynchronous save waits for this copy and for nothing else. Afterwards the values may be changed,
donated or dropped. There is one buffer, as large as the largest snapshot so far.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ptrainx.checkpoint.boxes import Box
from ptrainx.checkpoint.dtypes import DTYPES, bytes_of
from ptrainx.checkpoint.plan import Task
from ptrainx.checkpoint.values import Contents

__all__ = ["Snapshot", "SnapshotBuffer"]

ALIGNED = 64
"""Every part starts at a multiple of so many bytes."""


class Snapshot:
    """The copied parts of one tree.

    Attributes:
        contents: what the tree holds, without the values.
        tasks: what each rank writes.
    """

    def __init__(self, contents: Contents, tasks: list[list[Task]], parts: dict[tuple[int, Task], torch.Tensor]):
        self.contents, self.tasks = contents, tasks
        self._parts = parts

    def read(self, rank: int, task: Task) -> memoryview:
        """The bytes of a part."""
        return bytes_of(self._parts[rank, task])

    def part(self, rank: int, task: Task) -> torch.Tensor:
        """A part, in the buffer."""
        return self._parts[rank, task]

    def with_contents(self, contents: Contents) -> Snapshot:
        """The same parts, of a tree that holds this."""
        return Snapshot(contents, self.tasks, self._parts)


def _without_values(contents: Contents) -> Contents:
    # What refers to a tensor would keep its memory, or hinder its donation.
    return contents._replace(sources=[dataclasses.replace(source, part=_no_part) for source in contents.sources])


def _no_part(rank: int, box: Box) -> torch.Tensor:
    raise AssertionError("a snapshot has its parts")


class SnapshotBuffer:
    """Memory for one snapshot at a time, used again for the next one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._memory.numel()

    @property
    def address(self) -> int:
        """Where the memory is."""
        return self._memory.data_ptr()

    def take(self, contents: Contents, tasks: list[list[Task]]) -> Snapshot:
        """Copies all that this process is to write; what an earlier `take` returned is overwritten."""
        own = [(rank, task) for rank in contents.writers.mine for task in tasks[rank]]
        sources = [contents.sources[task.tensor] for _, task in own]
        sizes = [task.box.size * DTYPES[source.dtype].itemsize for (_, task), source in zip(own, sources)]
        places, total = [], 0
        for size in sizes:
            places.append(total)
            total += math.ceil(size / ALIGNED) * ALIGNED
        values = [source.part(rank, task.box) for (rank, task), source in zip(own, sources)]
        self._reserve(total, values)
        parts = [
            self._memory[place : place + size].view(value.dtype).view(value.shape)
            for place, size, value in zip(places, sizes, values)
        ]
        with torch.no_grad():
            for part, value in zip(parts, values):
                part.copy_(value, non_blocking=True)
        for device in {value.device for value in values if value.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        return Snapshot(_without_values(contents), tasks, dict(zip(own, parts)))

    def _reserve(self, total: int, values: list[Any]) -> None:
        if self._memory.numel() < total:
            # The old memory goes first, so that there are never two.
            self._memory = torch.empty(0, dtype=torch.uint8)
            pinned = any(value.device.type == "cuda" for value in values)
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
