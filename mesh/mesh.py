"""Meshes: a named grid of devices, real, simulated in one process, or abstract."""

from __future__ import annotations

import contextvars
import functools
import math
import weakref
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptrainx.core import torch_compat_world
from ptrainx.core.errors import MeshError
from ptrainx.mesh.axes import axes_text, check_axes, check_world, fill_in
from ptrainx.mesh.virtual import VirtualDeviceMesh, axis_groups, next_uid
from ptrainx.mesh.world import World, current_world, initialize

__all__ = ["AbstractMesh", "Mesh", "ambient_mesh", "epoch_of", "make_mesh"]

_ambient: contextvars.ContextVar[tuple[AbstractMesh, ...]] = contextvars.ContextVar("ptrainx_meshes", default=())

# The same axes give the same simulated devices for as long as a mesh or a value uses them, so that a notebook's cell
# can be run again and its values meet.
_simulated: weakref.WeakValueDictionary[tuple, VirtualDeviceMesh] = weakref.WeakValueDictionary()


class AbstractMesh:
    """Axis names and sizes without devices: for planning, and for tracing up to `Lowered`.

    Two abstract meshes with the same axes in the same order are equal.

    Args:
        axes: axis name to size, major to minor; or by keyword: `AbstractMesh(data=128, model=8)`.

    >>> AbstractMesh(data=128, model=8).size
    1024
    """

    simulated = False
    epoch = 0
    one_backend = True  # whether one torch.distributed backend carries all axes

    def __init__(self, axes: Mapping[str, int] | None = None, /, **axis_sizes: int):
        self._shape = check_axes(axes, axis_sizes)
        self._uid = next_uid()
        self._views: dict[int, VirtualDeviceMesh] = {}

    @property
    def shape(self) -> dict[str, int]:
        """Axis name to size, major to minor."""
        return dict(self._shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes, major to minor."""
        return tuple(self._shape)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self._shape.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose programs this process traces: its own, or all of a simulated mesh."""
        return (0,)

    def covers(self, mesh: AbstractMesh) -> bool:
        """Whether what is meant for another mesh may run here."""
        return self == mesh

    def rank_view(self, rank: int) -> VirtualDeviceMesh:
        """The mesh as a rank sees it, for tracing that rank's program."""
        if rank not in self._views:
            VirtualDeviceMesh(tuple(self._shape.values()), self.axis_names, rank, self._uid, self._views)
        view = self._views[rank]
        view.ensure_registered()
        return view

    def rank_coords(self, rank: int) -> tuple[int, ...]:
        """A rank's position, one int an axis."""
        coords = []
        for n in reversed(self._shape.values()):
            rank, c = divmod(rank, n)
            coords.append(c)
        return tuple(reversed(coords))

    def __enter__(self) -> Self:
        _ambient.set((*_ambient.get(), self))
        return self

    def __exit__(self, *exc: Any) -> None:
        _ambient.set(_ambient.get()[:-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AbstractMesh) and (self is other or self._identity == other._identity)

    def __hash__(self) -> int:
        return hash(self._identity)

    @functools.cached_property
    def _identity(self) -> tuple:
        return type(self), *self._shape.items()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._axes_text()})"

    def _axes_text(self) -> str:
        return axes_text(self._shape)


class Mesh(AbstractMesh):
    """A named grid of devices over a torch `DeviceMesh`; made by `make_mesh`.

    `with mesh:` makes it the mesh of what is jitted or placed inside. Two meshes are equal if they have the same axes
    over the same devices of the same world.

    Attributes:
        device_mesh: the torch DeviceMesh; on a simulated mesh, of virtual devices.
        simulated: whether all devices are simulated in this process.
    """

    def __init__(self, device_mesh: DeviceMesh, *, world: World | None):
        super().__init__(dict(zip(device_mesh.mesh_dim_names or (), device_mesh.shape)))
        if isinstance(device_mesh, VirtualDeviceMesh):
            self._uid, self._views = device_mesh.view_id[0], device_mesh.views
        self.simulated = world is None
        self.device_mesh = device_mesh
        self.device_type: str = device_mesh.device_type
        self._world = world
        self._position = _position(device_mesh)
        self._groups: dict[tuple[str, ...], Any] = {}
        self.epoch = 0 if world is None else world.epoch
        # From a placed value back to its mesh; weak, since the torch mesh must not keep ours alive.
        device_mesh.ptrainx_mesh = weakref.ref(self)  # type: ignore[attr-defined]
        device_mesh.ptrainx_epoch = self.epoch  # type: ignore[attr-defined]

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """The mesh over a torch `DeviceMesh` that somebody else made, or that a placed value lives on.

        Args:
            device_mesh: a mesh with named dims, over all processes or some of them (`mesh["data"]`), this one among
                them.

        Raises:
            MeshError: dims without names, a world that has ended, or a mesh that this process is no part of.

        >>> mesh = make_mesh(data=2, simulate=True)
        >>> Mesh.from_device_mesh(mesh.device_mesh) is mesh
        True
        """
        if isinstance(device_mesh, VirtualDeviceMesh):
            device_mesh = device_mesh.views[0]
        known = getattr(device_mesh, "ptrainx_mesh", lambda: None)()
        if known is not None:
            return known
        if not device_mesh.mesh_dim_names:
            raise MeshError(
                f"{device_mesh} has dims without names",
                fix="name them: init_device_mesh(..., mesh_dim_names=('data', 'model'))",
            )
        if isinstance(device_mesh, VirtualDeviceMesh):
            return cls(device_mesh, world=None)
        world = current_world()
        if world.epoch == 0 or epoch_of(device_mesh) != world.epoch:
            raise MeshError(
                f"{device_mesh} belongs to a world that has ended",
                fix="make a new mesh after px.initialize, and place the values on it",
            )
        if device_mesh.get_coordinate() is None:
            raise MeshError(
                f"rank {world.rank} is no part of {device_mesh}",
                got=f"the mesh of ranks {device_mesh.mesh.flatten().tolist()}",
                fix="use a mesh that this process is part of",
            )
        return cls(device_mesh, world=world)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size)) if self.simulated else (self._position,)

    @property
    def rank(self) -> int:
        """This process's place in the mesh, counted along the axes, major to minor; 0 on a simulated mesh."""
        return self.ranks[0]

    @property
    def coords(self) -> tuple[int, ...]:
        """This rank's position, one int an axis."""
        return self.rank_coords(self.rank)

    @property
    def device(self) -> torch.device:
        """Where this process keeps its local tensors."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    @functools.cached_property
    def one_backend(self) -> bool:  # type: ignore[override]
        groups = [] if self.simulated else [self.device_mesh.get_group(axis) for axis in self.axis_names]
        return len({dist.get_backend(group) for group in groups}) < 2

    def group_over(self, axes: tuple[str, ...]) -> Any:
        """The process group over some axes together, of which this process is a member.

        Groups over several axes are made when they are first asked for, which all their members have to do in one
        order; the mesh keeps them until its world ends.
        """
        self.check_alive()
        if len(axes) == 1:
            return self.device_mesh.get_group(axes[0])
        if axes not in self._groups:
            dims = [self.axis_names.index(axis) for axis in axes]
            places = next(g for g in axis_groups(tuple(self._shape.values()), *dims) if self._position in g)
            devices = self.device_mesh.mesh.flatten()[places].tolist()
            self._groups[axes] = dist.new_group(devices, use_local_synchronization=True)
        return self._groups[axes]

    def check_alive(self) -> None:
        """Raises MeshError if the world that the mesh was made in has ended."""
        if self._world is not None and current_world().epoch != self.epoch:
            raise MeshError(
                f"{self} belongs to a world that has ended",
                fix="make a new mesh after px.initialize, and place the values on it",
            )

    @functools.cached_property
    def _identity(self) -> tuple:
        devices = self._uid if self.simulated else tuple(self.device_mesh.mesh.flatten().tolist())
        return type(self), *self._shape.items(), self.device_type, self.simulated, self.epoch, devices

    def __repr__(self) -> str:
        where = "simulated" if self.simulated else f"device={self.device_type!r}"
        return f"Mesh({self._axes_text()}, {where})"


def epoch_of(device_mesh: DeviceMesh) -> int:
    """The epoch of the world that a torch DeviceMesh belongs to: 0 for virtual devices, -1 if that world has ended."""
    if isinstance(device_mesh, VirtualDeviceMesh):
        return 0
    epoch = getattr(device_mesh, "ptrainx_epoch", None)
    now = current_world().epoch
    if epoch is None and torch_compat_world.groups_are_alive(device_mesh):
        epoch = device_mesh.ptrainx_epoch = now  # type: ignore[attr-defined]
    return epoch if epoch == now else -1


def _position(device_mesh: DeviceMesh) -> int:
    if isinstance(device_mesh, VirtualDeviceMesh):
        return 0
    place = 0
    for n, c in zip(device_mesh.shape, device_mesh.get_coordinate() or ()):
        place = place * n + int(c)
    return place


def make_mesh(
    axes: Mapping[str, int] | None = None,
    /,
    *,
    device: str | None = None,
    simulate: bool = False,
    backends: Mapping[str, str] | None = None,
    **axis_sizes: int,
) -> Mesh:
    """Makes a mesh over the processes of the world, joining it first if need be.

    Args:
        axes: axis name to size, major to minor, or the same by keyword. One size may be -1: what is left.
        device: "cuda" or "cpu"; CUDA if there is any, else CPU. A simulated mesh is on the CPU.
        simulate: make this process play every device of the mesh, like JAX's forced host devices.
        backends: axis name to the torch.distributed backend of its collectives.

    Returns:
        the mesh. Without axes: one axis "data" over all processes.

    Raises:
        MeshError: the mesh does not have exactly as many devices as the world has processes; bad names or sizes.

    >>> make_mesh(data=4, model=2, simulate=True).shape
    {'data': 4, 'model': 2}
    """
    sizes = check_axes(axes, axis_sizes, free=True) if (axes or axis_sizes) else {"data": -1}
    _check_backends(backends, sizes)
    if simulate:
        if -1 in sizes.values():
            raise MeshError(
                f"a simulated mesh has no size to fill in for -1: {axes_text(sizes)}", fix="give every axis a size"
            )
        if device not in (None, "cpu"):
            raise MeshError(f"a simulated mesh is on the CPU, not on {device!r}", fix="leave out device=")
        return _simulated_mesh(sizes)
    device = _check_device(device)
    world = initialize()
    sizes = fill_in(sizes, world.size)
    check_world(sizes, world.size)
    return Mesh(_torch_mesh(device, sizes, backends), world=world)


def _torch_mesh(device: str, sizes: dict[str, int], backends: Mapping[str, str] | None) -> DeviceMesh:
    override: Any = dict(backends) if backends else None
    try:
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=override)
    except (RuntimeError, ValueError, AssertionError) as error:  # torch asserts that it knows a backend
        raise MeshError(
            f"a mesh of {axes_text(sizes)} on {device!r} could not be made: {error}",
            got=f"backends={override}" if override else None,
            fix="check that device and backends are available (`ptrainx doctor`)",
        ) from error


def _simulated_mesh(sizes: dict[str, int]) -> Mesh:
    key = tuple(sizes.items())
    view = _simulated.get(key)
    if view is None:
        view = VirtualDeviceMesh(tuple(sizes.values()), tuple(sizes), 0, next_uid(), {})
        _simulated[key] = view
    return Mesh.from_device_mesh(view)


def ambient_mesh() -> AbstractMesh | None:
    """The mesh of the innermost `with mesh:`, or None."""
    stack = _ambient.get()
    return stack[-1] if stack else None


def _check_device(device: Any) -> str:
    available = torch.cuda.is_available()
    if device is None:
        return "cuda" if available else "cpu"
    kind = device.type if isinstance(device, torch.device) and device.index is None else device
    if kind not in ("cpu", "cuda"):
        raise MeshError(
            f"a mesh has no device {str(device)!r}",
            expected="'cuda' or 'cpu', without an index: each process uses its own",
        )
    if kind == "cuda" and not available:
        raise MeshError("there is no CUDA device here", got="device='cuda'", fix="leave out device=, or use 'cpu'")
    return kind


def _check_backends(backends: Mapping[str, str] | None, sizes: Mapping[str, int]) -> None:
    unknown = sorted(set(backends or ()) - set(sizes))
    if unknown:
        raise MeshError(
            f"backends= names axes that the mesh does not have: {', '.join(map(repr, unknown))}",
            expected=f"one of {', '.join(map(repr, sizes))}",
        )
