"""Between partition specs and DTensor placements, and which block of a value a rank holds."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import MeshError, SpecError
from ptrainx.mesh.mesh import AbstractMesh
from ptrainx.mesh.partition_spec import P, PartitionSpec, axes_of

__all__ = [
    "check_spec",
    "contiguous_strides",
    "is_first_owed",
    "local_block",
    "local_shape",
    "placements_of",
    "replicate",
    "spec_of",
    "spec_of_placements",
    "tensor_spec",
    "trace_placements",
    "uneven_axes",
]


def placements_of(spec: PartitionSpec, mesh: AbstractMesh) -> tuple[Placement, ...]:
    """A spec as DTensor writes it: one placement a mesh axis.

    >>> placements_of(P("data"), AbstractMesh(data=2, model=2))
    (Shard(dim=0), Replicate())
    """

    def one(axis: str) -> Placement:
        dim = spec.dim_of(axis)
        if dim is not None:
            return Shard(dim)
        return Partial("sum") if axis in spec.unreduced else Replicate()

    return tuple(one(axis) for axis in mesh.axis_names)


def trace_placements(spec: PartitionSpec, mesh: AbstractMesh) -> tuple[Any, ...]:
    """A spec as a trace sees it. An axis of size 1 splits nothing, and must not stand in the way of a view."""
    sizes = mesh.shape.values()
    return tuple(Replicate() if n == 1 else p for n, p in zip(sizes, placements_of(spec, mesh)))


def spec_of_placements(
    placements: Sequence[Placement], axis_names: Sequence[str], ndim: int, sizes: Sequence[int] | None = None
) -> PartitionSpec:
    """DTensor placements as a spec.

    Args:
        placements: one a mesh axis.
        axis_names: the mesh axes.
        ndim: the dims of the value.
        sizes: axis sizes, which tell where in a tuple of axes a strided shard belongs.

    >>> spec_of_placements((Shard(0), Partial(), Shard(0)), ("data", "model", "expert"), 2)
    P(('data', 'expert'), None, unreduced=('model',))
    """
    entries: list[list[str]] = [[] for _ in range(ndim)]
    owed = []
    size_of = dict(zip(axis_names, sizes or ()))
    # From the minor axis up: an axis is major to those after it, unless its shard is strided over some of them.
    for axis, placement in reversed(list(zip(axis_names, placements))):
        if placement.is_partial():
            owed.append(axis)
        elif tc.is_strided_shard(placement) or isinstance(placement, Shard):
            entry = entries[placement.dim % max(ndim, 1)]  # type: ignore[attr-defined]
            entry.insert(_depth(placement, entry, size_of), axis)
    return P(*(tuple(entry) for entry in entries), unreduced=owed)


def _depth(placement: Any, entry: list[str], size_of: dict[str, int]) -> int:
    """How many axes of an entry are major to the one that a placement stands for."""
    if not tc.is_strided_shard(placement):
        return 0
    depth, parts = 0, 1
    while depth < len(entry) and parts < placement.split_factor:
        parts *= size_of.get(entry[depth], placement.split_factor)
        depth += 1
    return depth


def spec_of(value: DTensor) -> PartitionSpec:
    """The partition spec of a placed value.

    Raises:
        MeshError: the value's mesh has dims without names.
    """
    mesh = value.device_mesh
    if not mesh.mesh_dim_names:
        raise MeshError(
            f"{mesh} has dims without names, so its values have no partition spec",
            fix="name them: init_device_mesh(..., mesh_dim_names=('data', 'model'))",
        )
    return spec_of_placements(value.placements, mesh.mesh_dim_names, value.ndim, mesh.shape)


def replicate(value: DTensor) -> DTensor:
    """A placed value with every rank holding all of it, sums paid; one collective an axis, the minor axes first."""
    placements = list(value.placements)
    steps = [len(placements) - 1 - i for i in range(len(placements))]
    if any(tc.is_strided_shard(placement) for placement in placements):
        steps = []  # the minor axis need not be the last one
    for i in steps:
        if not placements[i].is_replicate():
            placements[i] = Replicate()
            value = value.redistribute(value.device_mesh, placements)
    return value.redistribute(value.device_mesh, [Replicate()] * len(placements)) if not steps else value


def check_spec(
    spec: PartitionSpec, mesh: AbstractMesh, shape: Sequence[int], where: str = "value", even: bool = False
) -> None:
    """Refuses a spec that does not fit its mesh or the shape of its value.

    A dim may be cut unevenly by the last of its axes, as `torch.chunk` cuts it: the last ranks have less, or nothing.

    Args:
        spec: the spec.
        mesh: the mesh.
        shape: the value's global shape.
        where: how messages call the value.
        even: all ranks have to hold equal parts.

    Raises:
        SpecError: an unknown axis, more entries than dims, axes of one dim out of mesh order, a dim that its axes do
            not divide.
    """
    sizes = mesh.shape
    for axis in (*spec.axes, *spec.unreduced):
        if axis not in sizes:
            raise SpecError(
                f"{where}: {spec} names axis {axis!r}, which the mesh does not have",
                got=f"axis {axis!r}",
                expected=f"one of {', '.join(map(repr, sizes))}",
                fix=f"add the axis to make_mesh (its size may be 1), or take {axis!r} out of the spec",
            )
    if len(spec) > len(shape) and any(e is not None for e in spec.entries[len(shape) :]):
        raise SpecError(
            f"{where}: {spec} has {len(spec)} entries for a value of {len(shape)} dims",
            got=f"shape {tuple(shape)}",
            expected=f"at most {len(shape)} entries",
            fix="one entry a dim; P() replicates",
        )
    for dim, (n, entry) in enumerate(zip(shape, spec.entries)):
        axes = axes_of(entry)
        order = [a for a in mesh.axis_names if a in axes]
        if list(axes) != order:
            raise SpecError(
                f"{where}: dim {dim} is split by {axes}, which is not the order of the mesh's axes",
                got=f"{spec} on {mesh}",
                expected=f"{tuple(order)}",
                fix="list a dim's axes in mesh order, or make the mesh with its axes in the other order",
            )
        cutting = [a for a in axes if sizes[a] > 1]
        parts = math.prod(sizes[a] for a in (cutting if even else cutting[:-1]))
        if n % parts:
            split = " x ".join(f"{a}={sizes[a]}" for a in axes if even or a in cutting[:-1])
            raise SpecError(
                f"{where}: dim {dim} of size {n} is not divisible by {split}",
                got=f"shape {tuple(shape)} with {spec}",
                expected=f"a multiple of {parts}",
                fix=f"pad dim {dim} to {-(-n // parts) * parts}, split another dim, or leave it unsplit",
            )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(int(n), 1)
    return tuple(reversed(strides))


def tensor_spec(device_mesh: Any, spec: PartitionSpec, mesh: AbstractMesh, like: Any) -> Any:
    """The DTensorSpec of a contiguous global value with the shape and dtype of `like`.

    Equal ones are one object as long as it is in use: a step is found by its arguments' specs, and comparing them field
    by field costs more than all else that a call does with a leaf.
    """
    known = device_mesh.__dict__.setdefault("ptrainx_specs", weakref.WeakValueDictionary())
    key = (placements_of(spec, mesh), tuple(like.shape), like.dtype)
    found = known.get(key)
    if found is None:
        found = known[key] = tc.make_spec(device_mesh, key[0], like.shape, contiguous_strides(like.shape), like.dtype)
    return found


def local_block(spec: PartitionSpec, mesh: AbstractMesh, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
    """The slices of the global value that a rank holds; for a spec that `check_spec` has passed.

    A dim is cut axis by axis, in chunks rounded up, as DTensor cuts it.

    >>> [local_block(P("data"), AbstractMesh(data=3), (4,), rank) for rank in range(3)]
    [(slice(0, 2, None),), (slice(2, 4, None),), (slice(4, 4, None),)]
    """
    coords = dict(zip(mesh.axis_names, mesh.rank_coords(rank)))
    sizes = mesh.shape
    block = []
    for dim, n in enumerate(shape):
        start, size = 0, n
        for axis in axes_of(spec[dim]) if dim < len(spec) else ():
            chunk = -(-size // sizes[axis])
            low = min(coords[axis] * chunk, size)
            start, size = start + low, min(chunk, size - low)
        block.append(slice(start, start + size))
    return tuple(block)


def local_shape(spec: PartitionSpec, mesh: AbstractMesh, shape: Sequence[int], rank: int = 0) -> tuple[int, ...]:
    """The shape of a rank's part, by default the largest; for a spec that `check_spec` has passed."""
    return tuple(s.stop - s.start for s in local_block(spec, mesh, shape, rank))


def uneven_axes(value: DTensor) -> set[int]:
    """The mesh dims that cut a dim of the value into parts that are not equal."""
    found = set()
    left = list(value.shape)
    for i, placement in enumerate(value.placements):
        if placement.is_shard() or tc.is_strided_shard(placement):
            dim, n = placement.dim, value.device_mesh.size(i)  # type: ignore[attr-defined]
            if left[dim] % n:
                found.add(i)
            left[dim] = -(-left[dim] // n)
    return found


def is_first_owed(spec: PartitionSpec, mesh: AbstractMesh, rank: int) -> bool:
    """Whether a rank holds the value where a sum is owed (the others hold zeros)."""
    coords = dict(zip(mesh.axis_names, mesh.rank_coords(rank)))
    return all(coords[axis] == 0 for axis in spec.unreduced)
