"""`all_to_all`: each rank's value in blocks, one for every rank."""

from __future__ import annotations

from typing import Any

from ptrainx.ops.collectives.call import AxisName, dim_of, divided, map_leaves, open_call, refuse_owed
from ptrainx.ops.collectives.linear import AllToAll, apply, varying

__all__ = ["all_to_all"]


def all_to_all(x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Any:
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
