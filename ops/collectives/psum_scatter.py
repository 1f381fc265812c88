"""`psum_scatter`: the sum over the ranks, of which each keeps a part."""

from __future__ import annotations

from typing import Any

from ptrainx.ops.collectives.call import AxisName, dim_of, divided, map_leaves, open_call
from ptrainx.ops.collectives.linear import Scatter, apply, varying

__all__ = ["psum_scatter"]


def psum_scatter(x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    region, axes, source = open_call("psum_scatter", axis_name)
    n = region.size(axes)

    def one(leaf: Any) -> Any:
        dim = dim_of("psum_scatter", "scatter_dimension", scatter_dimension, leaf)
        divided("psum_scatter", "scatter_dimension", dim, leaf, n, axes, whole=not tiled)
        out = apply(Scatter(axes, dim), varying(leaf, region, axes, source), region, "px.psum_scatter", source)
        return out if tiled else out.squeeze(dim)

    return map_leaves("psum_scatter", one, x, region, numbers=True)
