"""Which elements of a global array a block holds, cut into segments that fit in a cache.

In: a global shape and the block's start and size. Out: segments, each a few equally long runs of consecutive global
linear indices, in the block's own row-major order. Nothing here is as large as the block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

__all__ = ["Layout", "Segment", "layout", "segments"]


class Layout(NamedTuple):
    """A block as runs of `length` consecutive linear indices: one run for each index of `outer`, from `base` on.

    Attributes:
        base: linear index of the block's first element.
        outer: (size, stride) of each dim that steps from run to run, major to minor.
        length: elements of a run.
    """

    base: int
    outer: tuple[tuple[int, int], ...]
    length: int

    @property
    def rows(self) -> int:
        """The number of runs."""
        return math.prod(n for n, _ in self.outer)


class Segment(NamedTuple):
    """Some runs of a block.

    Attributes:
        position: where the segment begins in the flattened block.
        first: linear index of its first element.
        length: elements of a run.
        starts: linear index of each run's first element, int64[runs]; None for a single run.
        step: a number that divides the distance between any two runs' starts; 0 for a single run.
    """

    position: int
    first: int
    length: int
    starts: torch.Tensor | None = None
    step: int = 0

    @property
    def runs(self) -> int:
        """The number of runs."""
        return 1 if self.starts is None else len(self.starts)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.runs * self.length


def layout(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Layout:
    """The runs of the block [start, start + size) of an array of `shape`.

    >>> layout((4, 6), (1, 0), (2, 6))
    Layout(base=6, outer=(), length=12)
    >>> layout((4, 6), (1, 2), (2, 3))
    Layout(base=8, outer=((2, 6),), length=3)
    """
    base, length, stride, whole = 0, 1, 1, True
    outer: list[tuple[int, int]] = []
    for full, first, n in zip(reversed(shape), reversed(start), reversed(size)):
        base += first * stride
        if whole:
            length, whole = n * stride, n == full
        elif n != 1:
            outer.append((n, stride))
        stride *= full
    return Layout(base, tuple(reversed(outer)), length)


def segments(runs: Layout, limit: int, device: torch.device) -> Iterator[Segment]:
    """Cuts a block into segments of at most `limit` elements."""
    rows, length = runs.rows, runs.length
    if rows * length == 0:
        return
    if rows == 1 or length * 2 > limit:
        for row in range(rows):
            for first in range(0, length, limit):
                yield Segment(row * length + first, _row_start(runs, row) + first, min(limit, length - first))
        return
    group = limit // length
    step = math.gcd(*(stride for _, stride in runs.outer))
    for row in range(0, rows, group):
        index = torch.arange(row, min(row + group, rows), dtype=torch.int64, device=device)
        yield Segment(row * length, _row_start(runs, row), length, _row_starts(runs, index), step)


def _row_start(runs: Layout, row: int) -> int:
    start = runs.base
    for n, stride in reversed(runs.outer):
        row, i = divmod(row, n)
        start += i * stride
    return start


def _row_starts(runs: Layout, row: torch.Tensor) -> torch.Tensor:
    start = torch.full_like(row, runs.base)
    for n, stride in reversed(runs.outer):
        start += row.remainder(n) * stride
        row = row.div(n, rounding_mode="floor")
    return start
