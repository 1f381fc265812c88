"""`reshard`: another placement for values, inside a jitted step or outside."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor
from ptrainx.core.errors import TraceError
from ptrainx.core.trace_context import current_trace, refuse_aside, user_source
from ptrainx.mesh.mesh import ambient_mesh
from ptrainx.mesh.partition_spec import PartitionSpec
from ptrainx.mesh.placement import spec_of_placements
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.transfer import default_mesh, device_put, refuse_differentiated, reshard_value
from ptrainx.mesh.world import current_world
from ptrainx.ops.constrain import place_inside

__all__ = ["reshard"]


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
        refuse_aside("px.reshard", "reshard the batch before or after px.vmap: one example has no place on a mesh")
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


def _outside(tree: Any, specs: SpecTree) -> Any:
    leaves, treedef = px_tree.flatten(tree)
    if ambient_mesh() is None and current_world().size == 1 and not any(isinstance(leaf, DTensor) for leaf in leaves):
        spread(specs, tree)
        for leaf in leaves:
            as_tensor(leaf).detach()  # what was donated, or is no value, is refused
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
