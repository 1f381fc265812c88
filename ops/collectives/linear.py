"""The linear collectives, each with its transpose, as differentiable functions of per-shard values.

    map                  along its axes         transpose
    Sum                  V or U -> R            Cast: R -> V (R for a value that is owed)
    Cast                 R -> V                 Sum
    Cast                 V -> U                 Cast: R -> V
    Gather               V -> R                 Part
    Gather (varying)     V -> V                 Scatter
    Part                 R -> V                 Gather
    Scatter              V or U -> V            Gather
    AllToAll             V -> V                 AllToAll, dims swapped
    Permute              V -> V                 Permute, the other way
    Claim                V -> R                 Cast of the n-th part

R is the same on every rank, V varies, U is an addend of a sum that is owed. A map is a frozen dataclass; `apply` makes
it a step of autograd whose backward applies the transpose in the same way, so that it can be differentiated again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import Partial, Placement, Replicate

from ptrainx.core import torch_compat as tc
from ptrainx.mesh.per_shard import Varying, like_per_shard, relation
from ptrainx.ops.collectives import wire
from ptrainx.ops.collectives.region import Region, of_cotangent

__all__ = [
    "AllToAll",
    "Cast",
    "Claim",
    "Gather",
    "Linear",
    "Part",
    "Permute",
    "Scatter",
    "Sum",
    "apply",
    "unreduced",
    "varying",
]

Placements = tuple[Placement, ...]
Axes = tuple[str, ...]


class Linear(Protocol):
    """A linear map of per-shard values along some axes."""

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        """The map on this rank's tensor."""

    def after(self, region: Region, before: Placements) -> Placements:
        """How the results are related."""

    def transposed(self, region: Region, before: Placements) -> Linear:
        """The map of cotangents, for an operand that was related so."""


def apply(linear: Linear, x: Any, region: Region, reason: str, source: str) -> Any:
    """A linear map of a per-shard value.

    Args:
        linear: the map.
        x: the value.
        region: whose value it is.
        reason: what the communication is for, as `comms()` tells it.
        source: `file:line` of the user's code.
    """
    return _Apply.apply(x, linear, region, reason, source)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, linear: Linear, region: Region, reason: str, source: str) -> Any:
        before = relation(x)
        ctx.linear, ctx.region, ctx.reason, ctx.source = linear, region, reason, source
        ctx.before = before
        local = x._local_tensor
        # These are local tensors, which user code's mode would take for global values.
        with tc.DisableTorchFunction(), region.trace.marked(asked=True, reason=reason, source=source):
            out = linear.run(region, local)
            out = out.view_as(out) if out is local else out
        return like_per_shard(out, region.device_mesh, linear.after(region, before))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        transposed = ctx.linear.transposed(ctx.region, ctx.before)
        reason = ctx.reason if ctx.reason.startswith("gradient of ") else f"gradient of {ctx.reason}"
        return _Apply.apply(grad, transposed, ctx.region, reason, ctx.source), None, None, None, None


def _with(region: Region, placements: Placements, axes: Axes, new: Placement) -> Placements:
    return tuple(new if axis in axes else p for axis, p in zip(region.axis_names, placements))


@dataclasses.dataclass(frozen=True)
class Sum:
    """The sum over the ranks of the axes."""

    axes: Axes
    replicated: bool = True

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        for axis in self.axes:
            x = wire.all_reduce(region, x, axis, "sum")
        return x

    def after(self, region: Region, before: Placements) -> Placements:
        return _with(region, before, self.axes, Replicate() if self.replicated else Varying())

    def transposed(self, region: Region, before: Placements) -> Linear:
        if not self.replicated:
            return self
        return Cast(of_cotangent(before))


@dataclasses.dataclass(frozen=True)
class Cast:
    """The same tensors, said to be related otherwise: R -> V, V -> U."""

    to: Placements

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        return x

    def after(self, region: Region, before: Placements) -> Placements:
        return self.to

    def transposed(self, region: Region, before: Placements) -> Linear:
        axes = tuple(
            axis
            for axis, old, new in zip(region.axis_names, before, self.to)
            if old.is_replicate() and not new.is_replicate()
        )
        return Sum(axes) if axes else Cast(of_cotangent(before))


@dataclasses.dataclass(frozen=True)
class Gather:
    """Every rank's part, joined along a dim; the last axis is the minor one."""

    axes: Axes
    dim: int
    replicated: bool = True

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        for axis in reversed(self.axes):
            x = wire.all_gather(region, x, axis, self.dim)
        return x

    def after(self, region: Region, before: Placements) -> Placements:
        return _with(region, before, self.axes, Replicate() if self.replicated else Varying())

    def transposed(self, region: Region, before: Placements) -> Linear:
        return Part(self.axes, self.dim) if self.replicated else Scatter(self.axes, self.dim)


@dataclasses.dataclass(frozen=True)
class Part:
    """This rank's part along a dim of what every rank has."""

    axes: Axes
    dim: int

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        for axis in self.axes:
            x = wire.own_part(region, x, axis, self.dim)
        return x

    def after(self, region: Region, before: Placements) -> Placements:
        return _with(region, before, self.axes, Varying())

    def transposed(self, region: Region, before: Placements) -> Linear:
        return Gather(self.axes, self.dim)


@dataclasses.dataclass(frozen=True)
class Scatter:
    """This rank's part along a dim of the sum over the ranks."""

    axes: Axes
    dim: int

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        for axis in self.axes:
            x = wire.reduce_scatter(region, x, axis, self.dim)
        return x

    def after(self, region: Region, before: Placements) -> Placements:
        return _with(region, before, self.axes, Varying())

    def transposed(self, region: Region, before: Placements) -> Linear:
        return Gather(self.axes, self.dim, all(before[i].is_partial() for i in region.dims(self.axes)))


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Blocks along `split` go to the ranks in turn; those that come are joined along `concat`."""

    axes: Axes
    split: int
    concat: int

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        if len(self.axes) == 1:
            return wire.all_to_all(region, x, self.axes[0], self.split, self.concat)
        # Blocks [major, minor, ...] along a new dim 0, exchanged along one axis after the other, each in its own dim.
        n = region.size(self.axes)
        x = x.unflatten(self.split, (n, x.shape[self.split] // n)).movedim(self.split, 0)
        x = x.unflatten(0, tuple(region.sizes[axis] for axis in self.axes))
        for dim, axis in enumerate(self.axes):
            x = wire.all_to_all(region, x, axis, dim, dim)
        x = x.flatten(0, len(self.axes) - 1).movedim(0, self.concat)
        return x.flatten(self.concat, self.concat + 1).contiguous()

    def after(self, region: Region, before: Placements) -> Placements:
        return _with(region, before, self.axes, Varying())

    def transposed(self, region: Region, before: Placements) -> Linear:
        return AllToAll(self.axes, self.concat, self.split)


@dataclasses.dataclass(frozen=True)
class Permute:
    """Member j of the group over the axes (in mesh order) gets what member `sources[j]` has; zeros where that is -1."""

    axes: Axes
    sources: tuple[int, ...]

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        return wire.permute(region, x, self.axes, self.sources)

    def after(self, region: Region, before: Placements) -> Placements:
        return _with(region, before, self.axes, Varying())

    def transposed(self, region: Region, before: Placements) -> Linear:
        back = [-1] * len(self.sources)
        for member, source in enumerate(self.sources):
            if source >= 0:
                back[source] = member
        return Permute(self.axes, tuple(back))


@dataclasses.dataclass(frozen=True)
class Claim:
    """A varying value, said to be the same on every rank: what an unchecked out_spec does."""

    axes: Axes

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        return x

    def after(self, region: Region, before: Placements) -> Placements:
        return _with(region, before, self.axes, Replicate())

    def transposed(self, region: Region, before: Placements) -> Linear:
        return Share(self.axes)


@dataclasses.dataclass(frozen=True)
class Share:
    """An equal share for each rank of what every rank has."""

    axes: Axes

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        return x / region.size(self.axes)

    def after(self, region: Region, before: Placements) -> Placements:
        return _with(region, before, self.axes, Varying())

    def transposed(self, region: Region, before: Placements) -> Linear:
        return Mean(self.axes)


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean over the ranks of the axes."""

    axes: Axes

    def run(self, region: Region, x: torch.Tensor) -> torch.Tensor:
        return Sum(self.axes).run(region, x) / region.size(self.axes)

    def after(self, region: Region, before: Placements) -> Placements:
        return _with(region, before, self.axes, Replicate())

    def transposed(self, region: Region, before: Placements) -> Linear:
        return Share(self.axes)


def varying(x: Any, region: Region, axes: Sequence[str], source: str) -> Any:
    """A value that counts as varying along some axes; sums that are owed stay so."""
    before = relation(x)
    to = tuple(Varying() if axis in axes and p.is_replicate() else p for axis, p in zip(region.axis_names, before))
    if to == before:
        return x
    return apply(Cast(to), x, region, "a value that is the same on every rank", source)


def unreduced(x: Any, region: Region, axes: Sequence[str], source: str) -> Any:
    """A varying value as a sum that is owed along some axes."""
    to = tuple(Partial("sum") if axis in axes else p for axis, p in zip(region.axis_names, relation(x)))
    return apply(Cast(to), x, region, "a sum that is owed", source)
