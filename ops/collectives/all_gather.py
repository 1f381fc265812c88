"""`all_gather`: every rank's value, joined, on every rank."""

from __future__ import annotations

from typing import Any

from ptrainx.ops.collectives.call import AxisName, dim_of, map_leaves, open_call, refuse_owed
from ptrainx.ops.collectives.linear import Gather, apply, varying

__all__ = ["all_gather"]


def all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """Every rank's value, joined, on every rank.

    Type: V -> R. The result counts as the same on every rank (JAX's varies, so that it can't leave with `P()`).

        def all_gather(shards, axis, tiled):                   rank 0   a        [a, b]
            join = torch.cat if tiled else torch.stack         rank 1   b   ->   [a, b]
            return [join(shards, axis)] * len(shards)

    Args:
        x: a pytree of tensors.
        axis_name: a mesh axis, or a tuple of several, major to minor.
        axis: the dim along which they are joined.
        tiled: join along a dim that is there, instead of a new one.

    Returns:
        the tree of joined values.

    Raises:
        TraceError, MeshError: as `psum`.
        InputError: no such dim.
        SpecError: of a sum that is still owed along the axis.

    Gradient: each rank's part of the cotangent. Where the result is used with values that vary, the cotangents are
    summed first; the compiler makes one reduce-scatter of both.
    Bytes: (n - 1) times the value.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> whole = px.shard_map(lambda x: px.all_gather(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> px.device_get(whole(torch.tensor([1.0, 2.0, 3.0, 4.0])))
    tensor([[1., 2.],
            [3., 4.]])
    """
    region, axes, source = open_call("all_gather", axis_name)

    def one(leaf: Any) -> Any:
        refuse_owed("all_gather", leaf, region, axes)
        dim = dim_of("all_gather", "axis", axis, leaf, 0 if tiled else 1)
        leaf = varying(leaf if tiled else leaf.unsqueeze(dim), region, axes, source)
        return apply(Gather(axes, dim, region.check), leaf, region, "px.all_gather", source)

    return map_leaves("all_gather", one, x, region)
