"""`pmax` and `pmin`: the largest and the smallest over the ranks along an axis."""

from __future__ import annotations

from typing import Any

import torch

from ptrainx.core import torch_compat as tc
from ptrainx.mesh.per_shard import like_per_shard, relation
from ptrainx.ops.collectives import wire
from ptrainx.ops.collectives.call import AxisName, map_leaves, open_call, refuse_owed
from ptrainx.ops.collectives.linear import Sum, apply, varying
from ptrainx.ops.collectives.region import Region

__all__ = ["pmax", "pmin"]


def pmax(x: Any, axis_name: AxisName) -> Any:
    return _extreme("pmax", "max", x, axis_name)


def pmin(x: Any, axis_name: AxisName) -> Any:
    return _extreme("pmin", "min", x, axis_name)


def _extreme(name: str, op: str, x: Any, axis_name: AxisName) -> Any:
    region, axes, source = open_call(name, axis_name)

    def one(leaf: Any) -> Any:
        refuse_owed(name, leaf, region, axes)
        return _Extreme.apply(varying(leaf, region, axes, source), op, region, axes, f"px.{name}", source)

    return map_leaves(name, one, x, region, numbers=True)


class _Extreme(torch.autograd.Function):
    """The gradient goes to the ranks that hold the extreme, in equal shares, as that of `amax` does."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, op: str, region: Region, axes: tuple[str, ...], reason: str, source: str
    ) -> Any:
        ctx.region, ctx.axes, ctx.reason, ctx.source = region, axes, reason, source
        local = x._local_tensor
        with tc.DisableTorchFunction(), region.trace.marked(asked=True, reason=reason, source=source):
            for axis in axes:
                local = wire.all_reduce(region, local, axis, op)
            local = local.view_as(local) if local is x._local_tensor else local
        after = [Sum(axes, region.check).after(region, relation(x))]
        out = like_per_shard(local, region.device_mesh, *after)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, out = ctx.saved_tensors
        region, axes, reason = ctx.region, ctx.axes, f"gradient of {ctx.reason}"
        with tc.DisableTorchFunction():
            holds = (x.detach() == out.detach()).to(grad.dtype)
            ties = apply(Sum(axes), holds, region, reason, ctx.source)
            share = varying(grad / ties, region, axes, ctx.source) * holds
        return share, None, None, None, None, None
