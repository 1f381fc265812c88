"""Attention's CPU kernel: torch 2.13 has a sharding rule for CUDA's flash kernel, not for this one.

Batch (dim 0) and heads (dim 1) are independent in attention, so query, key, value and output may be split along either,
the mask with them where it has the dim; sequence and head dim are gathered. A rule of DTensor's can't say so: it does
not move operands that are passed by keyword, and the mask is one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.core.torch_compat_decomp import run_as
from ptrainx.core.trace_context import current_trace
from ptrainx.mesh.placement import contiguous_strides

__all__ = ["register_attention_rules"]


def register_attention_rules() -> None:
    """Makes DTensor run the forward and the backward kernel on each rank's own batch and heads."""
    aten = torch.ops.aten
    run_as(
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        _split(aten._scaled_dot_product_flash_attention_for_cpu.default, operands=3, query=0),
    )
    run_as(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        _split(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, operands=6, query=1),
    )


def _split(kernel: Any, operands: int, query: int) -> Callable[..., Any]:
    """The kernel on global values; `operands` of its first arguments have a batch and heads, the query among them."""

    def attend(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        mesh = next(x.device_mesh for x in (*args, *kwargs.values()) if isinstance(x, DTensor))
        placements = _placements(args[query : query + 3], mesh)
        parts = {dim: math.prod(mesh.size(i) for i, p in enumerate(placements) if p == Shard(dim)) for dim in (0, 1)}
        trace = current_trace()
        with trace.marked(asked=False, reason=f"operands of {kernel}") if trace else contextlib.nullcontext():
            moved = [_local(x, placements) if i < operands else x for i, x in enumerate(args)]
            named = {k: _local(x, _of_mask(x, placements)) if isinstance(x, DTensor) else x for k, x in kwargs.items()}
        out = kernel(*moved, **named)

        def whole(x: torch.Tensor) -> DTensor:
            shape = (x.shape[0] * parts[0], x.shape[1] * parts[1], *x.shape[2:])
            return tc.wrap_local(x, tc.make_spec(mesh, placements, shape, contiguous_strides(shape), x.dtype))

        return tuple(whole(x) for x in out)

    return attend


def _placements(values: tuple, mesh: Any) -> tuple[Any, ...]:
    """Over each axis the batch or the heads are split if one of query, key and value is, and the axis divides them."""
    chosen: list[Any] = []
    left = {0: values[0].shape[0], 1: values[0].shape[1]}
    for i in range(mesh.ndim):
        found = [x.placements[i] for x in values if isinstance(x, DTensor)]
        split = next((p for p in found if p in (Shard(0), Shard(1)) and left[p.dim] % mesh.size(i) == 0), None)
        if split is not None:
            left[split.dim] //= mesh.size(i)
        chosen.append(split or Replicate())
    return tuple(chosen)


def _of_mask(mask: Any, placements: tuple) -> tuple[Any, ...]:
    return tuple(
        p if isinstance(p, Shard) and mask.ndim == 4 and mask.shape[p.dim] > 1 else Replicate() for p in placements
    )


def _local(x: Any, placements: tuple) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return x
    # Where nothing moves, `redistribute` writes its argument's metadata in place.
    return (x if tuple(x.placements) == placements else x.redistribute(x.device_mesh, placements))._local_tensor
