"""Axis names and sizes as a user writes them: checked, filled in, and held against the size of the world."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ptrainx.core.errors import MeshError

__all__ = ["axes_text", "check_axes", "check_world", "fill_in", "join_axes", "split_axes"]


def check_axes(axes: Mapping[str, int] | None, axis_sizes: Mapping[str, int], free: bool = False) -> dict[str, int]:
    """Axis name to size, from the two forms in which they are given.

    Args:
        axes: a mapping, or None.
        axis_sizes: keyword arguments.
        free: whether one size may be -1.

    Raises:
        MeshError: both forms or none, a name that is no identifier, a size that is no positive integer.
    """
    if axes and axis_sizes:
        raise MeshError("axes are given both as a mapping and by keyword", fix="use one of the two forms")
    if axes is not None and not isinstance(axes, Mapping):
        raise MeshError(
            f"a mesh is made from named axes, not from {axes!r}",
            expected="make_mesh(data=2, model=4) or make_mesh({'data': 2, 'model': 4})",
        )
    sizes: dict[str, Any] = dict(axes or axis_sizes)
    if not sizes:
        raise MeshError("a mesh has at least one axis", fix="write make_mesh(data=2)")
    for axis, n in sizes.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise MeshError(f"{axis!r} is no axis name", expected="an identifier such as 'data'")
        sizes[axis] = _check_size(axis, n, free)
    if list(sizes.values()).count(-1) > 1:
        raise MeshError(f"only one axis size can be -1: {axes_text(sizes)}", fix="give the other axes a size")
    return sizes


def _check_size(axis: str, n: Any, free: bool) -> int:
    # numpy's integers count as integers, booleans do not.
    size = int(n) if isinstance(n, numbers.Integral) and not isinstance(n, bool) else 0
    if size < 1 and not (free and size == -1):
        expected = "a positive integer, or -1 for what is left" if free else "a positive integer"
        raise MeshError(f"axis {axis!r} has size {n!r}", expected=expected)
    return size


def axes_text(sizes: Mapping[str, int]) -> str:
    """Names and sizes for messages.

    >>> axes_text({"data": 2, "model": 4})
    'data=2, model=4'
    """
    return ", ".join(f"{axis}={n}" for axis, n in sizes.items())


def fill_in(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    """The sizes with -1 replaced by what is left of the world.

    >>> fill_in({"data": -1, "model": 2}, 8)
    {'data': 4, 'model': 2}
    """
    if -1 not in sizes.values():
        return sizes
    known = math.prod(n for n in sizes.values() if n != -1)
    if world_size % known:
        raise MeshError(
            f"a mesh of {axes_text(sizes)} has nothing to fill in for -1: "
            f"{_processes(world_size)} can't be divided by {known}",
            fix=f"start a multiple of {known} processes (`ptrainx run -n {known} {_script()}`), change the other axes, "
            "or give every axis a size and try it in one process with simulate=True",
        )
    return {axis: world_size // known if n == -1 else n for axis, n in sizes.items()}


def _processes(n: int) -> str:
    return "1 process" if n == 1 else f"{n} processes"


def _script() -> str:
    return sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "script.py"


def check_world(sizes: dict[str, int], world_size: int) -> None:
    """Raises MeshError unless a mesh of these sizes has exactly as many devices as the world has processes."""
    n = math.prod(sizes.values())
    if n == world_size:
        return
    start = f"`ptrainx run -n {n} {_script()}`"
    if n > world_size:
        fix = f"start the program with {start}, or try it in one process with simulate=True"
    else:
        fix = f"use every process (one axis size may be -1), or start {n}: {start}"
    devices = "1 device" if n == 1 else f"{n} devices"
    problem = f"a mesh of {axes_text(sizes)} needs {devices}, this world has {_processes(world_size)}"
    raise MeshError(problem, fix=fix)


def join_axes(axes: Iterable[str]) -> str:
    """One name for several axes taken together, major to minor.

    >>> join_axes(["data", "model"])
    'data*model'
    """
    return "*".join(axes)


def split_axes(name: str) -> tuple[str, ...]:
    """The axes in a name from `join_axes`.

    >>> split_axes("data*model")
    ('data', 'model')
    """
    return tuple(name.split("*"))
