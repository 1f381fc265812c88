"""What every named collective does first: find its region, read its axes, make its operands per-shard values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ptrainx.core import tree as px_tree
from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError, MeshError, SpecError, TraceError
from ptrainx.core.torch_compat_functorch import in_functorch
from ptrainx.core.trace_context import current_trace, user_source
from ptrainx.mesh.per_shard import relation
from ptrainx.ops.collectives.region import Region

__all__ = ["AxisName", "dim_of", "divided", "map_leaves", "open_call", "refuse_owed"]

AxisName = str | Sequence[str]
"""A mesh axis, or several taken together, major to minor."""


def open_call(name: str, axis_name: AxisName) -> tuple[Region, tuple[str, ...], str]:
    """(the running region, the axes, the user's line) of a collective.

    Raises:
        TraceError: outside of any `shard_map`.
        MeshError: an axis that the mesh does not have, or one named twice.
    """
    source = user_source()
    trace = current_trace()
    region = None if trace is None else trace.region
    if region is None:
        raise TraceError(
            f"px.{name} is called outside of px.shard_map, where no value belongs to one rank",
            source=source,
            fix="call it in a function given to px.shard_map; on global values write x.sum() or px.reshard(x, spec)",
        )
    if in_functorch():
        raise TraceError(
            f"px.{name} is called inside torch.vmap, or another transform of torch.func",
            source=source,
            fix="call it outside of the mapped function, on the whole batch",
        )
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    unknown = [axis for axis in axes if axis not in region.sizes]
    if unknown or len(set(axes)) < len(axes) or not axes:
        raise MeshError(
            f"px.{name}: {axis_name!r} does not name axes of the mesh",
            got=repr(axis_name),
            expected=f"one of {', '.join(map(repr, region.sizes))}, or a tuple of several",
            source=source,
        )
    return region, axes, source


def map_leaves(name: str, fn: Callable[[Any], Any], tree: Any, region: Region, numbers: bool = False) -> Any:
    """Applies a function to each leaf as a per-shard value.

    Args:
        name: of the collective.
        fn: the function.
        tree: any pytree of tensors and numbers.
        region: the running region.
        numbers: whether only numbers will do, and no booleans.

    Raises:
        InputError: a boolean leaf where numbers are wanted.
    """

    def one(path: Any, leaf: Any) -> Any:
        value = region.trace.as_global(leaf)
        if numbers and value.dtype == torch.bool:
            where = px_tree.path_expr(path) or "x"
            raise InputError(
                f"px.{name}: {where} is a tensor of booleans", got=describe(value), fix="convert it: x.int()"
            )
        return fn(value)

    return px_tree.map_with_path(one, tree)


def dim_of(name: str, argument: str, dim: Any, x: torch.Tensor, extra: int = 0) -> int:
    """A dim of x, counted from the front.

    Raises:
        InputError: x has no such dim.
    """
    ndim = x.ndim + extra
    if isinstance(dim, int) and -ndim <= dim < ndim:
        return dim % ndim
    raise InputError(
        f"px.{name}: {argument}={dim!r} is no dim of a value of shape {tuple(x.shape)}",
        expected=f"from {-ndim} to {ndim - 1}" if ndim else "a value with a dim",
        source=user_source(),
    )


def divided(name: str, argument: str, dim: int, x: torch.Tensor, n: int, axes: Sequence[str], whole: bool) -> None:
    """Refuses a dim that does not divide into n parts, or, if `whole`, is not n itself.

    Raises:
        SpecError: it does not.
    """
    size = x.shape[dim]
    if (size == n) if whole else size % n == 0:
        return
    raise SpecError(
        f"px.{name}: {argument}={dim} has size {size}, and {' x '.join(axes)} has {n} ranks",
        got=f"a value of shape {tuple(x.shape)} on each rank",
        expected=f"size {n} (a larger one divides into parts with tiled=True)" if whole else f"a multiple of {n}",
        fix=f"pad the dim to {-(-size // n) * n}" if not whole else "pass tiled=True, or reshape the value",
        source=user_source(),
    )


def refuse_owed(name: str, x: Any, region: Region, axes: Sequence[str]) -> None:
    """Refuses an addend of a sum that is owed along the axes.

    Raises:
        SpecError: it is one.
    """
    owed = [axis for axis in axes if relation(x)[region.axis_names.index(axis)].is_partial()]
    if owed:
        raise SpecError(
            f"px.{name} of a sum that is still owed along {', '.join(map(repr, owed))}",
            got="each rank holds an addend of it",
            fix="pay it first with px.psum, or with px.psum_scatter",
            source=user_source(),
        )
