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
    """The largest of every rank's values, element by element, on every rank.

    Type: V -> R.

        def pmax(shards):                              rank 0   a        max(a, b)
            whole = torch.stack(shards).amax(0)         rank 1   b   ->   max(a, b)
            return [whole] * len(shards)

    Args:
        x: a pytree of tensors of numbers.
        axis_name: a mesh axis, or a tuple of several.

    Returns:
        the tree of the largest, of the same shapes and dtypes.

    Raises:
        TraceError, MeshError, InputError: as `psum`.
        SpecError: of a sum that is still owed along the axis.

    Gradient: to the ranks that hold the largest, in equal shares, as that of `torch.amax`; one `psum` counts them.
    Bytes: as `psum`.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> most = px.shard_map(lambda x: px.pmax(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> px.device_get(most(torch.tensor([1.0, 2.0, 3.0, 4.0])))
    tensor([3., 4.])
    """
    return _extreme("pmax", "max", x, axis_name)


def pmin(x: Any, axis_name: AxisName) -> Any:
    """The smallest of every rank's values, element by element, on every rank.

    Type: V -> R.

        def pmin(shards):                              rank 0   a        min(a, b)
            whole = torch.stack(shards).amin(0)         rank 1   b   ->   min(a, b)
            return [whole] * len(shards)

    Args:
        x: a pytree of tensors of numbers.
        axis_name: a mesh axis, or a tuple of several.

    Returns:
        the tree of the smallest, of the same shapes and dtypes.

    Raises:
        TraceError, MeshError, InputError: as `psum`.
        SpecError: of a sum that is still owed along the axis.

    Gradient: to the ranks that hold the smallest, in equal shares, as that of `torch.amin`; one `psum` counts them.
    Bytes: as `psum`.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> most = px.shard_map(lambda x: px.pmin(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> px.device_get(most(torch.tensor([1.0, 2.0, 3.0, 4.0])))
    tensor([1., 2.])
    """
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
    def forward(ctx: Any, x: Any, op: str, region: Region, axes: tuple[str, ...], reason: str, source: str) -> Any:
        ctx.region, ctx.axes, ctx.reason, ctx.source = region, axes, reason, source
        local = x._local_tensor
        with tc.DisableTorchFunction(), region.trace.marked(asked=True, reason=reason, source=source):
            for axis in axes:
                local = wire.all_reduce(region, local, axis, op)
            local = local.view_as(local) if local is x._local_tensor else local
        placements = Sum(axes, region.check).after(region, relation(x))
        ctx.save_for_backward(x)
        # Its tensor alone: torch gives a saved result back wrapped twice.
        ctx.out = local, placements
        return like_per_shard(local, region.device_mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        region, axes, reason = ctx.region, ctx.axes, f"gradient of {ctx.reason}"
        with tc.DisableTorchFunction():
            out = like_per_shard(ctx.out[0], region.device_mesh, ctx.out[1])
            holds = (x.detach() == out).to(grad.dtype)
            ties = apply(Sum(axes), holds, region, reason, ctx.source)
            share = varying(grad / ties, region, axes, ctx.source) * holds
        return share, None, None, None, None, None
