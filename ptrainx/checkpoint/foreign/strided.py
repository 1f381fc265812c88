"""Reading a part of a tensor that lies in a file with strides: the bytes of the part, and next to no others.

In: where the tensor begins, its strides, a box. Out: the box, in a tensor of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ptrainx.checkpoint.boxes import Box
from ptrainx.checkpoint.dtypes import bytes_of

__all__ = ["SPAN", "read_box", "row_major"]

GAP = 1024
"""Bytes between two runs of a part up to which they are read with the runs: to ask for each run would take longer."""
SPAN = 64 << 20
"""Bytes that are held at once of a part that is not read straight to its place."""

ReadInto = Callable[[int, memoryview], None]
"""(offset in the file, what to fill)."""


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def read_box(read_into: ReadInto, begin: int, strides: Sequence[int], box: Box, target: torch.Tensor) -> None:
    """Fills `target` with a box of a tensor in a file.

    Args:
        read_into: reads from the file.
        begin: the byte at which the tensor's first element lies.
        strides: of the tensor, in elements.
        box: which part.
        target: CPU, of the tensor's dtype and the box's shape, any strides.
    """
    if not box.size:
        return
    itemsize = target.dtype.itemsize
    start = begin + sum(o * s for o, s in zip(box.offset, strides)) * itemsize
    wide = [(stride, n) for stride, n in zip(strides, box.shape) if n > 1]
    span = sum(stride * (n - 1) for stride, n in wide) + 1
    straight = [(stride, n) for stride, n in zip(row_major(box.shape), box.shape) if n > 1]
    if wide == straight and target.is_contiguous():
        read_into(start, bytes_of(target))
    elif not wide or (span * itemsize <= SPAN and _widest_gap(wide) * itemsize <= GAP):
        held = torch.empty(span, dtype=target.dtype)
        read_into(start, bytes_of(held))
        target.copy_(held.as_strided(box.shape, strides))
    else:
        dim = max((d for d, n in enumerate(box.shape) if n > 1), key=lambda d: strides[d])
        half = box.shape[dim] // 2
        for first, n in ((0, half), (half, box.shape[dim] - half)):
            offset = tuple(o + first * (d == dim) for d, o in enumerate(box.offset))
            shape = tuple(n if d == dim else m for d, m in enumerate(box.shape))
            read_box(read_into, begin, strides, Box(offset, shape), target.narrow(dim, first, n))


def _widest_gap(wide: Sequence[tuple[int, int]]) -> int:
    """Elements of other parts between two runs, at most; of (stride, how many) a dim."""
    run, gap = 1, 0
    for stride, n in sorted(wide):
        gap = max(gap, stride - run)
        run += stride * (n - 1)
    return gap
