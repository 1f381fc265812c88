"""A value of a running step at another placement, with its gradient brought back to where the value was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ptrainx.core.errors import SpecError
from ptrainx.core.reductions import current_reduction
from ptrainx.core.trace_context import TraceContext, user_source
from ptrainx.mesh.partition_spec import PartitionSpec
from ptrainx.mesh.placement import check_spec, spec_of_placements, trace_placements

__all__ = ["constrain", "place_inside"]


def place_inside(leaf: Any, spec: PartitionSpec | None, where: str, trace: TraceContext, by: str = "a reshard") -> Any:
    """One value of a running step at another placement; None leaves it where it is, with owed sums paid.

    Args:
        leaf: the value.
        spec: where it is to be.
        where: how errors call it.
        trace: the running trace.
        by: what moves it, as the gradient's communication tells it.

    Raises:
        SpecError: a spec that does not fit the value, or that claims an owed sum that is not there.
    """
    value = trace.as_global(leaf)
    names, sizes = trace.mesh.axis_names, trace.mesh.shape
    own = spec_of_placements(value.placements, names, value.ndim)
    wanted = spec if spec is not None else PartitionSpec(*own.entries)
    check_spec(wanted, trace.mesh, value.shape, where)
    owed = {axis for axis, p in zip(names, value.placements) if p.is_partial("sum") or p.is_partial("avg")}
    gained = [axis for axis in wanted.unreduced if axis not in owed and sizes[axis] > 1]
    if gained:
        raise SpecError(
            f"{where} owes no sum over {gained}",
            got=", ".join(f"{axis}: {p}" for axis, p in zip(names, value.placements)),
            expected=str(wanted),
            fix="leave the axes out of unreduced=; only an unpaid sum can stay unpaid",
            source=user_source(),
        )
    placements = trace_placements(wanted, trace.mesh)
    kept = [old if old.is_partial() and new.is_partial() else new for old, new in zip(value.placements, placements)]
    return constrain(leaf, value, kept, trace, by)


def constrain(leaf: Any, value: DTensor, placements: Sequence[Any], trace: TraceContext, by: str) -> Any:
    """A global value at these placements; its gradient comes back at those that it has, sums paid.

    Args:
        leaf: the value as the user gave it, which a precision policy knows it by.
        value: the same as a global value.
        placements: where it is to be.
        trace: the running trace.
        by: what moves it, as the gradient's communication tells it.
    """
    kept = tuple(placements)
    if value.requires_grad and torch.is_grad_enabled():
        reduction = current_reduction()
        if reduction is None:
            return _Constrain.apply(value, kept, value.dtype, None, trace, user_source(), by)
        original = trace.as_global(reduction.original(leaf))
        return _Constrain.apply(original, kept, value.dtype, reduction.dtype, trace, user_source(), by)
    return value if tuple(value.placements) == kept else value.redistribute(value.device_mesh, kept)


class _Constrain(torch.autograd.Function):
    """A value at another placement, or the same; its gradient goes back to where the value was, sums paid.

    Under a precision policy it is one step from the value as it is stored to the gathered one in the compute dtype, so
    that a gradient that is summed in a wide dtype comes back in it, and is not rounded on the way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: Any,
        placements: tuple,
        dtype: torch.dtype,
        summed_in: torch.dtype | None,
        trace: TraceContext,
        source: str,
        by: str,
    ) -> Any:
        ctx.before, ctx.dtype, ctx.summed_in = value.placements, value.dtype, summed_in
        ctx.trace, ctx.source, ctx.by = trace, source, by
        moved = value.to(dtype).redistribute(value.device_mesh, placements)
        return moved.view_as(moved) if moved is value else moved

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        target = tuple(Replicate() if placement.is_partial() else placement for placement in ctx.before)
        if tuple(grad.placements) != target:
            if ctx.summed_in is not None and any(placement.is_partial() for placement in grad.placements):
                grad = grad.to(ctx.summed_in)
            with ctx.trace.marked(asked=True, reason=f"gradient of {ctx.by}", source=ctx.source):
                grad = grad.redistribute(grad.device_mesh, target)
        return grad.to(ctx.dtype), None, None, None, None, None, None
