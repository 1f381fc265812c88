"""Per-shard values: what the body of a `shard_map` computes with.

A per-shard value is a DTensor whose shape is that of one rank's part. It lives on a mesh of the same axes, all of size
1, so that everything that is written for global values of one device works on it. Its placements say, axis by axis, how
the ranks' values are related:

    Replicate       the same on every rank along the axis
    Varying         each rank along it has a value of its own
    Partial         each rank holds an addend of a sum that is owed ("unreduced")

Operators run on the local tensors alone; their results vary wherever an operand does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from ptrainx.core import torch_compat as tc
from ptrainx.mesh.virtual import VirtualDeviceMesh, next_uid

__all__ = [
    "PerShardMesh",
    "Varying",
    "is_per_shard",
    "joined",
    "like_per_shard",
    "per_shard_mesh",
    "relation",
    "write_raises",
]


class Varying(Placement):
    """Each rank along the axis has a value of its own."""

    # The base class is one of C++, which has to be told; a dataclass does not.
    def __init__(self) -> None:
        super().__init__()

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Varying)

    def __hash__(self) -> int:
        return hash(Varying)

    def __repr__(self) -> str:
        return "Varying()"

    def __str__(self) -> str:
        return "V"


class PerShardMesh(VirtualDeviceMesh):
    """The mesh that per-shard values live on: the axes of another one, each of size 1.

    Attributes:
        raised: identity of a storage -> (axes, a tensor that keeps it): where a varying value was written in place into
            one that was the same on every rank, so that every view of that memory varies since.
    """

    def __init__(self, axis_names: tuple[str, ...]):
        super().__init__((1,) * len(axis_names), axis_names, 0, next_uid(), {})
        self.raised: dict[int, tuple[frozenset[int], Any]] = {}


def per_shard_mesh(device_mesh: Any) -> PerShardMesh:
    """The mesh of the per-shard values of a mesh; always the same one."""
    known = device_mesh.__dict__.get("ptrainx_per_shard")
    if known is None:
        # It may be made while a step is traced, of which torch's arithmetic on ranks is no part.
        with tc.no_dispatch_modes(), tc.DisableTorchFunction():
            known = device_mesh.__dict__["ptrainx_per_shard"] = PerShardMesh(tuple(device_mesh.mesh_dim_names))
    known.ensure_registered()
    return known


def is_per_shard(value: Any) -> bool:
    """Whether a value is a per-shard one."""
    return isinstance(value, DTensor) and isinstance(value.device_mesh, PerShardMesh)


def relation(value: DTensor) -> tuple[Placement, ...]:
    """How the ranks' values are related, one placement an axis, writes in place through other views included."""
    mesh, placements = value.device_mesh, tuple(value.placements)
    raised = getattr(mesh, "raised", None)
    if not raised:
        return placements
    axes, _ = raised.get(_storage(value._local_tensor), ((), None))
    return tuple(Varying() if i in axes and p.is_replicate() else p for i, p in enumerate(placements))


def joined(values: Iterable[Any], mesh: PerShardMesh) -> tuple[Placement, ...]:
    """How the ranks' results of an operator on these values are related."""
    found: list[Placement] = [Replicate()] * mesh.ndim
    for value in values:
        if is_per_shard(value):
            for i, placement in enumerate(relation(value)):
                if found[i].is_replicate() or placement.is_partial():
                    found[i] = placement
    return tuple(found)


def like_per_shard(local: Any, mesh: PerShardMesh, placements: tuple[Placement, ...]) -> Any:
    """A per-shard value over a rank's tensor."""
    spec = tc.make_spec(mesh, placements, local.shape, local.stride(), local.dtype)
    return tc.wrap_local(local, spec)


def write_raises(value: DTensor, placements: tuple[Placement, ...]) -> None:
    """Notes that a write in place has made a value vary along more axes, and with it every view of its memory."""
    mesh: Any = value.device_mesh
    axes = frozenset(i for i, (p, q) in enumerate(zip(placements, value.placements)) if p != q)
    if not axes:
        return
    local = value._local_tensor
    before, _ = mesh.raised.get(_storage(local), (frozenset(), None))
    mesh.raised[_storage(local)] = (before | axes, local)
    meta: Any = value._spec.tensor_meta
    value._spec = tc.make_spec(mesh, placements, meta.shape, meta.stride, meta.dtype)


def _storage(local: torch.Tensor) -> int:
    if isinstance(local, tc.LocalTensor):
        local = next(iter(local._local_tensors.values()))
    return tc.storage_id(local)
