"""`psum` and `pmean`: sums and means over the ranks along an axis."""

from __future__ import annotations

from typing import Any

from ptrainx.ops.collectives.call import AxisName, map_leaves, open_call
from ptrainx.ops.collectives.linear import Sum, apply, varying

__all__ = ["pmean", "psum"]


def psum(x: Any, axis_name: AxisName) -> Any:
    """The sum of every rank's value, on every rank.

    Type: V -> R; an owed sum (unreduced) -> R, which pays it. A value that is the same on every rank counts n times.

        def psum(shards):                        rank 0   a        a+b
            return [sum(shards)] * len(shards)   rank 1   b   ->   a+b

    Args:
        x: a pytree of tensors of numbers, alike on every rank.
        axis_name: a mesh axis, or a tuple of several.

    Returns:
        the tree of sums, of the same shapes and dtypes.

    Raises:
        TraceError: outside of `px.shard_map`.
        MeshError: an axis that the mesh does not have.
        InputError: booleans.

    Gradient: the cotangent, which is the same on every rank, goes to each rank as it is; nothing is sent.
    Bytes: an all-reduce, 2 (n - 1) / n times the value.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> total = px.shard_map(lambda x: px.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> px.device_get(total(torch.tensor([1.0, 2.0, 3.0, 4.0])))
    tensor([4., 6.])
    """
    region, axes, source = open_call("psum", axis_name)
    return map_leaves("psum", lambda leaf: total(leaf, region, axes, "px.psum", source), x, region, numbers=True)


def total(leaf: Any, region: Any, axes: Any, reason: str, source: str) -> Any:
    """The sum of one per-shard value."""
    leaf = varying(leaf, region, axes, source)
    return apply(Sum(axes, region.check), leaf, region, reason, source)


def pmean(x: Any, axis_name: AxisName) -> Any:
    """The mean of every rank's value, on every rank.

    Type: V -> R; an owed sum -> R, its n-th part.

        def pmean(shards):                                     rank 0   a        (a+b)/2
            return [sum(shards) / len(shards)] * len(shards)   rank 1   b   ->   (a+b)/2

    Args:
        x: a pytree of tensors of numbers; integers become floating-point.
        axis_name: a mesh axis, or a tuple of several.

    Returns:
        the tree of means.

    Raises:
        TraceError, MeshError, InputError: as `psum`.

    Gradient: the n-th part of the cotangent; nothing is sent.
    Bytes: as `psum`.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> mean = px.shard_map(lambda x: px.pmean(x.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> mean(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor(5.)
    """
    region, axes, source = open_call("pmean", axis_name)
    n = region.size(axes)
    return map_leaves("pmean", lambda leaf: total(leaf, region, axes, "px.pmean", source) / n, x, region, numbers=True)
