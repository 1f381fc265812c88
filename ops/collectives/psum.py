"""`psum` and `pmean`: sums and means over the ranks along an axis."""

from __future__ import annotations

from typing import Any

from ptrainx.ops.collectives.call import AxisName, map_leaves, open_call
from ptrainx.ops.collectives.linear import Sum, apply, varying

__all__ = ["pmean", "psum"]


def psum(x: Any, axis_name: AxisName) -> Any:
    region, axes, source = open_call("psum", axis_name)
    return map_leaves("psum", lambda leaf: total(leaf, region, axes, "px.psum", source), x, region, numbers=True)


def total(leaf: Any, region: Any, axes: Any, reason: str, source: str) -> Any:
    """The sum of one per-shard value."""
    leaf = varying(leaf, region, axes, source)
    return apply(Sum(axes, region.check), leaf, region, reason, source)


def pmean(x: Any, axis_name: AxisName) -> Any:
    region, axes, source = open_call("pmean", axis_name)
    n = region.size(axes)
    return map_leaves("pmean", lambda leaf: total(leaf, region, axes, "px.pmean", source) / n, x, region, numbers=True)
