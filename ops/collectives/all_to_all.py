"""`all_to_all`: each rank's value in blocks, one for every rank."""

from __future__ import annotations

from typing import Any

from ptrainx.ops.collectives.call import AxisName, dim_of, divided, map_leaves, open_call, refuse_owed
from ptrainx.ops.collectives.linear import AllToAll, apply, varying

__all__ = ["all_to_all"]


def all_to_all(x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Any:
    """Block j of each rank's value goes to rank j; the blocks that come are joined.

    Type: V -> V.

        def all_to_all(shards, split, concat):                           rank 0   [a, b]        [a, c]
            blocks = [x.chunk(len(shards), split) for x in shards]       rank 1   [c, d]   ->   [b, d]
            return [torch.cat(came, concat) for came in zip(*blocks)]

    Args:
        x: a pytree of tensors.
        axis_name: a mesh axis, or a tuple of several, major to minor.
        split_axis: the dim that is cut into blocks.
        concat_axis: the dim along which they are joined.
        tiled: both dims stay, one divided, the other multiplied by the number of ranks; else `split_axis` has that size
            and goes, and the blocks are stacked along a new dim `concat_axis`.

    Returns:
        the tree of joined blocks.

    Raises:
        TraceError, MeshError, InputError: as `all_gather`.
        SpecError: a dim that the number of ranks does not divide; a sum that is still owed along the axis.

    Gradient: an `all_to_all` the other way.
    Bytes: (n - 1) / n times the value.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> swap = px.shard_map(
    ...     lambda x: px.all_to_all(x, "data", 0, 0, tiled=True), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    ... )
    >>> px.device_get(swap(torch.tensor([1.0, 2.0, 3.0, 4.0])))
    tensor([1., 3., 2., 4.])
    """
    region, axes, source = open_call("all_to_all", axis_name)
    n = region.size(axes)

    def one(leaf: Any) -> Any:
        refuse_owed("all_to_all", leaf, region, axes)
        split = dim_of("all_to_all", "split_axis", split_axis, leaf)
        concat = dim_of("all_to_all", "concat_axis", concat_axis, leaf)
        divided("all_to_all", "split_axis", split, leaf, n, axes, whole=not tiled)
        if not tiled:
            # The dim that is split away comes back as the new one, after the others.
            leaf = leaf.movedim(split, concat)
            split = concat
        leaf = varying(leaf, region, axes, source)
        return apply(AllToAll(axes, split, concat), leaf, region, "px.all_to_all", source)

    return map_leaves("all_to_all", one, x, region)
