"""From a key and a shape to a tensor: the checks, and how a draw is placed.

A plain key gives a plain tensor. A key that is a global value (a DTensor) gives a global value on its mesh: replicated,
or in any placement, each rank computing its own block alone. There is no communication either way.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.overrides import handle_torch_function, has_torch_function

from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError
from ptrainx.mesh.per_shard import PerShardMesh, joined, like_per_shard
from ptrainx.mesh.placement import contiguous_strides
from ptrainx.mesh.simulated import on_all_ranks
from ptrainx.ops.random.operator import RANDOM

__all__ = ["Shape", "block_of", "check_key", "check_shape", "draw", "on_local", "overridable"]

Shape = int | Sequence[int]
F = TypeVar("F", bound=Callable[..., Any])


def overridable(fn: F) -> F:
    """Lets a running trace and a simulated mesh see the call as they see torch's own functions."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(call, tensors, *args, **kwargs)
        return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


def check_key(key: Any, where: str) -> None:
    """Refuses what is not a key.

    Raises:
        InputError: anything but an int32 tensor of shape (2,).
    """
    if isinstance(key, Tensor) and key.dtype == torch.int32 and tuple(key.shape) == (2,):
        return
    several = isinstance(key, Tensor) and key.dtype == torch.int32 and key.ndim > 1 and key.shape[-1] == 2
    raise InputError(
        f"px.random.{where}: key is not a random key",
        got=f"{describe(key)}, several keys" if several else describe(key),
        expected="i32[2]",
        fix="use one of them: k1, k2 = px.random.split(key)"
        if several
        else "make one with px.random.key(0), and more with px.random.split(key)",
    )


def check_shape(shape: Shape, where: str) -> tuple[int, ...]:
    """A shape as a tuple; a lone int is one dim.

    Raises:
        InputError: not integers, a negative size, more elements than 64 bits count.
    """
    try:
        sizes = tuple(operator.index(n) for n in (shape if isinstance(shape, Sequence) else (shape,)))
    except TypeError:
        sizes = (-1,)
    if min(sizes, default=0) < 0 or math.prod(sizes) >= 1 << 62:
        raise InputError(
            f"px.random.{where}: shape is not a shape",
            got=repr(shape),
            expected="a tuple of integers, none negative",
            fix="keep JAX's order of arguments: a shape such as (4, 8) comes right after the key (and bounds)",
        )
    return sizes


def draw(
    key: Tensor,
    shape: Sequence[int],
    dist: str,
    a: float = 0.0,
    b: float = 1.0,
    *,
    placements: Sequence[Placement] | None = None,
    like: DTensor | None = None,
) -> Tensor:
    """Draws a global array, or this rank's block of it.

    Args:
        key: int32[2], plain or a global value.
        shape: of the global array.
        dist, a, b: see `ptrainx.ops.random.operator`.
        placements: of the result on the mesh; replicated if left out. Partial counts as replicated: all of its ranks
            draw the same.
        like: a global value whose mesh the result is on; needed only if the key is a plain tensor.

    Returns:
        the same numbers for every mesh and placement; a global value if `key` or `like` is one.
    """
    if not isinstance(key, DTensor) and like is None:
        return RANDOM(key, shape, [0] * len(shape), shape, dist, a, b)
    owner: DTensor = like if like is not None else key  # type: ignore[assignment]
    mesh = owner.device_mesh
    if isinstance(mesh, PerShardMesh):
        # A rank's own value is drawn whole, and differs between ranks as the key does.
        local = RANDOM(_local_key(key, owner), shape, [0] * len(shape), shape, dist, a, b)
        return like_per_shard(local, mesh, joined([key], mesh))
    wanted = tuple(placements or (Replicate(),) * mesh.ndim)
    drawn = tuple(p if _is_block(p) else Replicate() for p in wanted)
    local_key = _local_key(key, owner)
    with _where_locals_live(owner):
        start, size = block_of(shape, mesh, drawn)
        local = RANDOM(local_key, shape, start, size, dist, a, b)
    out = _wrap(local, owner, drawn, shape)
    if any(tc.is_strided_shard(p) for p in wanted):
        # A strided shard is no block: what was drawn whole is cut, locally.
        out = out.redistribute(mesh, tuple(d if p.is_partial() else p for p, d in zip(wanted, drawn)))
    return out


def on_local(fn: Callable[..., Tensor], key: Tensor, *tensors: Tensor) -> Tensor:
    """`fn(key, *tensors)` for a function of whole values: on the replicas of global values, giving a replicated one."""
    owner = next((t for t in (key, *tensors) if isinstance(t, DTensor)), None)
    if owner is None:
        return fn(key, *tensors)
    locals_ = (_local_key(key, owner), *(_replica(t) for t in tensors))
    with _where_locals_live(owner):
        out = fn(*locals_)
    if isinstance(owner.device_mesh, PerShardMesh):
        return like_per_shard(out, owner.device_mesh, joined([key, *tensors], owner.device_mesh))
    return _wrap(out, owner, (Replicate(),) * owner.device_mesh.ndim, out.shape)


def block_of(shape: Sequence[int], mesh: Any, placements: Sequence[Placement]) -> tuple[list[Any], list[Any]]:
    """(start, size) of this rank's block, cut as DTensor cuts: axis by axis, in chunks rounded up.

    The numbers are ints, or on a simulated mesh symbols that stand for each rank's int.
    """
    start: list[Any] = [0] * len(shape)
    size: list[Any] = list(shape)
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            continue
        dim, parts = placement.dim, mesh.size(axis)
        chunk = (size[dim] + parts - 1) // parts
        if isinstance(size[dim], int) and size[dim] % parts == 0:
            low, size[dim] = chunk * coordinate[axis], chunk
        else:
            low = torch.sym_min(chunk * coordinate[axis], size[dim])
            size[dim] = torch.sym_min(low + chunk, size[dim]) - low
        start[dim] = start[dim] + low
    return start, size


def _where_locals_live(owner: DTensor) -> Any:
    """The mode in which operators run on local tensors: on a simulated mesh, once for each rank."""
    mesh: Any = owner.device_mesh
    simulated = isinstance(owner._local_tensor, tc.LocalTensor) and not isinstance(mesh, PerShardMesh)
    return on_all_ranks(mesh) if simulated else contextlib.nullcontext()


def _is_block(placement: Placement) -> bool:
    return isinstance(placement, Shard) and not tc.is_strided_shard(placement)


def _replica(value: Tensor) -> Tensor:
    """The whole value, as this rank holds it."""
    if not isinstance(value, DTensor):
        return value
    if isinstance(value.device_mesh, PerShardMesh):
        return value._local_tensor
    return value.redistribute(value.device_mesh, (Replicate(),) * value.device_mesh.ndim)._local_tensor


def _local_key(key: Tensor, owner: DTensor) -> Tensor:
    """The key's words where `owner` has its local tensors: on a simulated mesh, once for each rank."""
    local = _replica(key)
    if isinstance(owner._local_tensor, tc.LocalTensor) and not isinstance(local, tc.LocalTensor):
        return tc.LocalTensor(dict.fromkeys(owner._local_tensor._local_tensors, local))
    return local


def _wrap(local: Tensor, owner: DTensor, placements: tuple[Placement, ...], shape: Sequence[int]) -> Any:
    spec = tc.make_spec(owner.device_mesh, placements, torch.Size(shape), contiguous_strides(shape), local.dtype)
    return tc.wrap_local(local, spec, type(owner))
