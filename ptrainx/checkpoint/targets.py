"""Where each leaf of a restored tree is to go.

In: `like`, specs, a mesh. Out: a `Target` a leaf: what it must be in the checkpoint, which boxes this process needs of
it, and how they become a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ptrainx.checkpoint import paths, scalars
from ptrainx.checkpoint.boxes import Box, Piece, coords_of, inside, local_shape, pieces, whole
from ptrainx.checkpoint.dtypes import dtype_name
from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct, describe
from ptrainx.core.errors import InputError
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.partition_spec import P, PartitionSpec
from ptrainx.mesh.placement import check_spec, contiguous_strides, is_first_owed, placements_of, spec_of, tensor_spec
from ptrainx.mesh.simulated import SimulatedDTensor, wrap_all
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.transfer import check_usable, default_mesh, device_put

__all__ = ["Need", "Target", "Targets", "fill", "targets"]


@dataclasses.dataclass(frozen=True)
class Need:
    """A local tensor that this process needs: its shape, and which boxes of the global value lie where in it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Target:
    """A leaf of the tree that is wanted.

    Attributes:
        path: where it stands.
        kind: `tensor`, `numpy`, `numpy scalar`, or a Python type; `any tensor` also takes numpy.
        text: as messages write it.
        shape: global; None for a Python value.
        dtype: its name in `DTYPES`.
        needs: the local tensors, by the ranks of this process; a box that two of them need is read once.
        build: from them to the value, in the order of `needs`.
        placement: equal for leaves whose values may be one object.
        keep: gives the value of `like`, where it has one, for a leaf that the checkpoint lacks.
    """

    path: paths.TypedPath
    kind: str
    text: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    numpy: str = ""
    needs: tuple[Need, ...] = ()
    build: Callable[[list[torch.Tensor]], Any] = lambda locals_: locals_[0]
    placement: Any = None
    keep: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Targets:
    """All that is wanted, in the order of the leaves, and how it becomes a tree."""

    targets: list[Target]
    treedef: px_tree.TreeDef


def targets(like: Any, specs: SpecTree, mesh: Mesh | None) -> Targets:
    """What a restore is to give.

    Raises:
        InputError: a leaf of `like` that is no value and no shape.
        MeshError, SpecError, TreeError: specs that don't fit.
    """
    flat = paths.flatten(like)
    chosen = spread(specs, like, "like")
    if mesh is None and any(spec is not None for spec in chosen):
        mesh = default_mesh([leaf for leaf in flat.leaves if isinstance(leaf, DTensor)])
    if mesh is not None:
        mesh.check_alive()
    found = [_target(path, leaf, spec, mesh) for path, leaf, spec in zip(flat.paths, flat.leaves, chosen)]
    return Targets(found, flat.treedef)


def _target(path: paths.TypedPath, leaf: Any, spec: PartitionSpec | None, mesh: Mesh | None) -> Target:
    where = f"like{paths.name(path)}" if path else "like"
    if isinstance(leaf, (torch.Tensor, ShapeDtypeStruct)):
        if isinstance(leaf, DTensor) and spec is None and mesh is None:
            return _as_placed(path, leaf, where)
        if mesh is not None:
            return _by_spec(path, leaf, _own_spec(leaf, mesh) if spec is None else spec, mesh, where)
        return _plain(path, leaf)
    if isinstance(leaf, np.ndarray):
        return _array(path, leaf, "numpy")
    if isinstance(leaf, np.generic):
        return _array(path, leaf, "numpy scalar")
    text = scalars.to_text(leaf)
    if text is None:
        raise InputError(
            f"restore: {where} says neither a value nor a shape",
            got=describe(leaf),
            expected="a tensor, an array, a px.ShapeDtypeStruct, or a Python value",
        )
    return Target(path, text[0], text[0], keep=lambda: leaf)


def _own_spec(leaf: Any, mesh: Mesh) -> PartitionSpec:
    """Where a leaf goes for which a mesh but no spec is given: as it was, if the mesh has its axes; else everywhere."""
    from_mesh = leaf.device_mesh.mesh_dim_names if isinstance(leaf, DTensor) else None
    if from_mesh is None or not set(from_mesh) <= set(mesh.axis_names):
        return P()
    return spec_of(leaf)


def _plain(path: paths.TypedPath, leaf: Any) -> Target:
    device = leaf.device if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" else torch.device("cpu")
    shape = tuple(leaf.shape)
    return Target(
        path,
        "tensor" if isinstance(leaf, torch.Tensor) else "any tensor",
        describe(leaf),
        shape,
        dtype_name(leaf.dtype),
        needs=(_all_of(shape),),
        build=lambda locals_: locals_[0].to(device),
        placement=("plain", device),
        keep=(lambda: leaf) if _has_data(leaf) else None,
    )


def _has_data(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and not tc.is_fake(leaf)


def _all_of(shape: tuple[int, ...]) -> Need:
    return Need(shape, (Piece(whole(shape), (0,) * len(shape)),))


def _array(path: paths.TypedPath, leaf: Any, kind: str) -> Target:
    name, shape = leaf.dtype.str, tuple(leaf.shape)
    dtype = np.dtype(name)

    def build(locals_: list[torch.Tensor]) -> Any:
        array = locals_[0].numpy().astype(dtype, copy=False)
        return array[()] if kind == "numpy scalar" else array

    return Target(
        path,
        kind,
        describe(leaf),
        shape,
        numpy=name,
        needs=(_all_of(shape),),
        build=build,
        placement=kind,
        keep=lambda: leaf,
    )


def _by_spec(path: paths.TypedPath, leaf: Any, spec: PartitionSpec, mesh: Mesh, where: str) -> Target:
    shape = tuple(leaf.shape)
    check_spec(spec, mesh, shape, where)
    keep = (lambda: device_put(leaf, spec, mesh)) if _has_data(leaf) else None
    if not shape and not spec.unreduced:  # a 0-d value is a plain tensor, as everywhere
        return dataclasses.replace(
            _plain(path, leaf), build=lambda locals_: locals_[0].to(mesh.device), placement="0-d", keep=keep
        )
    placements = placements_of(spec, mesh)
    made = tensor_spec(mesh.device_mesh, spec, mesh, leaf)
    needs = _needs(shape, placements, tuple(mesh.shape.values()), [mesh.rank_coords(rank) for rank in mesh.ranks])

    def build(locals_: list[torch.Tensor]) -> Any:
        owed = [
            local if is_first_owed(spec, mesh, rank) else torch.zeros_like(local)
            for rank, local in zip(mesh.ranks, locals_)
        ]
        return _wrap([local.to(mesh.device) for local in owed], made, mesh.simulated)

    return Target(
        path, "any tensor", describe(leaf), shape, dtype_name(leaf.dtype), "", needs, build, (id(mesh), spec), keep
    )


def _needs(shape: tuple[int, ...], placements: Any, sizes: Any, coords: Any) -> tuple[Need, ...]:
    found = []
    for own in coords:
        at = (shape, tuple(placements), tuple(sizes), tuple(own))
        found.append(Need(local_shape(*at), pieces(*at)))
    return tuple(found)


def _as_placed(path: paths.TypedPath, leaf: DTensor, where: str) -> Target:
    """A leaf that goes where a placed value of `like` lies, its placement as it is."""
    check_usable(leaf, where)
    mesh, shape = leaf.device_mesh, tuple(leaf.shape)
    if any(placement.is_partial() for placement in leaf.placements):
        raise InputError(
            f"restore: in {where} a sum is still owed",
            got=f"{describe(leaf)} {leaf.placements}",
            fix="pay it with px.reshard, or pass px.eval_shape(...) and specs= instead of values",
        )
    simulated = isinstance(leaf, SimulatedDTensor)
    if simulated:
        names = [coords_of(i, tuple(mesh.shape)) for i in range(mesh.size())]
    else:
        own = mesh.get_coordinate()
        names = [] if own is None else [tuple(own)]
    made = leaf._spec
    if tuple(made.stride) != contiguous_strides(shape):
        made = tc.make_spec(mesh, tuple(leaf.placements), shape, contiguous_strides(shape), leaf.dtype)
    needs = _needs(shape, leaf.placements, tuple(mesh.shape), names)
    device = leaf._local_tensor.device

    def build(locals_: list[torch.Tensor]) -> Any:
        ready = [local.to(device) for local in locals_] or [torch.empty(0, dtype=leaf.dtype, device=device)]
        return _wrap(ready, made, simulated)

    placement = (id(mesh), tuple(leaf.placements))
    return Target(
        path, "any tensor", describe(leaf), shape, dtype_name(leaf.dtype), "", needs, build, placement, lambda: leaf
    )


def _wrap(locals_: list[torch.Tensor], spec: Any, simulated: bool) -> Any:
    return wrap_all(locals_, spec) if simulated else tc.wrap_local(locals_[0], spec)


def fill(target: Target, dtype: torch.dtype, read: Callable[[Box, torch.Tensor], None]) -> list[torch.Tensor]:
    """The local tensors that a leaf needs; `read` fills a place with a box of its value, once for equal boxes."""
    done: dict[Box, torch.Tensor] = {}
    found = []
    for need in target.needs:
        local = torch.empty(need.shape, dtype=dtype)
        for piece in need.pieces:
            place = local[inside(piece.box, piece.box.offset, piece.local)]
            if piece.box in done:
                place.copy_(done[piece.box])
            else:
                read(piece.box, place)
                done[piece.box] = place
        found.append(local)
    return found
