"""`reshard`: another placement for values, inside a jitted step or outside."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from ptrainx.core import tree as px_tree
from ptrainx.core.errors import SpecError
from ptrainx.core.trace_context import TraceContext, current_trace, user_source
from ptrainx.mesh.partition_spec import PartitionSpec
from ptrainx.mesh.placement import check_spec, placements_of, spec_of_placements
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.transfer import default_mesh, device_put, reshard_value

__all__ = ["reshard"]


def reshard(tree: Any, specs: SpecTree) -> Any:
    """Moves values to other placements; the communication it takes counts as asked for.

    Inside a jitted step it also serves as a constraint: what is computed from the value starts from this placement.

    Args:
        tree: placed values; outside a step plain ones are placed as by `px.device_put`.
        specs: a spec tree, possibly a prefix; None leaves a value where it is, with owed sums paid.

    Returns:
        the tree with each leaf at its placement; a leaf that is there already is returned as it is.

    Raises:
        SpecError: a spec that does not fit its value, or that claims an owed sum that is not there.
    """
    trace = current_trace()
    if trace is None:
        return _outside(tree, specs)
    pairs, treedef = px_tree.flatten_with_path(tree)
    chosen = spread(specs, tree)
    source = user_source()
    with trace.marked(asked=True, reason="reshard", source=source):
        leaves = [_inside(leaf, spec, px_tree.path_expr(p) or "value", trace) for (p, leaf), spec in zip(pairs, chosen)]
    return px_tree.unflatten(treedef, leaves)


def _inside(leaf: Any, spec: PartitionSpec | None, where: str, trace: TraceContext) -> Any:
    value = trace.as_global(leaf)
    names = trace.mesh.axis_names
    own = spec_of_placements(value.placements, names, value.ndim)
    wanted = spec if spec is not None else PartitionSpec(*own.entries)
    check_spec(wanted, trace.mesh, value.shape, where)
    gained = [axis for axis in wanted.unreduced if axis not in own.unreduced]
    if gained:
        raise SpecError(
            f"{where} owes no sum over {gained}",
            got=str(own),
            expected=str(wanted),
            fix="leave the axes out of unreduced=; only an unpaid sum can stay unpaid",
            source=user_source(),
        )
    placements = placements_of(wanted, trace.mesh)
    if tuple(value.placements) == placements:
        return value
    kept = tuple(
        old if old.is_partial() and new.is_partial() else new for old, new in zip(value.placements, placements)
    )
    return value.redistribute(value.device_mesh, kept)


def _outside(tree: Any, specs: SpecTree) -> Any:
    leaves, treedef = px_tree.flatten(tree)
    mesh = default_mesh(leaves)
    out = []
    for leaf, spec in zip(leaves, spread(specs, tree)):
        if isinstance(leaf, DTensor):
            own = spec_of_placements(leaf.placements, mesh.axis_names, leaf.ndim)
            out.append(reshard_value(leaf, spec if spec is not None else PartitionSpec(*own.entries), mesh))
        else:
            out.append(device_put(leaf, spec, mesh))
    return px_tree.unflatten(treedef, out)
