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
    region, axes, source = open_call("axis_index", axis_name)
    with tc.DisableTorchFunction(), region.trace.marked(source=source):
        place = wire.own_index(region, axes[0])
        for axis in axes[1:]:
            place = place * region.sizes[axis] + wire.own_index(region, axis)
    placements = tuple(Varying() if axis in axes else Replicate() for axis in region.axis_names)
    return like_per_shard(place, region.device_mesh, placements)


def axis_size(axis_name: AxisName) -> int:
    region, axes, _ = open_call("axis_size", axis_name)
    return region.size(axes)
