"""`all_gather`: every rank's value, joined, on every rank."""

from __future__ import annotations

from typing import Any

from ptrainx.ops.collectives.call import AxisName, dim_of, map_leaves, open_call, refuse_owed
from ptrainx.ops.collectives.linear import Gather, apply, varying

__all__ = ["all_gather"]


def all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    region, axes, source = open_call("all_gather", axis_name)

    def one(leaf: Any) -> Any:
        refuse_owed("all_gather", leaf, region, axes)
        dim = dim_of("all_gather", "axis", axis, leaf, 0 if tiled else 1)
        leaf = varying(leaf if tiled else leaf.unsqueeze(dim), region, axes, source)
        return apply(Gather(axes, dim, region.check), leaf, region, "px.all_gather", source)

    return map_leaves("all_gather", one, x, region)
