"""What a tree holds, for a save: its leaves, and once each tensor behind them with the ranks that hold its parts.

In: a pytree. Out: `Contents`. Nothing is copied or sent; `plan.py` then says which rank writes what.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ptrainx.checkpoint import paths, scalars
from ptrainx.checkpoint.boxes import Box, coords_of, inside, meet, pieces, whole
from ptrainx.checkpoint.dtypes import DTYPES, bytes_of, dtype_name
from ptrainx.checkpoint.manifest import Leaf
from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor, describe
from ptrainx.core.errors import InputError, TreeError
from ptrainx.mesh.placement import spec_of
from ptrainx.mesh.simulated import SimulatedDTensor, local_tensors
from ptrainx.mesh.transfer import check_usable
from ptrainx.mesh.world import current_world

__all__ = ["Contents", "Source", "Writers", "contents", "writers"]

SMALL = 1 << 16
"""Plain values up to so many bytes are compared between the ranks."""


class Writers(NamedTuple):
    """Who writes: how many ranks there are, and those that this process plays (all, where the mesh is simulated)."""

    size: int
    mine: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor to be saved.

    Attributes:
        dtype: its name in `DTYPES`.
        shape: global.
        holders: distinct boxes of it -> the ranks that hold them.
        part: (rank, box) -> that part of this process's memory.
        mesh: axes of its mesh; None for a plain tensor.
        spec: per dim, the axes that split it.
    """

    dtype: str
    shape: tuple[int, ...]
    holders: dict[Box, tuple[int, ...]]
    part: Callable[[int, Box], torch.Tensor]
    mesh: dict[str, int] | None = None
    spec: tuple[tuple[str, ...], ...] = ()


class Contents(NamedTuple):
    """Leaves, whose `tensor` counts `sources`; who writes; and of each leaf what all ranks must have alike."""

    leaves: list[Leaf]
    sources: list[Source]
    writers: Writers
    alike: list[str]


def writers(leaves: Sequence[Any]) -> Writers:
    """Who writes a tree with these leaves: the world's ranks, or in a world of one those of its simulated meshes."""
    world = current_world()
    if world.size > 1:
        return Writers(world.size, (world.rank,))
    sizes = [leaf.device_mesh.size() for leaf in leaves if isinstance(leaf, SimulatedDTensor)]
    size = max([1, *sizes])
    return Writers(size, tuple(range(size)))


def contents(tree: Any) -> Contents:
    """What a tree holds.

    Raises:
        TreeError: leaves or keys of unknown types, all told at once.
        InputError: values that can't be saved as they are (owed sums, no data), all told at once.
        MeshError, DonationError: values that are no longer there.
    """
    flat = paths.flatten(tree)
    who = writers(flat.leaves)
    found = Contents([], [], who, [])
    tied: dict[Any, int] = {}
    problems: list[str] = []
    for path, value in zip(flat.paths, flat.leaves):
        try:
            leaf = _leaf(path, value, found, tied)
        except _Unfit as error:
            problems.append(f"{paths.name(path)}: {error}")
            continue
        found.leaves.append(leaf)
        found.alike.append(_alike(leaf, value, found))
    if problems:
        raise InputError(
            "the tree has leaves that can't be saved:\n    " + "\n    ".join(problems),
            fix="save tensors, arrays, numbers and strings; pay owed sums with px.reshard first",
        )
    return found


class _Unfit(Exception):
    """Why a leaf can't be saved."""


def _leaf(path: paths.TypedPath, value: Any, found: Contents, tied: dict[Any, int]) -> Leaf:
    if isinstance(value, torch.Tensor):
        return Leaf(path, "tensor", _source(value, _identity(value), found, tied))
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            tensor = as_tensor(value)
        except TreeError as error:
            raise _Unfit(str(error).splitlines()[0]) from error
        kind = "numpy" if isinstance(value, np.ndarray) else "numpy scalar"
        return Leaf(path, kind, _source(tensor, id(value), found, tied), numpy=value.dtype.str)
    text = scalars.to_text(value)
    if text is None:
        raise _Unfit(f"a {type(value).__module__}.{type(value).__qualname__}")
    return Leaf(path, text[0], value=text[1])


def _identity(value: torch.Tensor) -> Any:
    """Equal for tensors that are one: the same memory, seen in the same way."""
    locals_: list[Any] = [value]
    placed: tuple = ()
    if isinstance(value, DTensor):
        check_usable(value)
        parts = local_tensors(value).values() if isinstance(value, SimulatedDTensor) else [value._local_tensor]
        locals_, placed = list(parts), (id(value.device_mesh), value.placements, tuple(value.shape))
    try:
        seen = tuple((tc.storage_id(t), t.storage_offset(), tuple(t.shape), t.stride()) for t in locals_)
    except (RuntimeError, NotImplementedError):  # a sparse tensor has no storage
        return id(value)
    return value.dtype, placed, seen


def _source(value: Any, identity: Any, found: Contents, tied: dict[Any, int]) -> int:
    if identity not in tied:
        _check(value)
        source = _placed(value, found.writers) if isinstance(value, DTensor) else _plain(value, found.writers)
        tied[identity] = len(found.sources)
        found.sources.append(source)
    return tied[identity]


def _check(value: torch.Tensor) -> None:
    if value.layout != torch.strided or value.is_quantized:
        raise _Unfit(f"a tensor of layout {value.layout}")
    if dtype_name(value.dtype) not in DTYPES:
        raise _Unfit(f"a tensor of dtype {value.dtype}")
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise _Unfit(f"a sum is still owed: {describe(value)} {value.placements}")
    elif value.device.type == "meta" or tc.is_fake(value):
        raise _Unfit(f"{describe(value)} has no data")


def _plain(value: torch.Tensor, who: Writers) -> Source:
    """A global value that every rank has."""
    value = value.detach().resolve_conj().resolve_neg()
    box = whole(value.shape)
    holders = {box: tuple(range(who.size))} if value.numel() else {}
    return Source(
        dtype_name(value.dtype), tuple(value.shape), holders, lambda rank, part: value[inside(part, box.offset)]
    )


def _placed(value: DTensor, who: Writers) -> Source:
    mesh = value.device_mesh
    shape, sizes = tuple(value.shape), tuple(mesh.shape)
    simulated = isinstance(value, SimulatedDTensor)
    locals_ = local_tensors(value) if simulated else {current_world().rank: _ready(value._local_tensor)}
    members = list(range(mesh.size())) if simulated else mesh.mesh.flatten().tolist()
    parts = {
        member: pieces(shape, tuple(value.placements), sizes, coords_of(i, sizes)) for i, member in enumerate(members)
    }
    holders: dict[Box, tuple[int, ...]] = {}
    for member, held in parts.items():
        for piece in held:
            holders[piece.box] = (*holders.get(piece.box, ()), member)
    if simulated and len(who.mine) == 1 and who.size > 1:  # every process plays all devices
        holders = dict.fromkeys(holders, tuple(range(who.size)))

    def part(rank: int, box: Box) -> torch.Tensor:
        first = next(member for member in (rank, *members) if member in locals_ and _holding(parts[member], box))
        piece = _holding(parts[first], box)
        assert piece is not None
        local = locals_[first].detach().resolve_conj().resolve_neg()
        return local[inside(box, piece.box.offset, piece.local)]

    named = mesh.mesh_dim_names is not None
    axes = dict(zip(mesh.mesh_dim_names or map(str, range(mesh.ndim)), sizes))
    entries = spec_of(value).entries if named else ()
    spec = tuple(() if e is None else (e,) if isinstance(e, str) else e for e in entries)
    return Source(dtype_name(value.dtype), shape, holders, part, axes, spec)


def _holding(held: Sequence[Any], box: Box) -> Any:
    return next((piece for piece in held if meet(piece.box, box) == box), None)


def _ready(local: Any) -> torch.Tensor:
    return local.wait() if isinstance(local, tc.AsyncCollectiveTensor) else local


def _alike(leaf: Leaf, value: Any, found: Contents) -> str:
    """What every rank must have alike of a leaf: of small plain values the bytes, of others shape and dtype."""
    text = f"{paths.name(leaf.path)}: {leaf.kind} {leaf.value}{leaf.numpy}"
    if leaf.tensor is None:
        return text
    source = found.sources[leaf.tensor]
    text += f"{describe(ShapeDtypeStruct(source.shape, DTYPES[source.dtype].dtype))} (tensor {leaf.tensor})"
    box = whole(source.shape)
    small = source.mesh is None and box.size * DTYPES[source.dtype].itemsize <= SMALL
    if not small or len(found.writers.mine) == found.writers.size:
        return text
    return f"{text} {zlib.crc32(bytes_of(source.part(0, box).cpu().contiguous())):08x}"
