"""Operators on per-shard values: on the local tensors alone, with no placement to work out and nothing to send.

In: an ATen operator as the trace's rules see it. Out: its results as per-shard values, related as the operands are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch.distributed.tensor import DTensor, Placement

from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError, SpecError
from ptrainx.core.trace_context import TraceContext, user_source
from ptrainx.mesh.per_shard import PerShardMesh, joined, like_per_shard, relation, write_raises
from ptrainx.ops.collectives.linear import varying

__all__ = ["per_shard_mesh_of", "recast", "run_per_shard"]


def per_shard_mesh_of(args: Any, kwargs: Any) -> PerShardMesh | None:
    """The mesh of the per-shard values among an operator's arguments, if there are any."""
    arguments: Any = (args, kwargs)
    for leaf in optree.tree_leaves(arguments, none_is_leaf=True):
        if isinstance(leaf, DTensor):
            mesh: Any = leaf.device_mesh
            return mesh if isinstance(mesh, PerShardMesh) else None
    return None


def run_per_shard(func: Any, args: Any, kwargs: Any, mesh: PerShardMesh, trace: TraceContext) -> Any:
    """The operator on the local tensors.

    Raises:
        InputError: it changes a value's shape in place.
    """
    if torch.Tag.inplace_view in func.tags:
        raise InputError(
            f"{trace.name} changes the shape of a value in place: {func._schema.name.removeprefix('aten::')}",
            fix="write value = value.squeeze() instead of value.squeeze_()",
            source=trace.origin.source,
        )
    arguments: Any = (args, kwargs)
    leaves = [leaf for leaf in optree.tree_leaves(arguments, none_is_leaf=True) if isinstance(leaf, DTensor)]
    placements = joined(leaves, mesh)
    known = {id(leaf._local_tensor): leaf for leaf in leaves}
    local: Any = optree.tree_map(
        lambda x: x._local_tensor if isinstance(x, DTensor) else x, arguments, none_is_leaf=True
    )
    out = func(*local[0], **local[1])
    for written in _written(func, args, kwargs):
        write_raises(written, placements)

    def leave(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return known.get(id(x)) if id(x) in known else like_per_shard(x, mesh, placements)

    return optree.tree_map(leave, out, none_is_leaf=True)


def _written(func: Any, args: Any, kwargs: Any) -> list[DTensor]:
    if not func._schema.is_mutable:
        return []
    found = []
    for i, formal in enumerate(func._schema.arguments):
        if formal.alias_info is not None and formal.alias_info.is_write:
            value: Any = args[i] if i < len(args) else kwargs.get(formal.name)
            found += [leaf for leaf in optree.tree_leaves(value) if isinstance(leaf, DTensor)]
    return found


def recast(trace: TraceContext, value: Any, device_mesh: Any = None, placements: Sequence[Placement] = ()) -> Any:
    """A per-shard value that counts as related otherwise: only what is the same everywhere may count as varying.

    Raises:
        SpecError: it would take communication.
    """
    before, wanted = relation(value), tuple(placements)
    axes = [axis for axis, p, q in zip(trace.mesh.axis_names, before, wanted) if p != q and p.is_replicate()]
    lost = [axis for axis, p, q in zip(trace.mesh.axis_names, before, wanted) if p != q and not p.is_replicate()]
    if lost:
        raise SpecError(
            f"{trace.name}: a value that is not the same on every rank along {', '.join(map(repr, lost))} "
            "has to be the same there",
            got=describe(value),
            source=trace.origin.source or user_source(),
            fix=f"make it so with px.psum or px.all_gather over {lost[0]!r}, or start from px.pcast(x, {lost[0]!r}, "
            "to='varying')",
        )
    if not axes:
        return value
    if not (value.requires_grad and torch.is_grad_enabled()):
        return like_per_shard(value._local_tensor, value.device_mesh, wanted)
    with tc.DisableTorchFunction():
        return varying(value, trace.region, axes, trace.origin.source)
