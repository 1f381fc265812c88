"""A torch `DeviceMesh` of devices that need not exist: what simulated and abstract meshes, and every trace, stand on.

Each view is the mesh as one rank sees it. Its process groups send nothing and belong to no world: their names are
unique for the life of the process, and joining, leaving or failing of the real world does not reach them.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ptrainx.core import torch_compat as tc

__all__ = ["VirtualDeviceMesh", "axis_groups", "next_uid"]

_uids = itertools.count()


def next_uid() -> int:
    """A number for a new virtual mesh, never given twice in a process."""
    return next(_uids)


def axis_groups(shape: tuple[int, ...], *dims: int) -> list[list[int]]:
    """The ranks of each group along one mesh dim, or along several, major to minor.

    >>> axis_groups((2, 2), 0)
    [[0, 2], [1, 3]]
    >>> axis_groups((2, 2), 0, 1)
    [[0, 1, 2, 3]]
    """
    grid = torch.arange(math.prod(shape)).reshape(shape)
    return grid.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, math.prod(shape[d] for d in dims)).tolist()


class VirtualDeviceMesh(DeviceMesh):
    """The view that `rank` has of a virtual mesh.

    DTensor caches what it works out by mesh: two views are equal only if they are of one mesh and one rank.

    Args:
        shape: axis sizes, major to minor.
        axis_names: axis names.
        rank: whose view this is.
        uid: the mesh's number, from `next_uid`.
        views: all views of the mesh made so far, by rank; this one is added.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axis_names: tuple[str, ...],
        rank: int,
        uid: int,
        views: dict[int, VirtualDeviceMesh],
    ):
        self.view_id = (uid, rank)
        self.views = views
        views[rank] = self
        ranks = torch.arange(math.prod(shape)).reshape(shape)
        super().__init__("cpu", ranks, mesh_dim_names=axis_names, _init_backend=False, _rank=rank)
        names = [f"ptrainx/virtual/{uid}/{rank}/{axis}" for axis in axis_names]
        self._dim_group_names = names  # type: ignore[assignment]
        self._pg_registry = {}
        self.group_ranks: dict[str, list[list[int]]] = {}
        for dim, name in enumerate(names):
            self.group_ranks[name] = axis_groups(shape, dim)
            self._pg_registry[name] = tc.fake_process_group(self.coordinate[dim], shape[dim], name)
        self.ensure_registered()

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's position, one int an axis."""
        assert self._coordinate_on_dim is not None
        return self._coordinate_on_dim

    def groups_called(self, name: str) -> list[list[int]]:
        """The ranks of each group of this name: along one axis, or along several, whose groups' names `*` joins."""
        if name not in self.group_ranks:
            dims = [self._dim_group_names.index(part) for part in name.split("*")]  # type: ignore[arg-type]
            self.group_ranks[name] = axis_groups(tuple(self.shape), *dims)
        return self.group_ranks[name]

    def ensure_registered(self) -> None:
        """Makes the groups known again after a real world's end has made torch forget every name."""
        for name, group in self._pg_registry.items():
            if not tc.group_is_registered(name):
                tc.register_process_group(name, group)

    def __hash__(self) -> int:
        return hash(self.view_id)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, VirtualDeviceMesh) and other.view_id == self.view_id)

    def get_rank(self) -> int:
        return self._rank

    def get_coordinate(self) -> Any:
        if tc.enabled_local_tensor_mode() is not None:
            return tc.all_local_coordinates(self)
        return self.coordinate

    def _sym_get_coordinate(self, index: int) -> Any:
        return self.get_coordinate()[index]

    def _is_current_rank_part_of_mesh(self) -> bool:
        return True

    def get_local_rank(self, mesh_dim: int | str | None = None) -> Any:
        if isinstance(mesh_dim, str):
            mesh_dim = self.mesh_dim_names.index(mesh_dim)  # type: ignore[union-attr]
        return self.get_coordinate()[mesh_dim or 0]

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis}={n}" for axis, n in zip(self.mesh_dim_names or (), self.shape))
        return f"VirtualDeviceMesh({axes}, rank={self._rank})"
