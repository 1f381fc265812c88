"""Meshes: a named grid of devices, real, simulated in one process, or abstract."""

from __future__ import annotations

import contextvars
import math
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptrainx.core.errors import MeshError
from ptrainx.mesh.virtual import VirtualDeviceMesh, next_uid
from ptrainx.mesh.world import World, current_world, initialize

__all__ = ["AbstractMesh", "Mesh", "ambient_mesh", "make_mesh"]

_ambient: contextvars.ContextVar[tuple[AbstractMesh, ...]] = contextvars.ContextVar("ptrainx_meshes", default=())

# The same axes give the same simulated mesh for as long as it is in use, so that a notebook's cell can be run again.
_simulated: weakref.WeakValueDictionary[tuple, Mesh] = weakref.WeakValueDictionary()


class AbstractMesh:
    """Axis names and sizes without devices: for planning, and for tracing up to `Lowered`.

    Args:
        axes: axis name to size, major to minor; or by keyword: `AbstractMesh(data=128, model=8)`.

    >>> AbstractMesh(data=128, model=8).size
    1024
    """

    simulated = False
    epoch = 0

    def __init__(self, axes: Mapping[str, int] | None = None, /, **axis_sizes: int):
        self._shape = _check_axes(axes, axis_sizes)
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

    def rank_view(self, rank: int) -> VirtualDeviceMesh:
        """The mesh as a rank sees it, for tracing that rank's program."""
        if rank not in self._views:
            self._views[rank] = VirtualDeviceMesh(tuple(self._shape.values()), self.axis_names, rank, self._uid)
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

    def __enter__(self) -> AbstractMesh:
        _ambient.set((*_ambient.get(), self))
        return self

    def __exit__(self, *exc: Any) -> None:
        _ambient.set(_ambient.get()[:-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{a}={n}' for a, n in self._shape.items())})"


class Mesh(AbstractMesh):
    """A named grid of devices over a torch `DeviceMesh`; made by `make_mesh`.

    `with mesh:` makes it the mesh of what is jitted or placed inside. Two meshes are equal if they have the same axes
    over the same devices of the same world.

    Attributes:
        device_mesh: the torch DeviceMesh; on a simulated mesh, of virtual devices.
        simulated: whether all devices are simulated in this process.
    """

    def __init__(self, axes: dict[str, int], *, device_mesh: DeviceMesh | None, world: World | None, device: str):
        super().__init__(axes)
        self.simulated = device_mesh is None
        self.device_type = device
        self.device_mesh: DeviceMesh = self.rank_view(0) if device_mesh is None else device_mesh
        # From a placed value back to its mesh; weak, since the torch mesh must not keep ours alive.
        self.device_mesh.ptrainx_mesh = weakref.ref(self)  # type: ignore[attr-defined]
        self._world = world
        self.epoch = 0 if world is None else world.epoch

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size)) if self._world is None else (self._world.rank,)

    @property
    def rank(self) -> int:
        """This process's rank; 0 on a simulated mesh."""
        return self.ranks[0]

    @property
    def coords(self) -> tuple[int, ...]:
        """This rank's position, one int an axis."""
        return self.rank_coords(self.rank)

    @property
    def device(self) -> torch.device:
        """Where this process keeps its local tensors."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    def check_alive(self) -> None:
        """Raises MeshError if the world that the mesh was made in has ended."""
        if self._world is not None and current_world().epoch != self._world.epoch:
            raise MeshError(
                f"{self} belongs to a world that has ended",
                fix="make a new mesh after px.initialize, and place the values on it",
            )

    def _identity(self) -> tuple:
        real = None if self.simulated else (self.epoch, tuple(self.device_mesh.mesh.flatten().tolist()))
        return tuple(self._shape.items()), self.device_type, real, self._uid if self.simulated else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self is other or self._identity() == other._identity())

    def __hash__(self) -> int:
        return hash((tuple(self._shape.items()), self.epoch, self.simulated))

    def __repr__(self) -> str:
        axes = ", ".join(f"{a}={n}" for a, n in self._shape.items())
        return f"Mesh({axes}{', simulated' if self.simulated else ''}, device={self.device_type!r})"


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
    sizes = _check_axes(axes, axis_sizes, free=True) if (axes or axis_sizes) else {"data": -1}
    if simulate:
        if -1 in sizes.values():
            raise MeshError(f"a simulated mesh has no size to fill in for -1: {sizes}", fix="give every axis a size")
        if device not in (None, "cpu"):
            raise MeshError(f"a simulated mesh is on the CPU, not on {device!r}", fix="leave out device=")
        return _simulated_mesh(sizes)
    world = initialize()
    sizes = _fill_in(sizes, world.size)
    if math.prod(sizes.values()) != world.size:
        raise MeshError(_size_problem(sizes, world), fix=_size_fix(sizes, world))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    override = {axis: backends[axis] for axis in sizes if axis in backends} if backends else None
    unknown = sorted(set(backends or ()) - set(sizes))
    if unknown:
        raise MeshError(f"backends= names axes that the mesh does not have: {unknown}", expected=str(tuple(sizes)))
    torch_mesh = init_device_mesh(
        device,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=override,  # type: ignore[arg-type]
    )
    return Mesh(sizes, device_mesh=torch_mesh, world=world, device=device)


def _simulated_mesh(sizes: dict[str, int]) -> Mesh:
    key = tuple(sizes.items())
    mesh = _simulated.get(key)
    if mesh is None:
        mesh = _simulated[key] = Mesh(sizes, device_mesh=None, world=None, device="cpu")
    return mesh


def ambient_mesh() -> AbstractMesh | None:
    """The mesh of the innermost `with mesh:`, or None."""
    stack = _ambient.get()
    return stack[-1] if stack else None


def _check_axes(axes: Mapping[str, int] | None, axis_sizes: Mapping[str, int], free: bool = False) -> dict[str, int]:
    if axes and axis_sizes:
        raise MeshError("axes are given both as a mapping and by keyword", fix="use one of the two forms")
    sizes = dict(axes or axis_sizes)
    if not sizes:
        raise MeshError("a mesh has at least one axis", fix="write make_mesh(data=2)")
    for axis, n in sizes.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise MeshError(f"{axis!r} is no axis name", expected="an identifier such as 'data'")
        if isinstance(n, bool) or not isinstance(n, int) or (n < 1 and not (free and n == -1)):
            raise MeshError(
                f"axis {axis!r} has size {n!r}", expected="a positive integer" + (", or -1" if free else "")
            )
    if list(sizes.values()).count(-1) > 1:
        raise MeshError(f"only one axis size can be -1: {sizes}", fix="give the other axes a size")
    return sizes


def _fill_in(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    if -1 not in sizes.values():
        return sizes
    known = math.prod(n for n in sizes.values() if n != -1)
    if world_size % known:
        raise MeshError(
            f"{sizes}: {world_size} processes can't be divided by {known}",
            fix=f"start a multiple of {known} processes, or change the other axes",
        )
    return {axis: world_size // known if n == -1 else n for axis, n in sizes.items()}


def _size_problem(sizes: dict[str, int], world: World) -> str:
    axes = ", ".join(f"{a}={n}" for a, n in sizes.items())
    processes = "1 process" if world.size == 1 else f"{world.size} processes"
    return f"a mesh of {axes} needs {math.prod(sizes.values())} devices, this world has {processes}"


def _size_fix(sizes: dict[str, int], world: World) -> str:
    n = math.prod(sizes.values())
    script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "script.py"
    if n > world.size:
        return f"start the program with `ptrainx run -n {n} {script}`, or try it in one process with simulate=True"
    return f"use every process (one axis size may be -1), or start {n}: `ptrainx run -n {n} {script}`"
