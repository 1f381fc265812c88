"""A mesh cut finer than its devices: each device hosts a block of logical ranks.

What runs on a logical mesh is the same program whatever the devices, and so are its bits. A device hosts neighbours
along each axis, so that its part of a sharded value is theirs, one behind another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from ptrainx.core.errors import MeshError, SpecError
from ptrainx.mesh.axes import axes_text
from ptrainx.mesh.mesh import AbstractMesh, Mesh
from ptrainx.mesh.partition_spec import PartitionSpec, axes_of
from ptrainx.mesh.placement import check_spec

__all__ = ["LogicalMesh", "check_hosted", "logical_mesh"]


class LogicalMesh(AbstractMesh):
    """The axes of another mesh in finer parts.

    Args:
        physical: the mesh of devices.
        sizes: axis -> logical ranks along it, a multiple of the devices along it.

    >>> mesh = LogicalMesh(AbstractMesh(data=2, model=2), {"data": 4, "model": 2})
    >>> [mesh.hosted(device) for device in range(4)]
    [(0, 2), (1, 3), (4, 6), (5, 7)]
    """

    # Several axes are taken one after another, whatever carries them: which sums are formed must not depend on it.
    one_backend = False

    def __init__(self, physical: AbstractMesh, sizes: Mapping[str, int]):
        super().__init__(sizes)
        self.physical = physical

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for device in self.physical.ranks for rank in self.hosted(device)))

    @property
    def device(self) -> torch.device:
        """Where local tensors are."""
        return self.physical.device if isinstance(self.physical, Mesh) else torch.device("cpu")

    def covers(self, mesh: AbstractMesh) -> bool:
        return self == mesh or self.physical == mesh

    def finer(self, axis: str) -> int:
        """How many logical ranks a device hosts along an axis."""
        return self.shape[axis] // self.physical.shape[axis]

    def hosted(self, device: int) -> tuple[int, ...]:
        """The logical ranks of a device, in order."""
        blocks = [
            range(place * self.finer(axis), (place + 1) * self.finer(axis))
            for axis, place in zip(self.axis_names, self.physical.rank_coords(device))
        ]
        return tuple(self.rank_at(coords) for coords in itertools.product(*blocks))

    def rank_at(self, coords: Sequence[int]) -> int:
        """The logical rank at a position."""
        rank = 0
        for n, place in zip(self.shape.values(), coords):
            rank = rank * n + place
        return rank


def logical_mesh(mesh: AbstractMesh, shards: int | Mapping[str, int], where: str) -> LogicalMesh:
    """The logical mesh of a mesh, one object as long as the mesh lives.

    Args:
        mesh: of devices.
        shards: logical ranks along each axis, or along all.
        where: for messages.

    Raises:
        MeshError: an axis that the other side does not have, or one whose devices do not divide its logical ranks.
    """
    sizes = dict.fromkeys(mesh.axis_names, shards) if isinstance(shards, int) else dict(shards)
    if set(sizes) != set(mesh.axis_names):
        raise MeshError(
            f"{where}: logical_shards and the mesh have different axes",
            got=f"logical_shards of {', '.join(map(repr, sizes)) or 'no axis'}",
            expected=f"one number for each of {', '.join(map(repr, mesh.axis_names))}",
            fix="name every axis of the mesh; an axis of the mesh may have size 1",
        )
    sizes = {axis: sizes[axis] for axis in mesh.axis_names}
    uneven = [axis for axis, n in mesh.shape.items() if sizes[axis] % n]
    if uneven:
        multiple = ", ".join(f"a multiple of {mesh.shape[axis]} for {axis!r}" for axis in uneven)
        raise MeshError(
            f"{where}: the devices of {mesh} can't share {axes_text(sizes)} logical shards evenly",
            expected=multiple,
            fix="give logical_shards= numbers that every mesh you compare divides, such as "
            f"logical_shards={ {axis: _common_multiple(sizes[axis], n) for axis, n in mesh.shape.items()} }",
        )
    known = mesh.__dict__.setdefault("_logical_meshes", {})
    key = tuple(sizes.items())
    if key not in known:
        known[key] = LogicalMesh(mesh, sizes)
    return known[key]


def _common_multiple(a: int, b: int) -> int:
    return next(n for n in range(a, a * b + 1, a) if n % b == 0)


def check_hosted(spec: PartitionSpec, mesh: LogicalMesh, shape: Sequence[int], where: str) -> None:
    """Refuses a placement that the logical ranks of a device can't hold together.

    Raises:
        SpecError: a dim that its axes' logical shards do not divide, a sum that is owed, or a dim whose logical shards
            on a device are not neighbours.
    """
    check_spec(spec, mesh, shape, f"{where}, in {axes_text(mesh.shape)} logical shards")
    if spec.unreduced:
        raise SpecError(
            f"{where} owes a sum, whose addends would depend on the number of devices",
            got=str(spec),
            fix='pay it, P(...) without unreduced=, where reductions="ordered"',
        )
    for dim, entry in enumerate(spec.entries):
        axes = axes_of(entry)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if axes and shape[dim] % parts:
            raise SpecError(
                f"{where}: dim {dim} of size {shape[dim]} can't be cut into {parts} equal logical shards",
                got=f"{spec} with logical_shards={dict(mesh.shape)}",
                fix=f"pad the dim to {-(-shape[dim] // parts) * parts}, or choose other logical_shards",
            )
        for major, minor in itertools.combinations(axes, 2):
            if mesh.finer(major) > 1 and mesh.physical.shape[minor] > 1:
                sizes = {axis: mesh.physical.shape[axis] if axis == major else mesh.shape[axis] for axis in mesh.shape}
                raise SpecError(
                    f"{where}: dim {dim} is split by {axes}, and a device's logical shards of it are not neighbours",
                    got=f"{spec} on {mesh.physical} with logical_shards={dict(mesh.shape)}",
                    fix=f"split the dim by one axis, or give {major!r} as many logical shards as devices: {sizes}",
                )
