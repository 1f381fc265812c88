"""Which rank writes which part of each tensor.

Every rank works the plan out for itself, from what all of them know. A part that several ranks hold is shared among
them: a large one is cut, a small one goes to the rank that has least to write so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ptrainx.checkpoint.boxes import Box, cut
from ptrainx.checkpoint.dtypes import DTYPES
from ptrainx.checkpoint.values import Source

__all__ = ["WORTH_CUTTING", "Task", "plan"]

WORTH_CUTTING = 1 << 20
"""Bytes below which a part is not cut further."""


class Task(NamedTuple):
    """A part of a tensor for a rank to write: which tensor, which part."""

    tensor: int
    box: Box


def plan(sources: Sequence[Source], size: int) -> list[list[Task]]:
    """What each of `size` ranks writes, each part once, in the order in which it stands in the rank's file.

    Dtypes with large elements come first, so that every tensor is aligned to its elements.
    """
    load = [0] * size
    tasks: list[list[Task]] = [[] for _ in range(size)]
    for index, source in enumerate(sources):
        itemsize = DTYPES[source.dtype].itemsize
        for box, ranks in source.holders.items():
            parts = cut(box, max(1, min(len(ranks), box.size * itemsize // WORTH_CUTTING)))
            for part, rank in zip(parts, sorted(ranks, key=lambda rank: (load[rank], rank))):
                tasks[rank].append(Task(index, part))
                load[rank] += part.size * itemsize
    for own in tasks:
        own.sort(key=lambda task: -DTYPES[sources[task.tensor].dtype].itemsize)
    return tasks
