"""Boxes: rectangular parts of a tensor. Which of them a rank holds, how they are cut, whether they tile a whole.

In: shapes and DTensor placements. Out: boxes in global indices, with where each lies in the rank's local tensor.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.distributed.tensor import Shard

from ptrainx.core import torch_compat as tc

__all__ = ["Box", "Piece", "coords_of", "cut", "inside", "local_shape", "meet", "pieces", "tiling_problem", "whole"]

Run = tuple[int, int]
"""(first index, how many)."""


class Box(NamedTuple):
    """A rectangular part of a tensor: where it starts and how large it is, one int a dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"[{','.join(f'{o}:{o + n}' for o, n in zip(self.offset, self.shape))}]"


class Piece(NamedTuple):
    """A box of the global value, and the index in the local tensor at which it starts."""

    box: Box
    local: tuple[int, ...]


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def meet(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None if nothing.

    >>> print(meet(Box((0, 0), (2, 4)), Box((1, 1), (4, 2))))
    [1:2,1:3]
    """
    offset = tuple(map(max, a.offset, b.offset))
    ends = [min(i + m, j + n) for i, m, j, n in zip(*a, *b)]
    shape = tuple(end - start for start, end in zip(offset, ends))
    return Box(offset, shape) if all(n > 0 for n in shape) else None


def inside(box: Box, start: Sequence[int], at: Sequence[int] | None = None) -> tuple[slice, ...]:
    """The slices of a box within a tensor whose first element is the global index `start`, shifted by `at`."""
    shift = at or (0,) * len(start)
    return tuple(slice(o - s + a, o - s + a + n) for o, n, s, a in zip(*box, start, shift))


def cut(box: Box, parts: int) -> list[Box]:
    """A box in at most so many parts, along its first dim that has more than one index: rows stay together.

    >>> [str(part) for part in cut(Box((2, 0), (3, 4)), 2)]
    ['[2:4,0:4]', '[4:5,0:4]']
    """
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None or parts < 2:
        return [box]
    return [
        Box(_with(box.offset, dim, start), _with(box.shape, dim, size))
        for start, size in _chunks([(box.offset[dim], box.shape[dim])], min(parts, box.shape[dim]))
    ]


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _chunks(runs: list[Run], parts: int) -> list[Run]:
    """One run in parts, as `torch.chunk` makes them: equal ones but for the last, some of them missing."""
    return [run for i in range(parts) for run in _chunk(runs, parts, i)]


def _chunk(runs: list[Run], parts: int, index: int) -> list[Run]:
    """Chunk `index` of indices that are given as runs."""
    total = sum(n for _, n in runs)
    step = -(-total // parts)
    first, last = min(index * step, total), min((index + 1) * step, total)
    found, before = [], 0
    for start, n in runs:
        low, high = max(first - before, 0), min(last - before, n)
        if low < high:
            found.append((start + low, high - low))
        before += n
    return found


@functools.lru_cache(8192)
def pieces(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh_shape: tuple[int, ...], coords: tuple[int, ...]
) -> tuple[Piece, ...]:
    """The pieces of a value that the rank at these mesh coordinates holds; several only where shards are strided.

    Args:
        shape: of the global value.
        placements: DTensor placements, one a mesh axis; uneven shards are as `torch.chunk` makes them.
        mesh_shape: sizes of the mesh axes.
        coords: of the rank.
    """
    found = []
    for runs_at in itertools.product(
        *(list(zip(runs, _starts(runs))) for runs in _runs(shape, placements, mesh_shape, coords))
    ):
        box = Box(tuple(start for (start, _), _ in runs_at), tuple(n for (_, n), _ in runs_at))
        found.append(Piece(box, tuple(local for _, local in runs_at)))
    return tuple(found)


def local_shape(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh_shape: tuple[int, ...], coords: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape of the local tensor of the rank at these mesh coordinates; arguments as for `pieces`."""
    return tuple(sum(n for _, n in runs) for runs in _runs(shape, placements, mesh_shape, coords))


def coords_of(position: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of a place in a mesh, counted along its axes, major to minor."""
    coords = []
    for n in reversed(mesh_shape):
        position, c = divmod(position, n)
        coords.append(c)
    return tuple(reversed(coords))


def _runs(
    shape: tuple[int, ...], placements: tuple[Any, ...], mesh_shape: tuple[int, ...], coords: tuple[int, ...]
) -> list[list[Run]]:
    """Per dim, the global indices that a rank holds."""
    dims: list[list[Run]] = [[(0, n)] if n else [] for n in shape]
    for placement, parts, index in zip(placements, mesh_shape, coords):
        if tc.is_strided_shard(placement):
            # First into `split_factor` pieces, of which each rank has its part of every one.
            runs, factor = dims[placement.dim], int(placement.split_factor)
            split = [_chunk(_chunk(runs, factor, i), parts, index) for i in range(factor)]
            dims[placement.dim] = _joined([run for part in split for run in part])
        elif isinstance(placement, Shard):
            dims[placement.dim] = _chunk(dims[placement.dim], parts, index)
    return dims


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, n in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + n)
        else:
            joined.append((start, n))
    return joined


def _starts(runs: list[Run]) -> list[int]:
    return list(itertools.accumulate((n for _, n in runs[:-1]), initial=0)) if runs else []


def tiling_problem(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """What is wrong with boxes that should cover a tensor exactly once; None if they do.

    >>> tiling_problem((4,), [Box((0,), (2,)), Box((3,), (1,))])
    '3 of 4 elements are covered'
    """
    boxes = list(boxes)
    for box in boxes:
        if len(box.shape) != len(shape) or any(o < 0 or n < 1 or o + n > s for o, n, s in zip(*box, shape)):
            return f"{box} does not lie within {list(shape)}"
    covered, size = sum(box.size for box in boxes), math.prod(shape)
    if covered != size:
        return f"{covered} of {size} elements are covered"
    if not boxes or _are_cells(shape, boxes):
        return None
    return _overlap(boxes)


def _are_cells(shape: Sequence[int], boxes: list[Box]) -> bool:
    """Whether the boxes are distinct cells of one grid: the usual case, seen in time linear in their number."""
    if len({box.offset for box in boxes}) < len(boxes):
        return False
    marks = [sorted({box.offset[d] for box in boxes} | {n}) for d, n in enumerate(shape)]
    nexts = [dict(itertools.pairwise(line)) for line in marks]
    return all(line.get(o) == o + n for box in boxes for o, n, line in zip(*box, nexts))


PAIRS = 5_000_000
"""Comparisons that an irregular tiling may cost."""


def _overlap(boxes: list[Box]) -> str | None:
    dim = max(range(len(boxes[0].shape)), key=lambda d: len({box.offset[d] for box in boxes}))
    boxes = sorted(boxes, key=lambda box: box.offset[dim])
    starts = [box.offset[dim] for box in boxes]
    ends = [bisect.bisect_left(starts, box.offset[dim] + box.shape[dim]) for box in boxes]
    if sum(end - i for i, end in enumerate(ends)) > PAIRS:
        return f"{len(boxes)} boxes are too irregular to be compared"
    for i, end in enumerate(ends):
        for other in boxes[i + 1 : end]:
            if meet(boxes[i], other) is not None:
                return f"{boxes[i]} and {other} overlap"
    return None
