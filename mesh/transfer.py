"""Values onto a mesh, off it, and from one placement to another, outside a jitted step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor, describe
from ptrainx.core.errors import InputError, MeshError
from ptrainx.mesh.mesh import Mesh, ambient_mesh, make_mesh
from ptrainx.mesh.partition_spec import P, PartitionSpec
from ptrainx.mesh.placement import (
    check_spec,
    is_first_owed,
    local_block,
    placements_of,
    spec_of,
    tensor_spec,
)
from ptrainx.mesh.simulated import SimulatedDTensor, wrap_all
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.world import current_world

__all__ = [
    "block_until_ready",
    "default_mesh",
    "device_get",
    "device_put",
    "from_process_local",
    "place_local",
    "reshard_value",
    "same_mesh",
]


def device_put(tree: Any, specs: SpecTree = None, mesh: Mesh | None = None) -> Any:
    """Places global values on a mesh; always copies.

    Args:
        tree: tensors, numpy arrays, Python numbers: each a *global* value, the same on every rank. Values that are
            placed already are moved to the new placement.
        specs: a spec tree, possibly a prefix; None replicates.
        mesh: by default the values' own, else that of `with mesh:`.

    Returns:
        the tree with a DTensor at each leaf (a plain 0-d tensor for a 0-d one).

    Raises:
        MeshError: no mesh, or values of another mesh.
        SpecError: a spec that does not fit.

    >>> mesh = make_mesh(data=2, simulate=True)
    >>> device_put(torch.arange(4.0), P("data"), mesh).placements
    (Shard(dim=0),)
    """
    pairs, treedef = px_tree.flatten_with_path(tree)
    mesh = default_mesh([leaf for _, leaf in pairs], mesh)
    chosen = spread(specs, tree)
    return px_tree.unflatten(
        treedef,
        [
            _put(leaf, spec or P(), mesh, px_tree.path_expr(path) or "value")
            for (path, leaf), spec in zip(pairs, chosen)
        ],
    )


def _put(leaf: Any, spec: PartitionSpec, mesh: Mesh, where: str) -> torch.Tensor:
    if isinstance(leaf, DTensor):
        moved = reshard_value(leaf, spec, mesh, where)
        return moved if moved is not leaf else _clone(leaf)
    value = as_tensor(leaf, where).detach()
    check_spec(spec, mesh, value.shape, where)
    if value.ndim == 0 and not spec.unreduced:
        return value.clone().to(mesh.device)
    return place_local(
        lambda rank: value[local_block(spec, mesh, value.shape, rank)].to(mesh.device, copy=True).contiguous(),
        spec,
        mesh,
        value,
    )


def place_local(part: Any, spec: PartitionSpec, mesh: Mesh, like: Any) -> DTensor:
    """A placed value from `part(rank) -> local tensor`, which is called for the ranks of this process.

    Args:
        part: gives a rank's block, contiguous, in memory of its own.
        spec: checked already.
        mesh: the mesh.
        like: something with the global shape and dtype.
    """
    whole = tensor_spec(mesh.device_mesh, spec, mesh, like)

    def local(rank: int) -> torch.Tensor:
        block = part(rank)
        return block if is_first_owed(spec, mesh, rank) else torch.zeros_like(block)

    if mesh.simulated:
        return wrap_all([local(rank) for rank in mesh.ranks], whole)
    return tc.wrap_local(local(mesh.rank), whole)


def device_get(tree: Any) -> Any:
    """The whole value of each leaf on the host, as CPU tensors; always copies. Every rank must call it.

    >>> mesh = make_mesh(data=2, simulate=True)
    >>> device_get(device_put([1.0, 2.0], None, mesh))
    [tensor(1.), tensor(2.)]
    """

    def get(leaf: Any) -> torch.Tensor:
        if isinstance(leaf, DTensor):
            whole = leaf.detach().full_tensor()
        else:
            whole = as_tensor(leaf).detach()
        return whole.to("cpu", copy=True)

    return px_tree.map(get, tree)


def from_process_local(tree: Any, specs: SpecTree, mesh: Mesh | None = None) -> Any:
    """Global values from the rows that each process holds; nothing is sent.

    Args:
        tree: each leaf is this process's part of the global value: its block under the spec. On a simulated mesh,
            where one process plays every rank, it is the whole value.
        specs: a spec tree, possibly a prefix.
        mesh: by default that of `with mesh:`.

    Returns:
        the tree with a DTensor at each leaf, its global shape the part's times the number of shards.
    """
    pairs, treedef = px_tree.flatten_with_path(tree)
    mesh = default_mesh([leaf for _, leaf in pairs], mesh)
    if mesh.simulated:
        return device_put(tree, specs, mesh)
    out = []
    for (path, leaf), spec in zip(pairs, spread(specs, tree)):
        where = px_tree.path_expr(path) or "value"
        spec = spec or P()
        part = as_tensor(leaf, where).detach()
        if isinstance(part, DTensor):
            raise InputError(f"{where} is placed already", fix="pass this process's rows as a plain tensor")
        sizes = mesh.shape
        shape = list(part.shape)
        check_spec(P(*spec.entries, unreduced=spec.unreduced), mesh, [0] * len(shape), where)
        for axis in spec.axes:
            shape[spec.dim_of(axis)] *= sizes[axis]  # type: ignore[index]
        like = torch.empty(shape, dtype=part.dtype, device="meta")
        out.append(place_local(lambda rank, p=part: p.to(mesh.device, copy=True).contiguous(), spec, mesh, like))
    return px_tree.unflatten(treedef, out)


def reshard_value(value: DTensor, spec: PartitionSpec, mesh: Mesh, where: str = "value") -> DTensor:
    """One placed value at another placement of the same mesh."""
    if not same_mesh(value, mesh):
        raise MeshError(
            f"{where} lives on another mesh",
            got=str(value.device_mesh),
            expected=str(mesh),
            fix="px.device_put(px.device_get(value), spec, mesh) moves it between meshes",
        )
    check_spec(spec, mesh, value.shape, where)
    placements = placements_of(spec, mesh)
    if tuple(value.placements) == placements:
        return value
    return value.redistribute(value.device_mesh, placements)


def same_mesh(value: DTensor, mesh: Mesh) -> bool:
    """Whether a placed value lives on this mesh."""
    own = value.device_mesh
    return own is mesh.device_mesh or (
        isinstance(value, SimulatedDTensor) == mesh.simulated and own == mesh.device_mesh
    )


def default_mesh(leaves: Sequence[Any], mesh: Any = None) -> Any:
    """The mesh given, else the leaves' own, else the one of `with mesh:`, else in a world of one a one-device mesh.

    Raises:
        MeshError: there is none, or leaves live on different meshes.
    """
    if mesh is not None:
        return mesh
    own = {id(leaf.device_mesh): leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor)}
    meshes = list(own.values())
    for other in meshes[1:]:
        if other != meshes[0]:
            raise MeshError("values of different meshes meet", got=f"{meshes[0]} and {other}", fix="pass mesh=")
    ambient = ambient_mesh()
    if meshes:
        found = _as_mesh(meshes[0], ambient)
        if found is not None:
            return found
    if ambient is not None:
        return ambient
    if current_world().size == 1:
        return make_mesh(data=1)
    raise MeshError("no mesh", fix="pass mesh=, or run inside `with mesh:`")


def _as_mesh(device_mesh: Any, ambient: Any) -> Any:
    if ambient is not None and getattr(ambient, "device_mesh", None) == device_mesh:
        return ambient
    return getattr(device_mesh, "ptrainx_mesh", lambda: None)()


def block_until_ready(tree: Any) -> Any:
    """Waits until every leaf's value has been computed; returns the tree."""
    if torch.cuda.is_available() and any(
        isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda" for leaf in px_tree.leaves(tree)
    ):
        torch.cuda.synchronize()
    return tree


def _clone(value: DTensor) -> DTensor:
    return value.detach().clone()


def describe_placed(value: Any) -> str:
    """A value's type and placement in short: `f32[4,2] P('data')`."""
    return f"{describe(value)} {spec_of(value)}" if isinstance(value, DTensor) else describe(value)
