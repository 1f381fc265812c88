"""`jit(reductions="ordered")`: which logical mesh a program is compiled for, and what can't be; options of `jit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ptrainx.compile.trace import Argument
from ptrainx.core.errors import BackendError, InputError, MeshError, TraceError
from ptrainx.core.trace_context import TraceContext
from ptrainx.mesh.logical import LogicalMesh, check_hosted, logical_mesh
from ptrainx.mesh.mesh import AbstractMesh, Mesh

__all__ = ["BACKENDS", "LOGICAL_SHARDS", "REDUCTIONS", "check_inside", "check_options", "ordered_mesh"]

BACKENDS = ("graph", "inductor", "eager")
REDUCTIONS = ("fast", "ordered")
LOGICAL_SHARDS = 8
"""Into how many parts an ordered program cuts each axis of its mesh, if nobody says otherwise."""


def check_options(backend: str, reductions: str, shards: int | Mapping[str, int] | None) -> None:
    """Refuses options of `jit` that do not go together.

    Raises:
        InputError: an unknown value, numbers that are no positive integers, shards without ordered reductions.
        BackendError: an unknown backend, or one that does not order reductions.
    """
    if backend not in BACKENDS:
        raise BackendError(f"jit has no backend {backend!r}", expected=f"one of {', '.join(map(repr, BACKENDS))}")
    if reductions not in REDUCTIONS:
        raise InputError(f"jit has no reductions={reductions!r}", expected=f"one of {', '.join(map(repr, REDUCTIONS))}")
    if shards is not None and reductions != "ordered":
        raise InputError(
            "logical_shards= says how ordered reductions are cut, and the reductions are not ordered",
            got=f"reductions={reductions!r}",
            fix='add reductions="ordered"',
        )
    numbers: list[Any] = [1 if shards is None else shards]
    if isinstance(shards, Mapping):
        numbers = list(shards.values())
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
        raise InputError(f"logical_shards={shards!r}", expected='a positive integer, or one an axis: {"data": 8}')
    if reductions == "ordered" and backend != "graph":
        raise BackendError(
            f'reductions="ordered" does not run on backend={backend!r}',
            fix='leave out backend=: the "graph" backend keeps the order',
        )


def check_inside(name: str, mesh: AbstractMesh | None, ordered: bool, trace: TraceContext) -> None:
    """Refuses a jitted function inside another one that can't keep what it promises.

    Raises:
        MeshError: they are jitted for two meshes.
        TraceError: the inner one's reductions are ordered, the outer one's are not.
    """
    if mesh is not None and not trace.mesh.covers(mesh):
        raise MeshError(
            f"{name} is jitted for another mesh than {trace.name}, which calls it",
            got=str(mesh),
            expected=str(trace.mesh),
            fix="jit both for one mesh, or call one after the other",
        )
    if ordered and not isinstance(trace.mesh, LogicalMesh):
        raise TraceError(
            f"{name} is jitted with ordered reductions, and {trace.name}, which calls it, is not",
            fix=f'give {trace.name} reductions="ordered" too',
        )


def ordered_mesh(
    name: str, mesh: AbstractMesh, shards: int | Mapping[str, int], arguments: Sequence[Argument]
) -> LogicalMesh:
    """The logical mesh that a function is traced for.

    Raises:
        BackendError: devices that are no CPUs.
        MeshError: a mesh that does not divide the logical shards.
        SpecError: an argument that can't be cut so.
    """
    if isinstance(mesh, Mesh) and mesh.device_type != "cpu":
        raise BackendError(
            f'{name}: reductions="ordered" keeps its promise on CPU meshes only',
            got=str(mesh),
            fix="leave out reductions=, or make the mesh with device='cpu'",
        )
    logical = logical_mesh(mesh, shards, name)
    for argument in arguments:
        check_hosted(argument.spec, logical, argument.shape, f"{name}: argument {argument.path}")
    return logical
