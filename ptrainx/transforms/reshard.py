"""`reshard`: another placement for values, inside a jitted step or outside."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ptrainx.core import tree as px_tree
from ptrainx.core.errors import SpecError, TraceError
from ptrainx.core.reductions import current_reduction
from ptrainx.core.trace_context import TraceContext, current_trace, user_source
from ptrainx.mesh.mesh import ambient_mesh
from ptrainx.mesh.partition_spec import PartitionSpec
from ptrainx.mesh.placement import check_spec, spec_of_placements, trace_placements
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.transfer import default_mesh, device_put, refuse_differentiated, reshard_value
from ptrainx.mesh.world import current_world

__all__ = ["place_inside", "reshard"]


def reshard(tree: Any, specs: SpecTree) -> Any:
    """Moves values to other placements; the communication it takes counts as asked for.

    Inside a jitted step it also serves as a constraint: what is computed from the value starts from this placement, and
    the gradient comes back at the placement that the value had before (as JAX's `with_sharding_constraint` has it),
    even where the value is there already.

    Args:
        tree: placed values; outside a step plain ones are placed as by `px.device_put`, but for a program without any
            mesh, which runs on one device: there they are where they belong, and stay as they are.
        specs: a spec tree, possibly a prefix; None leaves a value where it is, with owed sums paid.

    Returns:
        the tree with each leaf at its placement.

    Raises:
        SpecError: a spec that does not fit its value, or that claims an owed sum that is not there.
        GradientError: outside a step, a value that is being differentiated: placing copies it out of the graph.
    """
    trace = current_trace()
    if trace is None:
        return _outside(tree, specs)
    if trace.region is not None:
        raise TraceError(
            f"px.reshard inside {trace.region.name}, where values are per-shard ones",
            source=user_source(),
            fix="move data with px.all_gather, px.all_to_all or px.ppermute; reshard before or after shard_map",
        )
    pairs, treedef = px_tree.flatten_with_path(tree)
    chosen = spread(specs, tree)
    source = user_source()
    with trace.marked(asked=True, reason="reshard", source=source):
        leaves = [
            place_inside(leaf, spec, px_tree.path_expr(p) or "value", trace) for (p, leaf), spec in zip(pairs, chosen)
        ]
    return px_tree.unflatten(treedef, leaves)


def place_inside(leaf: Any, spec: PartitionSpec | None, where: str, trace: TraceContext) -> Any:
    """One value of a running step at another placement; None leaves it where it is, with owed sums paid."""
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
    kept = tuple(
        old if old.is_partial() and new.is_partial() else new for old, new in zip(value.placements, placements)
    )
    if value.requires_grad and torch.is_grad_enabled():
        reduction = current_reduction()
        if reduction is None:
            return _Constrain.apply(value, kept, value.dtype, None, trace, user_source())
        original = trace.as_global(reduction.original(leaf))
        return _Constrain.apply(original, kept, value.dtype, reduction.dtype, trace, user_source())
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
    ) -> Any:
        ctx.before, ctx.dtype, ctx.summed_in = value.placements, value.dtype, summed_in
        ctx.trace, ctx.source = trace, source
        moved = value.to(dtype).redistribute(value.device_mesh, placements)
        return moved.view_as(moved) if moved is value else moved

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        target = tuple(Replicate() if placement.is_partial() else placement for placement in ctx.before)
        if tuple(grad.placements) != target:
            if ctx.summed_in is not None and any(placement.is_partial() for placement in grad.placements):
                grad = grad.to(ctx.summed_in)
            with ctx.trace.marked(asked=True, reason="gradient of a reshard", source=ctx.source):
                grad = grad.redistribute(grad.device_mesh, target)
        return grad.to(ctx.dtype), None, None, None, None, None


def _outside(tree: Any, specs: SpecTree) -> Any:
    leaves, treedef = px_tree.flatten(tree)
    if ambient_mesh() is None and current_world().size == 1 and not any(isinstance(leaf, DTensor) for leaf in leaves):
        spread(specs, tree)
        return tree
    refuse_differentiated(leaves, "px.reshard")
    mesh = default_mesh(leaves)
    out = []
    for leaf, spec in zip(leaves, spread(specs, tree)):
        if isinstance(leaf, DTensor):
            own = spec_of_placements(leaf.placements, mesh.axis_names, leaf.ndim)
            out.append(reshard_value(leaf, spec if spec is not None else PartitionSpec(*own.entries), mesh))
        else:
            out.append(device_put(leaf, spec, mesh))
    return px_tree.unflatten(treedef, out)
