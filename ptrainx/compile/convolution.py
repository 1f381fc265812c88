"""Convolutions of global values: rows of the batch are independent, everything else is gathered.

torch's own form over DTensors is for images split along their width; it asks the world's process groups, which a trace
has none of.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import TraceContext
from ptrainx.mesh.placement import contiguous_strides

__all__ = ["CONVOLUTIONS", "convolve"]

CONVOLUTIONS = {torch.ops.aten.convolution.default: 1, torch.ops.aten.convolution_backward.default: 2}
"""Operator -> how many of its first arguments have rows of the batch."""


def convolve(func: Any, args: tuple, trace: TraceContext) -> Any:
    """A convolution or its gradient; gradients of weight and bias owe a sum over the axes that split the batch."""
    batched = CONVOLUTIONS[func]
    first: Any = args[batched - 1]
    mesh, ndim = first.device_mesh, first.device_mesh.ndim
    split = [i for i in range(ndim) if first.placements[i].is_shard(0)]
    parts = math.prod(mesh.size(i) for i in split)
    if first.shape[0] % parts:
        split, parts = [], 1
    rows = tuple(Shard(0) if i in split else Replicate() for i in range(ndim))
    whole = (Replicate(),) * ndim
    owed = tuple(Partial("sum") if i in split else Replicate() for i in range(ndim))
    with trace.marked(asked=False, reason=f"operands of {func}"):
        moved = [_local(x, rows if i < batched else whole) if isinstance(x, DTensor) else x for i, x in enumerate(args)]
    out = func(*moved)

    def wrap(x: torch.Tensor | None, placements: tuple) -> Any:
        if x is None:
            return None
        shape = torch.Size((x.shape[0] * parts, *x.shape[1:])) if placements is rows else x.shape
        return tc.wrap_local(x, tc.make_spec(mesh, placements, shape, contiguous_strides(shape), x.dtype))

    if isinstance(out, torch.Tensor):
        return wrap(out, rows)
    return tuple(wrap(x, placements) for x, placements in zip(out, (rows, owed, owed)))


def _local(x: DTensor, placements: tuple) -> torch.Tensor:
    # Where nothing moves, `redistribute` writes its argument's metadata in place.
    return (x if tuple(x.placements) == placements else x.redistribute(x.device_mesh, placements))._local_tensor
