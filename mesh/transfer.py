"""Values onto a mesh, off it, and from one placement to another, outside a jitted step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ptrainx.core import flags
from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor, describe
from ptrainx.core.errors import GradientError, InputError, MeshError
from ptrainx.core.trace_context import open_grads, user_source
from ptrainx.mesh.mesh import AbstractMesh, Mesh, ambient_mesh, epoch_of, make_mesh
from ptrainx.mesh.partition_spec import P, PartitionSpec, axes_of
from ptrainx.mesh.placement import (
    check_spec,
    is_first_owed,
    local_block,
    placements_of,
    replicate,
    spec_of,
    tensor_spec,
)
from ptrainx.mesh.simulated import SimulatedDTensor, local_tensors, wrap_all
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.virtual import VirtualDeviceMesh
from ptrainx.mesh.world import current_world

__all__ = [
    "block_until_ready",
    "check_on_mesh",
    "check_usable",
    "default_mesh",
    "describe_placed",
    "device_get",
    "device_put",
    "from_process_local",
    "place_local",
    "refuse_differentiated",
    "reshard_value",
    "same_mesh",
]


def device_put(tree: Any, specs: SpecTree = None, mesh: Mesh | None = None) -> Any:
    """Places global values on a mesh; always copies, and records no gradient.

    Args:
        tree: tensors, numpy arrays, Python numbers: each a *global* value, the same on every rank. Values that are
            placed already are moved to the new placement.
        specs: a spec tree, possibly a prefix; None replicates a plain value and leaves a placed one where it is.
        mesh: by default the values' own, else that of `with mesh:`.

    Returns:
        the tree with a DTensor at each leaf (a plain 0-d tensor for a 0-d one).

    Raises:
        MeshError: no mesh, values of another mesh, or of a world that has ended.
        SpecError: a spec that does not fit.
        TreeError: a spec tree that does not fit, or a leaf of unknown type.
        GradientError: inside `px.grad`, a value that depends on what is differentiated: a copy has no gradient.

    >>> mesh = make_mesh(data=2, simulate=True)
    >>> device_put(torch.arange(4.0), P("data"), mesh).placements
    (Shard(dim=0),)
    """
    pairs, treedef = px_tree.flatten_with_path(tree)
    refuse_differentiated([leaf for _, leaf in pairs], "px.device_put")
    mesh = _placeable(default_mesh([leaf for _, leaf in pairs], mesh))
    placed = [_put(leaf, spec, mesh, _name(path)) for (path, leaf), spec in zip(pairs, spread(specs, tree))]
    return px_tree.unflatten(treedef, placed)


def refuse_differentiated(leaves: Sequence[Any], name: str) -> None:
    """Refuses to copy, outside a step, what a running `px.grad` differentiates: the copy would have no gradient."""
    if open_grads() == 0 or not torch.is_grad_enabled():
        return
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise GradientError(
                f"{name}, outside a step, of a value that px.grad differentiates",
                got=describe(leaf),
                fix="run px.grad inside px.jit, or place the value before it; `.detach()` where no gradient is wanted",
                source=user_source(),
            )


def _name(path: Sequence[Any]) -> str:
    return px_tree.path_expr(tuple(path)) or "value"


def _put(leaf: Any, spec: PartitionSpec | None, mesh: Mesh, where: str) -> torch.Tensor:
    if isinstance(leaf, DTensor):
        check_on_mesh(leaf, mesh, where)  # before any operation, which could take an equal mesh of today from a cache
        return _put_placed(leaf.detach(), spec, mesh, where)
    spec = P() if spec is None else spec
    value = as_tensor(leaf, where).detach()
    check_spec(spec, mesh, value.shape, where)
    if value.ndim == 0 and not spec.unreduced:
        return value.to(mesh.device, copy=True)
    return place_local(lambda rank: _own(value[local_block(spec, mesh, value.shape, rank)], mesh), spec, mesh, value)


def _put_placed(value: Any, spec: PartitionSpec | None, mesh: Mesh, where: str) -> torch.Tensor:
    moved = value if spec is None else reshard_value(value, spec, mesh, where)
    if moved.ndim == 0 and all(placement.is_replicate() for placement in moved.placements):
        return moved.full_tensor().clone()
    return _copy(moved)


def _copy(value: DTensor) -> DTensor:
    # DTensor's own clone pays the sums that are owed.
    if isinstance(value, SimulatedDTensor):
        return wrap_all([part.clone() for part in local_tensors(value).values()], value._spec)
    return tc.wrap_local(value._local_tensor.clone(), value._spec)


def _own(block: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """A block in memory of its own, contiguous, on the mesh's device."""
    return block.to(mesh.device, copy=True, memory_format=torch.contiguous_format)


def place_local(part: Callable[[int], torch.Tensor], spec: PartitionSpec, mesh: Mesh, like: Any) -> DTensor:
    """A placed value from `part(rank) -> local tensor`, which is called for the ranks of this process.

    Where a sum is owed, the first rank along the axis holds the value and the others zeros.

    Args:
        part: gives a rank's block, contiguous, in memory of its own.
        spec: checked already.
        mesh: the mesh.
        like: something with the global shape and dtype.
    """

    def local(rank: int) -> torch.Tensor:
        block = part(rank)
        return block if is_first_owed(spec, mesh, rank) else torch.zeros_like(block)

    return _wrap(local, spec, mesh, like)


def _wrap(part: Callable[[int], torch.Tensor], spec: PartitionSpec, mesh: Mesh, like: Any) -> DTensor:
    whole = tensor_spec(mesh.device_mesh, spec, mesh, like)
    if mesh.simulated:
        return wrap_all([part(rank) for rank in mesh.ranks], whole)
    return tc.wrap_local(part(mesh.rank), whole)


def device_get(tree: Any) -> Any:
    """The whole value of each leaf on the host, as CPU tensors; always copies. Every rank must call it.

    Raises:
        MeshError: a value of a world that has ended.
        TreeError: a leaf of unknown type.
        GradientError: inside `px.grad`, a value that depends on what is differentiated: a copy has no gradient.

    >>> mesh = make_mesh(data=2, simulate=True)
    >>> device_get(device_put([1.0, 2.0], None, mesh))
    [tensor(1.), tensor(2.)]
    """

    refuse_differentiated(px_tree.leaves(tree), "px.device_get")

    def get(path: Any, leaf: Any) -> torch.Tensor:
        if not isinstance(leaf, DTensor):
            return as_tensor(leaf, _name(path)).detach().to("cpu", copy=True)
        check_usable(leaf, _name(path))
        whole: Any = leaf.detach()
        whole = replicate(whole)
        local = local_tensors(whole)[0] if isinstance(whole, SimulatedDTensor) else _ready(whole.to_local())
        return local.to("cpu", copy=True)

    return px_tree.map_with_path(get, tree)


def _ready(local: torch.Tensor) -> torch.Tensor:
    return local.wait() if isinstance(local, tc.AsyncCollectiveTensor) else local


def from_process_local(tree: Any, specs: SpecTree, mesh: Mesh | None = None) -> Any:
    """Global values from the rows that each process holds; nothing is sent.

    Args:
        tree: each leaf is this process's part of the global value: its block under the spec, of the same shape on
            every rank (under `PTRAINX_CHECK_INPUTS=1` that is checked); over axes where a sum is owed, its addend. On
            a simulated mesh, where one process plays every rank, it is the whole value.
        specs: a spec tree, possibly a prefix; None says that the part is the whole, the same on every rank.
        mesh: by default that of `with mesh:`.

    Returns:
        the tree with a DTensor at each leaf, its global shape the part's times the number of shards (a plain 0-d
        tensor for a 0-d leaf).

    Raises:
        InputError: a leaf that is placed already; parts of different shape or dtype.
        MeshError, SpecError, TreeError: as for `device_put`.
    """
    pairs, treedef = px_tree.flatten_with_path(tree)
    refuse_differentiated([leaf for _, leaf in pairs], "px.device_put")
    mesh = _placeable(default_mesh([leaf for _, leaf in pairs], mesh))
    chosen = [P() if spec is None else spec for spec in spread(specs, tree)]
    for path, leaf in pairs:
        if isinstance(leaf, DTensor):
            raise InputError(f"{_name(path)} is placed already", fix="pass this process's rows as a plain tensor")
    if mesh.simulated:
        return device_put(tree, specs, mesh)
    parts = [as_tensor(leaf, _name(path)).detach() for path, leaf in pairs]
    if flags.check_inputs():
        _check_same_parts([_name(path) for path, _ in pairs], parts)
    placed = [_join_parts(part, spec, mesh, _name(path)) for (path, _), part, spec in zip(pairs, parts, chosen)]
    return px_tree.unflatten(treedef, placed)


def _join_parts(part: torch.Tensor, spec: PartitionSpec, mesh: Mesh, where: str) -> torch.Tensor:
    check_spec(spec, mesh, [0] * part.ndim, where)  # any number of rows will do
    if part.ndim == 0 and not spec.unreduced:
        return part.to(mesh.device, copy=True)
    sizes, shape = mesh.shape, list(part.shape)
    for dim, entry in enumerate(spec.entries):
        for axis in axes_of(entry):
            shape[dim] *= sizes[axis]
    like = torch.empty(shape, dtype=part.dtype, device="meta")
    return _wrap(lambda rank: _own(part, mesh), spec, mesh, like)


def _check_same_parts(names: list[str], parts: list[torch.Tensor]) -> None:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, [describe(part) for part in parts])
    for name, *kinds in zip(names, *everyone):
        if len(set(kinds)) > 1:
            raise InputError(
                f"{name}: the ranks' parts differ",
                got=", ".join(f"{kind} on rank {rank}" for rank, kind in enumerate(kinds)),
                expected="the same shape and dtype on every rank",
                fix="give each rank the same number of rows",
            )


def reshard_value(value: DTensor, spec: PartitionSpec, mesh: Mesh, where: str = "value") -> DTensor:
    """One placed value at another placement of the same mesh; the same object if it is there already."""
    check_on_mesh(value, mesh, where)
    check_spec(spec, mesh, value.shape, where)
    placements = placements_of(spec, mesh)
    if tuple(value.placements) == placements:
        return value
    if any(placement.is_partial() and placement != Partial("sum") for placement in value.placements):
        value = replicate(value)  # torch has no way from one kind of unreduced value to another
    axes = dict(zip(mesh.axis_names, value.placements))
    owed_now = tuple(axis for axis in spec.unreduced if not axes[axis].is_partial())
    paid = P(*spec.entries, unreduced=[axis for axis in spec.unreduced if axis not in owed_now])
    moved = value.redistribute(value.device_mesh, placements_of(paid, mesh))
    local: Any = moved._local_tensor
    moved._local_tensor = _ready(local)
    return _Owe.apply(moved, spec, owed_now, mesh) if owed_now else moved


class _Owe(torch.autograd.Function):
    """A value written as a sum over more axes: the first rank along each keeps it, the others hold zeros."""

    @staticmethod
    def forward(ctx: Any, value: Any, spec: PartitionSpec, axes: tuple[str, ...], mesh: Mesh) -> Any:
        ctx.before = value.placements
        every = local_tensors(value) if mesh.simulated else {mesh.rank: value._local_tensor}

        def part(rank: int) -> torch.Tensor:
            keeps = is_first_owed(P(unreduced=axes), mesh, rank)
            return every[rank].clone() if keeps else torch.zeros_like(every[rank])

        return _wrap(part, spec, mesh, value)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        placements = [Replicate() if placement.is_partial() else placement for placement in ctx.before]
        return grad.redistribute(placements=placements), None, None, None


def check_usable(value: DTensor, where: str = "value") -> None:
    """Refuses a placed value whose world has ended, or that holds one rank's part of a simulated value.

    Raises:
        MeshError: it can't be used.
    """
    refuse_use = getattr(value, "refuse_use", None)
    if refuse_use is not None:
        refuse_use()  # its memory was donated
    device_mesh = value.device_mesh
    if epoch_of(device_mesh) < 0:
        raise MeshError(
            f"{where} belongs to a world that has ended",
            got=f"{describe(value)} on {device_mesh}",
            fix="take values off the mesh with px.device_get before px.shutdown, and px.device_put them on a new one",
        )
    if isinstance(device_mesh, VirtualDeviceMesh) and not isinstance(value, SimulatedDTensor):
        raise MeshError(
            f"{where} holds one rank's part of a value on a simulated mesh",
            got=f"a plain DTensor on {device_mesh}",
            fix="make values of a simulated mesh with px.device_put",
        )


def check_on_mesh(value: DTensor, mesh: Mesh, where: str = "value") -> None:
    """Refuses a placed value that lives on another mesh, or whose world has ended.

    Raises:
        MeshError: it does.
    """
    check_usable(value, where)
    if not same_mesh(value, mesh):
        raise MeshError(
            f"{where} lives on another mesh",
            got=_mesh_text(value.device_mesh),
            expected=str(mesh),
            fix="px.device_put(px.device_get(value), spec, mesh) moves it between meshes",
        )


def same_mesh(value: DTensor, mesh: AbstractMesh) -> bool:
    """Whether a placed value lives on this mesh: the same devices of the same world."""
    own = value.device_mesh
    theirs = getattr(mesh, "device_mesh", None)
    return own is theirs or (theirs is not None and own == theirs and epoch_of(own) == mesh.epoch)


def default_mesh(leaves: Sequence[Any], mesh: Any = None) -> Any:
    """The mesh given, else the leaves' own, else the one of `with mesh:`, else in a world of one a one-device mesh.

    Raises:
        MeshError: there is none, or leaves live on different meshes or in a world that has ended.
    """
    if mesh is not None:
        return mesh
    own = {id(leaf.device_mesh): leaf for leaf in leaves if isinstance(leaf, DTensor)}
    if own:
        first, *others = own.values()
        check_usable(first)
        found = _mesh_of(first)
        for other in others:
            check_usable(other)
            if not same_mesh(other, found):
                raise MeshError(
                    "values of different meshes meet",
                    got=f"{found} and {_mesh_text(other.device_mesh)}",
                    fix="px.device_put(px.device_get(value), spec, mesh) moves a value between meshes",
                )
        return found
    ambient = ambient_mesh()
    if ambient is not None:
        return ambient
    if current_world().size == 1:
        return make_mesh(data=1)
    raise MeshError("no mesh", fix="pass mesh=, or run inside `with mesh:`")


def _mesh_of(value: DTensor) -> Mesh:
    ambient = ambient_mesh()
    if isinstance(ambient, Mesh) and same_mesh(value, ambient):
        return ambient
    return Mesh.from_device_mesh(value.device_mesh)


def _mesh_text(device_mesh: Any) -> str:
    return str(Mesh.from_device_mesh(device_mesh) if device_mesh.mesh_dim_names else device_mesh)


def _placeable(mesh: Any) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"{mesh!r} has no devices to place values on",
            expected="a mesh from px.make_mesh",
            fix="px.make_mesh(..., simulate=True) makes the devices in this process",
        )
    mesh.check_alive()
    return mesh


def block_until_ready(tree: Any) -> Any:
    """Waits until every leaf's value has been computed; returns the tree."""
    values = [leaf for leaf in px_tree.leaves(tree) if isinstance(leaf, torch.Tensor)]
    for value in values:
        local = value._local_tensor if isinstance(value, DTensor) else value
        if isinstance(local, tc.AsyncCollectiveTensor):
            local.trigger_wait()
    for device in {value.device for value in values if value.device.type == "cuda"}:
        torch.cuda.synchronize(device)
    return tree


def describe_placed(value: Any) -> str:
    """A value's type and placement in short: `f32[4,2] P('data')`."""
    return f"{describe(value)} {spec_of(value)}" if isinstance(value, DTensor) else describe(value)
