"""What goes over the wire: each collective on this rank's own tensor, along one axis of a region.

In: local tensors, as a graph is traced of them or as they are. Out: local tensors, contiguous. Along an axis of size 1
nothing is sent. Next stage: `linear`, which knows their transposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ptrainx.core import torch_compat as tc
from ptrainx.ops.collectives.operator import AXIS_INDEX, PPERMUTE
from ptrainx.ops.collectives.region import Region

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "own_index",
    "own_part",
    "own_place",
    "own_start",
    "permute",
    "reduce_scatter",
]

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def all_reduce(region: Region, x: torch.Tensor, axis: str, op: str) -> torch.Tensor:
    """Every rank's x, reduced; on every rank."""
    if region.sizes[axis] == 1:
        return x
    return c10d.wait_tensor.default(c10d.all_reduce.default(x.contiguous(), op, region.group(axis)))


def all_gather(region: Region, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """Every rank's x, joined along a dim in the order of their places; on every rank."""
    n = region.sizes[axis]
    if n == 1:
        return x
    x = x.contiguous()
    whole = c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(x, n, region.group(axis)))
    return whole if dim == 0 else aten.cat.default(aten.split.Tensor(whole, x.shape[0], 0), dim)


def reduce_scatter(region: Region, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """The sum of every rank's x; of that this rank's part along a dim."""
    n = region.sizes[axis]
    if n == 1:
        return x
    if dim:
        x = aten.cat.default(aten.split.Tensor(x, x.shape[dim] // n, dim))
    scattered = c10d.reduce_scatter_tensor.default(x.contiguous(), "sum", n, region.group(axis))
    return c10d.wait_tensor.default(scattered)


def all_to_all(region: Region, x: torch.Tensor, axis: str, split: int, concat: int) -> torch.Tensor:
    """Block j of x along the dim `split` goes to rank j; the blocks that come are joined along `concat`."""
    n = region.sizes[axis]
    if n == 1:
        return x
    rows = x.unflatten(split, (n, x.shape[split] // n)).movedim(split, 0).contiguous()
    blocks = rows.flatten(0, 1) if rows.ndim > 2 else rows.reshape(-1)
    step = blocks.shape[0] // n
    sizes = [step] * n
    came = c10d.wait_tensor.default(c10d.all_to_all_single.default(blocks, sizes, sizes, region.group(axis)))
    return came.view(rows.shape).movedim(0, concat).flatten(concat, concat + 1).contiguous()


def permute(region: Region, x: torch.Tensor, axes: Sequence[str], sources: Sequence[int]) -> torch.Tensor:
    """The x of member `sources[j]` of the group over some axes, on member j; zeros where that is -1."""
    if region.size(axes) == 1 and sources[0] == 0:
        return x
    return c10d.wait_tensor.default(PPERMUTE(x.contiguous(), list(sources), region.group_over(axes)))


def own_part(region: Region, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """This rank's part, along a dim, of an x that every rank has."""
    n = region.sizes[axis]
    if n == 1:
        return x
    with region.trace.marked(cut=axis):
        parts = aten.split.Tensor(x, x.shape[dim] // n, dim)
        place = region.places(axis)
        if isinstance(place, int):
            return parts[place].contiguous()
        return tc.LocalTensor({rank: _on(parts[i], rank).contiguous() for rank, i in place.items()})


def own_index(region: Region, axis: str) -> torch.Tensor:
    """This rank's place along an axis, 0-d."""
    place = region.places(axis)
    if isinstance(place, int):
        return AXIS_INDEX(place, axis, region.device)
    with tc.no_dispatch_modes():
        return tc.LocalTensor({rank: torch.tensor(i) for rank, i in place.items()})


def own_start(region: Region, axes: Sequence[str], size: int) -> torch.Tensor:
    """Where this rank's part of a dim begins, 0-d: a dim of this size, which the axes cut in chunks rounded up."""
    size = -(-size // region.sizes[axes[0]])
    start = own_index(region, axes[0]) * size
    for axis in axes[1:]:
        size = -(-size // region.sizes[axis])
        start = start + own_index(region, axis) * size
    return start


def own_place(region: Region, axes: Sequence[str]) -> torch.Tensor:
    """This rank's place along some axes together, the first of them major, 0-d."""
    place = own_index(region, axes[0])
    for axis in axes[1:]:
        place = place * region.sizes[axis] + own_index(region, axis)
    return place


def _on(value: Any, rank: int) -> torch.Tensor:
    return value._local_tensors[rank] if isinstance(value, tc.LocalTensor) else value
