"""The largest or smallest along dims of a global value, known to every rank as soon as it is computed.

DTensor leaves a maximum over a split dim owed, and the backward, which compares every element with it, would ask for it
again and share out the gradient over ranks in several steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ptrainx.ops.parts import Call

__all__ = ["extreme"]


def extreme(x: DTensor, dims: tuple[int, ...], largest: bool, call: Call) -> Any:
    """The largest (or smallest) over some dims.

    Gradient: in equal shares to the elements that are the extreme, as that of `torch.amax`.
    Bytes: where a dim is split, an all-reduce of the result, and in the backward one that counts equals.
    """
    return _Extreme.apply(x, dims, largest, call)


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, dims: tuple[int, ...], largest: bool, call: Call) -> Any:
        out = _paid(x.amax(dims) if largest else x.amin(dims), call, call.label)
        ctx.dims, ctx.call, ctx.out = dims, call, out.detach()
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors

        def spread(value: Any) -> Any:
            for dim in sorted(ctx.dims):
                value = value.unsqueeze(dim)
            return value

        holds = (x.detach() == spread(ctx.out)).to(grad.dtype)
        equals = _paid(holds.sum(ctx.dims), ctx.call, f"gradient of {ctx.call.label}")
        return spread(grad / equals) * holds, None, None, None


def _paid(value: Any, call: Call, reason: str) -> Any:
    placements = [Replicate() if p.is_partial() else p for p in value.placements]
    if tuple(placements) == tuple(value.placements):
        return value
    with call.trace.marked(asked=True, reason=reason, source=call.source):
        return value.redistribute(value.device_mesh, placements)
