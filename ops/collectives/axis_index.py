"""`axis_index` and `axis_size`: where a rank is along an axis, and how many there are."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate

from ptrainx.core import torch_compat as tc
from ptrainx.mesh.per_shard import Varying, like_per_shard
from ptrainx.ops.collectives import wire
from ptrainx.ops.collectives.call import AxisName, open_call

__all__ = ["axis_index", "axis_size"]


def axis_index(axis_name: AxisName) -> Any:
    """This rank's place along an axis, as a value.

    Type: -> V.

        def axis_index(n):                                     rank 0   0
            return [torch.tensor(i) for i in range(n)]         rank 1   1

    Args:
        axis_name: a mesh axis, or a tuple of several: the place counted along them, major to minor.

    Returns:
        int64, 0-d. It has no gradient, and nothing is sent.

    Raises:
        TraceError, MeshError: as `psum`.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> place = px.shard_map(lambda: px.axis_index("data")[None], mesh=mesh, in_specs=(), out_specs=P("data"))
    >>> px.device_get(place())
    tensor([0, 1])
    """
    region, axes, source = open_call("axis_index", axis_name)
    with tc.DisableTorchFunction(), region.trace.marked(source=source):
        place = wire.own_place(region, axes)
    placements = tuple(Varying() if axis in axes else Replicate() for axis in region.axis_names)
    return like_per_shard(place, region.device_mesh, placements)


def axis_size(axis_name: AxisName) -> int:
    """How many ranks there are along an axis, or along several together: a Python int.

    Args:
        axis_name: a mesh axis, or a tuple of several.

    Raises:
        TraceError, MeshError: as `psum`.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> px.shard_map(lambda x: x / px.axis_size("data"), mesh=mesh, in_specs=P(), out_specs=P())(1.0)
    tensor(0.5000)
    """
    region, axes, _ = open_call("axis_size", axis_name)
    return region.size(axes)
