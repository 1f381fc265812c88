"""`rms_norm` and `layer_norm` over the last dim, whichever dims are split.

Rows are independent: split along the batch or the sequence, nothing is sent. Where the normalised dim itself is split,
ranks exchange sums of their parts, one or two numbers a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from ptrainx.mesh.partition_spec import P
from ptrainx.mesh.placement import trace_placements
from ptrainx.ops.collectives import wire
from ptrainx.ops.collectives.region import Region
from ptrainx.ops.constrain import constrain
from ptrainx.ops.parts import Call, local_of, on_parts, open_call, refuse_second_derivative, wrap

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`, over the last dim.

    Args:
        x: [..., D], split along any dims.
        weight: [D].
        eps: is added to the mean square.

    Returns:
        [..., D], where x is.

    Raises:
        GradientError: a second derivative, where D is split.

    Bytes: none; where D is split, an all-reduce of [rows], in the forward and in the backward.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.

    >>> rms_norm(torch.tensor([3.0, 4.0]), eps=0.0)
    tensor([0.8485, 1.1314])
    """
    call = open_call("px.ops.rms_norm", [x])
    placed = None if call is None else _split(x, call)
    if placed is None or call is None:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _scaled(_Normalize.apply(placed, False, eps, call), weight, None, x, call)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, eps: float = 1e-5
) -> torch.Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, over the last dim.

    Args:
        x: [..., D], split along any dims.
        weight: [D].
        bias: [D].
        eps: is added to the variance.

    Returns:
        [..., D], where x is.

    Raises:
        GradientError: a second derivative, where D is split.

    Bytes: none; where D is split, two all-reduces of [rows] in the forward and one of [2, rows] in the backward.

    Source: Ba et al. 2016, https://arxiv.org/abs/1607.06450.

    >>> layer_norm(torch.tensor([1.0, 3.0]), eps=0.0)
    tensor([-1.,  1.])
    """
    call = open_call("px.ops.layer_norm", [x])
    placed = None if call is None else _split(x, call)
    if placed is None or call is None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return _scaled(_Normalize.apply(placed, True, eps, call), weight, bias, x, call)


def _split(x: Any, call: Call) -> Any:
    """The value with sums paid, if its last dim is split; else None."""
    value = call.trace.as_global(x)
    if Shard(x.ndim - 1) not in value.placements:
        return None
    kept = [p if isinstance(p, Shard) else Replicate() for p in value.placements]
    with call.marked(False, "x"):
        return value if kept == list(value.placements) else constrain(x, value, kept, call.trace, f"{call.label}: x")


def _scaled(out: Any, weight: Any, bias: Any, x: torch.Tensor, call: Call) -> Any:
    axes = tuple(name for name, p in zip(call.trace.mesh.axis_names, out.placements) if p == Shard(x.ndim - 1))
    wanted = list(trace_placements(P(axes), call.trace.mesh))

    def placed(value: Any) -> Any:
        own = call.trace.as_global(value)
        with call.marked(True, "parameters"):
            return own if list(own.placements) == wanted else constrain(value, own, wanted, call.trace, call.label)

    out = out if weight is None else out * placed(weight)
    return (out if bias is None else out + placed(bias)).to(x.dtype)


class _Normalize(torch.autograd.Function):
    """A value whose last dim is split, with mean square 1 over it, and mean 0 if it is centred; in float32 at least.

    With y the result and r the factor, the gradient is r (g - mean(g y) y), less r mean(g) if it is centred.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, centred: bool, eps: float, call: Call) -> Any:
        ctx.call, ctx.centred, ctx.placements, ctx.shape, ctx.dtype = call, centred, x.placements, x.shape, x.dtype
        ctx.save_for_backward(x)  # so that a second derivative is known
        ctx.region = Region(call.trace, call.label, True)
        ctx.axes = [n for n, p in zip(ctx.region.axis_names, x.placements) if p == Shard(x.ndim - 1)]
        with on_parts(call):
            own = local_of(x).to(torch.promote_types(x.dtype, torch.float32))
            if centred:
                own = own - _mean(ctx, own)
            ctx.factor = (_mean(ctx, own * own) + eps).rsqrt()
            ctx.out = own * ctx.factor
            return wrap(ctx.out, x.device_mesh, x.placements, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        call = ctx.call
        refuse_second_derivative([grad, *ctx.saved_tensors], call.label, call.source)
        if tuple(grad.placements) != tuple(ctx.placements):
            with call.marked(True, "gradient of the result"):
                grad = grad.redistribute(grad.device_mesh, ctx.placements)
        with on_parts(call):
            own, out = local_of(grad), ctx.out
            if ctx.centred:
                along, level = _mean(ctx, torch.stack([own * out, own])).unbind(0)
                own = own - level
            else:
                along = _mean(ctx, own * out)
            result = ((own - along * out) * ctx.factor).to(ctx.dtype)
            return wrap(result, grad.device_mesh, ctx.placements, ctx.shape), None, None, None


def _mean(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    """The mean over the last dim of all ranks' parts, kept as a dim."""
    total = x.sum(-1, keepdim=True)
    for axis in ctx.axes:
        with ctx.call.marked(True, "sums of the rows"):
            total = wire.all_reduce(ctx.region, total, axis, "sum")
    return total / ctx.shape[-1]
