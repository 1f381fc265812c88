"""The body of a `shard_map` while it runs, and what goes into it and comes out of it.

A `Region` stands in the running trace. Global values enter as per-shard ones (`to_shard`), per-shard values leave as
global ones (`to_global`); both are differentiable, and send nothing. Next stage: `wire`, which sends along axes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import GradientError, TraceError
from ptrainx.core.trace_context import TraceContext, user_source
from ptrainx.mesh.axes import join_axes
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.partition_spec import PartitionSpec
from ptrainx.mesh.per_shard import Varying, like_per_shard, per_shard_mesh
from ptrainx.mesh.placement import contiguous_strides, spec_of_placements
from ptrainx.mesh.virtual import VirtualDeviceMesh

__all__ = ["Region", "of_cotangent"]

Placements = tuple[Placement, ...]


class Region:
    """One call of a `shard_map`ped function.

    Args:
        trace: the running trace.
        name: of the function.
        check: whether collectives that make ranks agree give values that count as the same on every rank.

    Attributes:
        view: the torch mesh of the values around the body.
        device_mesh: the mesh of the per-shard values inside.
        device: where they are.
        given: identity of a storage -> how the argument is called that lives there.
    """

    def __init__(self, trace: TraceContext, name: str, check: bool):
        self.trace, self.name, self.check = trace, name, check
        self.view: Any = trace.view
        self.axis_names: tuple[str, ...] = trace.mesh.axis_names
        self.sizes: dict[str, int] = trace.mesh.shape
        self.device_mesh = per_shard_mesh(trace.view)
        self.device = trace.mesh.device if isinstance(trace.mesh, Mesh) else torch.device("cpu")
        self.given: dict[int, str] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the values of the trace are per-shard ones."""
        trace = self.trace
        trace.region, trace.view = self, self.device_mesh
        try:
            yield
        finally:
            trace.region, trace.view = None, self.view

    def size(self, axes: Sequence[str]) -> int:
        """How many ranks there are along some axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def dims(self, axes: Sequence[str]) -> list[int]:
        """The mesh dims of some axes."""
        return [self.axis_names.index(axis) for axis in axes]

    def group(self, axis: str) -> str:
        """The name of the process group along an axis."""
        dim = self.axis_names.index(axis)
        if isinstance(self.view, VirtualDeviceMesh):
            return self.view._dim_group_names[dim]
        name: str = self.view.get_group(dim).group_name
        return name

    def group_over(self, axes: Sequence[str]) -> str:
        """The name of the group over several axes, which are in mesh order."""
        if len(axes) == 1:
            return self.group(axes[0])
        if isinstance(self.trace.mesh, Mesh) and not isinstance(self.view, VirtualDeviceMesh):
            joint: str = self.trace.mesh.group_over(tuple(axes)).group_name
            return joint
        name = "*".join(map(self.group, axes))
        self.trace.joint_groups[name] = join_axes(axes)
        return name

    def places(self, axis: str) -> int | dict[int, int]:
        """The running rank's place along an axis; of simulated ranks that run together, each one's."""
        dim = self.axis_names.index(axis)
        if tc.enabled_local_tensor_mode() is not None:
            mesh = self.trace.mesh
            return {rank: mesh.rank_coords(rank)[dim] for rank in mesh.ranks}
        return int(self.view.get_coordinate()[dim])

    def close_over(self, value: DTensor) -> Any:
        """A value of the step around the body, which uses it without being given it.

        Raises:
            TraceError: it is not the same on every rank.
        """
        if not all(placement.is_replicate() for placement in value.placements):
            spec = spec_of_placements(value.placements, self.axis_names, value.ndim)
            raise TraceError(
                f"{self.name} uses a value from around it that is not replicated",
                got=f"shape {tuple(value.shape)} at {spec}",
                expected="P()",
                fix=f"pass it as an argument, with {spec} in in_specs",
                source=user_source(),
            )
        return self.to_shard(value, (Replicate(),) * len(self.axis_names))

    def to_shard(self, value: Any, placements: Placements) -> Any:
        """A global value as a per-shard one; nothing is sent."""
        return _ToShard.apply(value, self, placements)

    def to_global(self, value: Any, placements: Placements, shape: Sequence[int]) -> Any:
        """A per-shard value as a global one of this shape; nothing is sent."""
        return _ToGlobal.apply(value, self, placements, tuple(shape))

    def relations(self, spec: PartitionSpec) -> Placements:
        """How the ranks' parts of a value at a spec are related."""
        return tuple(
            Varying() if spec.dim_of(axis) is not None else Partial("sum") if axis in spec.unreduced else Replicate()
            for axis in self.axis_names
        )


def of_cotangent(placements: Sequence[Placement]) -> Placements:
    """Where the cotangent of a value lives: as the value; that of a sum which is owed is the same for every addend."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


class _ToShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, region: Region, placements: Placements) -> Any:
        ctx.region, ctx.placements = region, placements
        ctx.before, ctx.shape = tuple(value.placements), tuple(value.shape)
        return like_per_shard(value._local_tensor, region.device_mesh, placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        for axis, own, expected in zip(ctx.region.axis_names, grad.placements, ctx.placements):
            if expected.is_replicate() and not own.is_replicate():
                raise GradientError(
                    f"{ctx.region.name}: the gradient of an argument that is the same along {axis!r} varies along it",
                    fix="an autograd.Function of your own has to sum it over the axis: px.psum",
                )
        return _ToGlobal.apply(grad, ctx.region, of_cotangent(ctx.before), ctx.shape), None, None


class _ToGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, region: Region, placements: Placements, shape: tuple[int, ...]) -> Any:
        ctx.region, ctx.before = region, of_cotangent(value.placements)
        ctx.placements = of_cotangent(placements)
        with tc.DisableTorchFunction():
            local = value._local_tensor.contiguous()
        return tc.wrap_local(
            local, tc.make_spec(region.view, placements, shape, contiguous_strides(shape), local.dtype)
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        region = ctx.region
        if tuple(grad.placements) != ctx.placements:
            with region.trace.marked(asked=True, reason=f"gradient of {region.name}'s result"):
                grad = grad.redistribute(region.view, ctx.placements)
        return _ToShard.apply(grad, region, ctx.before), None, None, None
