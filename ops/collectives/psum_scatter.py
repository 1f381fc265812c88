"""`psum_scatter`: the sum over the ranks, of which each keeps a part."""

from __future__ import annotations

from typing import Any

from ptrainx.ops.collectives.call import AxisName, dim_of, divided, map_leaves, open_call
from ptrainx.ops.collectives.linear import Scatter, apply, varying

__all__ = ["psum_scatter"]


def psum_scatter(x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """The sum of every rank's value, of which each rank keeps its part.

    Type: V -> V; an owed sum -> V, which pays it.

        def psum_scatter(shards, dim):                         rank 0   [a, b]        a+c
            return sum(shards).chunk(len(shards), dim)         rank 1   [c, d]   ->   b+d

    Args:
        x: a pytree of tensors of numbers.
        axis_name: a mesh axis, or a tuple of several, major to minor.
        scatter_dimension: the dim that is split.
        tiled: keep the dim, divided by the number of ranks; else it has that size, and goes.

    Returns:
        the tree of parts.

    Raises:
        TraceError, MeshError, InputError: as `psum`.
        SpecError: a dim that the number of ranks does not divide.

    Gradient: an `all_gather` of the cotangents.
    Bytes: a reduce-scatter, (n - 1) / n times the value.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> part = px.shard_map(
    ...     lambda x: px.psum_scatter(x, "data", tiled=True), mesh=mesh, in_specs=P(), out_specs=P("data")
    ... )
    >>> px.device_get(part(torch.tensor([1.0, 2.0])))
    tensor([2., 4.])
    """
    region, axes, source = open_call("psum_scatter", axis_name)
    n = region.size(axes)

    def one(leaf: Any) -> Any:
        dim = dim_of("psum_scatter", "scatter_dimension", scatter_dimension, leaf)
        divided("psum_scatter", "scatter_dimension", dim, leaf, n, axes, whole=not tiled)
        out = apply(Scatter(axes, dim), varying(leaf, region, axes, source), region, "px.psum_scatter", source)
        return out if tiled else out.squeeze(dim)

    return map_leaves("psum_scatter", one, x, region, numbers=True)
