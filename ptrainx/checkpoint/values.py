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
from ptrainx.checkpoint.boxes import Box, Piece, coords_of, inside, meet, pieces, whole
from ptrainx.checkpoint.dtypes import DTYPES, bytes_of, dtype_name
from ptrainx.checkpoint.manifest import Leaf
from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor, describe
from ptrainx.core.errors import InputError, PtrainxError, TreeError
from ptrainx.mesh.partition_spec import axes_of
from ptrainx.mesh.placement import spec_of
from ptrainx.mesh.simulated import SimulatedDTensor, local_tensors
from ptrainx.mesh.transfer import check_usable
from ptrainx.mesh.world import current_world

__all__ = ["Contents", "Source", "Writers", "alike", "contents", "writers"]

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
    """Leaves, whose `tensor` counts `sources`; who writes; checksums of small plain tensors, which ranks compare."""

    leaves: list[Leaf]
    sources: list[Source]
    writers: Writers
    sums: dict[int, int]


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
    found = _Finder(writers(flat.leaves))
    problems: list[str] = []
    leaves: list[Leaf] = []
    for path, value in zip(flat.paths, flat.leaves):
        try:
            leaves.append(found.leaf(path, value))
        except _Unfit as error:
            problems.append(f"{paths.name(path)}: {error}")
    if problems:
        raise InputError(
            "the tree has leaves that can't be saved:\n    " + "\n    ".join(problems),
            fix="save tensors, arrays, numbers and strings; pay owed sums with px.reshard first",
        )
    return Contents(leaves, found.sources, found.writers, found.sums)


def alike(held: Contents) -> list[str]:
    """What every rank must have alike of each leaf: of small plain values the bytes, of others shape and dtype."""
    return [_alike(leaf, held) for leaf in held.leaves]


def _alike(leaf: Leaf, held: Contents) -> str:
    text = f"{paths.name(leaf.path)}: {leaf.kind} {leaf.value}{leaf.numpy}"
    if leaf.tensor is None:
        return text
    source = held.sources[leaf.tensor]
    text += f"{describe(ShapeDtypeStruct(source.shape, DTYPES[source.dtype].dtype))} (tensor {leaf.tensor})"
    return f"{text} {held.sums[leaf.tensor]:08x}" if leaf.tensor in held.sums else text


class _Unfit(Exception):
    """Why a leaf can't be saved."""


class _Layout(NamedTuple):
    """How values of one shape and placement lie on a mesh: fields of a `Source`, and the pieces of each rank."""

    holders: dict[Box, tuple[int, ...]]
    pieces: dict[int, tuple[Piece, ...]]
    mesh: dict[str, int]
    spec: tuple[tuple[str, ...], ...]


class _Finder:
    """Looks at leaf after leaf. What leaves have in common is worked out once: a tree may have thousands."""

    def __init__(self, who: Writers):
        self.writers = who
        self.rank = current_world().rank
        self.sources: list[Source] = []
        self.sums: dict[int, int] = {}
        self._tied: dict[Any, int] = {}
        self._layouts: dict[Any, _Layout] = {}
        self._usable: set[Any] = set()

    def leaf(self, path: paths.TypedPath, value: Any) -> Leaf:
        """The leaf of a value."""
        if isinstance(value, torch.Tensor):
            return Leaf(path, "tensor", self._tensor(value, self._identity(value)))
        if isinstance(value, (np.ndarray, np.generic)):
            try:
                tensor = as_tensor(value)
            except TreeError as error:
                raise _Unfit(str(error).splitlines()[0]) from error
            kind = "numpy" if isinstance(value, np.ndarray) else "numpy scalar"
            return Leaf(path, kind, self._tensor(tensor, id(value)), numpy=value.dtype.str)
        text = scalars.to_text(value)
        if text is None:
            raise _Unfit(f"a {type(value).__module__}.{type(value).__qualname__}")
        return Leaf(path, text[0], value=text[1])

    def _identity(self, value: torch.Tensor) -> Any:
        """Equal for tensors that are one: the same memory, seen in the same way."""
        try:
            if not isinstance(value, DTensor):
                return value.dtype, _memory(value)
            self._check_usable(value)
            placed = (value.dtype, id(value.device_mesh), value.placements, value.shape)
            if isinstance(value, SimulatedDTensor):
                return *placed, *map(_memory, local_tensors(value).values())
            return *placed, _memory(value._local_tensor)
        except (RuntimeError, NotImplementedError) as error:  # a sparse tensor has no storage
            if isinstance(error, PtrainxError):
                raise
            return id(value)

    def _check_usable(self, value: DTensor) -> None:
        # A donated value has a class of its own.
        key = (type(value), id(value.device_mesh))
        if key not in self._usable:
            check_usable(value)
            self._usable.add(key)

    def _tensor(self, value: Any, identity: Any) -> int:
        if identity not in self._tied:
            _check(value)
            self._tied[identity] = len(self.sources)
            self.sources.append(self._placed(value) if isinstance(value, DTensor) else self._plain(value))
        return self._tied[identity]

    def _plain(self, value: torch.Tensor) -> Source:
        """A global value that every rank has."""
        value = _resolved(value)
        box = whole(value.shape)
        holders = {box: tuple(range(self.writers.size))} if value.numel() else {}
        several = len(self.writers.mine) < self.writers.size
        if several and value.nbytes <= SMALL:
            self.sums[len(self.sources)] = zlib.crc32(bytes_of(value.cpu().contiguous()))

        def part(rank: int, box: Box) -> torch.Tensor:
            return value[inside(box, (0,) * value.ndim)]

        return Source(dtype_name(value.dtype), box.shape, holders, part)

    def _placed(self, value: DTensor) -> Source:
        simulated = isinstance(value, SimulatedDTensor)
        key = (id(value.device_mesh), value.placements, value.shape, simulated)
        if key not in self._layouts:
            self._layouts[key] = self._layout(value, simulated)
        layout = self._layouts[key]
        locals_ = local_tensors(value) if simulated else {self.rank: _ready(value._local_tensor)}

        def part(rank: int, box: Box) -> torch.Tensor:
            held = rank if rank in locals_ else next(r for r in locals_ if _holding(layout.pieces[r], box))
            piece = _holding(layout.pieces[held], box)
            if piece is None:  # every process plays all devices, and any of them has it
                held = next(r for r in locals_ if _holding(layout.pieces[r], box))
                piece = _holding(layout.pieces[held], box)
            assert piece is not None
            local = _resolved(locals_[held])
            return local if box.shape == local.shape else local[inside(box, piece.box.offset, piece.local)]

        return Source(dtype_name(value.dtype), tuple(value.shape), layout.holders, part, layout.mesh, layout.spec)

    def _layout(self, value: DTensor, simulated: bool) -> _Layout:
        mesh, shape = value.device_mesh, tuple(value.shape)
        sizes = tuple(mesh.shape)
        members = list(range(mesh.size())) if simulated else mesh.mesh.flatten().tolist()
        held = {
            member: pieces(shape, tuple(value.placements), sizes, coords_of(i, sizes))
            for i, member in enumerate(members)
        }
        holders: dict[Box, tuple[int, ...]] = {}
        for member, parts in held.items():
            for piece in parts:
                holders[piece.box] = (*holders.get(piece.box, ()), member)
        if simulated and len(self.writers.mine) < self.writers.size:  # every process plays all devices
            holders = dict.fromkeys(holders, tuple(range(self.writers.size)))
        axes = dict(zip(mesh.mesh_dim_names or map(str, range(mesh.ndim)), sizes))
        entries = spec_of(value).entries if mesh.mesh_dim_names is not None else ()
        return _Layout(holders, held, axes, tuple(map(axes_of, entries)))


def _memory(tensor: torch.Tensor) -> tuple:
    return tc.storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


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


def _resolved(value: torch.Tensor) -> torch.Tensor:
    """The value without gradient, and with no conjugation or negation left to be done."""
    value = value.detach()
    return value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value


def _holding(held: Sequence[Piece], box: Box) -> Piece | None:
    return next((piece for piece in held if piece.box == box or meet(piece.box, box) == box), None)


def _ready(local: Any) -> torch.Tensor:
    return local.wait() if isinstance(local, tc.AsyncCollectiveTensor) else local
