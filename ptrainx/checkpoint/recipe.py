"""How the last tree was copied, kept for the next one of the same form: a run saves one state over and over.

What a snapshot needs to know of a tree (paths, who writes what, where each part goes in the buffer) follows from its
structure and from types, shapes and placements. Where these are as they were, the copy is all that is left to do. Of a
tree with tied or overlapping tensors, or with leaves other than tensors and Python values, nothing is kept.
"""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.checkpoint import scalars
from ptrainx.checkpoint.dtypes import bytes_of
from ptrainx.checkpoint.plan import Task
from ptrainx.checkpoint.snapshot import Snapshot, SnapshotBuffer
from ptrainx.checkpoint.values import Contents
from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.mesh.placement import contiguous_strides
from ptrainx.mesh.transfer import check_usable
from ptrainx.mesh.world import current_world

__all__ = ["Recipe"]

Copy = tuple[int, tuple[slice, ...] | None, torch.Tensor]
"""(which leaf, which part of its local tensor, where to)."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is kept of a snapshot.

    Attributes:
        treedef: the tree's structure.
        forms: of each leaf, what must be as it was.
        copies: what is copied where.
        snapshot: the one that the copies made.
        memory: address of the buffer that they go to.
        epoch: of the world.
    """

    treedef: px_tree.TreeDef
    forms: list[Any]
    copies: list[Copy]
    snapshot: Snapshot
    memory: int
    epoch: int

    @classmethod
    def of(cls, tree: Any, held: Contents, tasks: list[list[Task]], buffer: SnapshotBuffer, taken: Snapshot) -> Any:
        """The recipe of a snapshot that has just been taken; None where there is none."""
        leaves, treedef = px_tree.flatten(tree)
        forms = [_form(leaf) for leaf in leaves]
        if None in forms or len(held.writers.mine) > 1 or not _are_apart(leaves):
            return None
        (rank,) = held.writers.mine
        leaf_of = {leaf.tensor: i for i, leaf in enumerate(held.leaves)}
        copies = []
        for task in tasks[rank]:
            source = held.sources[task.tensor]
            local = _local(leaves[leaf_of[task.tensor]])
            part = source.part(rank, task.box)
            whole = part.shape == local.shape
            if not (whole or local.is_contiguous()):
                return None
            where = None if whole else _where(part, local)
            copies.append((leaf_of[task.tensor], where, taken.part(rank, task)))
        return cls(treedef, forms, copies, taken, buffer.address, current_world().epoch)

    def take(self, tree: Any, buffer: SnapshotBuffer) -> Snapshot | None:
        """The snapshot of another tree, if it has the same form; else None, and nothing has been copied."""
        leaves, treedef = px_tree.flatten(tree)
        if treedef != self.treedef or buffer.address != self.memory or current_world().epoch != self.epoch:
            return None
        if not all(_same_form(form, leaf) for form, leaf in zip(self.forms, leaves)) or not _are_apart(leaves):
            return None
        for mesh_leaf in {id(leaf.device_mesh): leaf for leaf in leaves if isinstance(leaf, DTensor)}.values():
            check_usable(mesh_leaf)
        with torch.no_grad():
            for index, where, target in self.copies:
                local = _local(leaves[index])
                target.copy_(local if where is None else local[where], non_blocking=True)
        for device in {target.device for target in map(_local, _tensors(leaves)) if target.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        return self.snapshot.with_contents(_with_values(self.snapshot.contents, leaves))


def _form(leaf: Any) -> Any:
    """What a leaf's place in a snapshot depends on; None for one of which nothing is kept."""
    if type(leaf) is DTensor:
        return weakref.ref(leaf._spec)
    if type(leaf) in (torch.Tensor, torch.nn.Parameter):
        return type(leaf), leaf.dtype, leaf.shape, leaf.device
    return type(leaf) if scalars.to_text(leaf) is not None else None


def _same_form(form: Any, leaf: Any) -> bool:
    if type(leaf) is DTensor:
        spec = leaf._spec
        known = form() if isinstance(form, weakref.ref) else None
        return known is not None and (known is spec or known == spec)
    if isinstance(leaf, torch.Tensor):
        return bool(form == (type(leaf), leaf.dtype, leaf.shape, leaf.device)) and not (leaf.is_conj() or leaf.is_neg())
    return form is type(leaf)


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _local(leaf: Any) -> torch.Tensor:
    local = leaf._local_tensor if type(leaf) is DTensor else leaf
    return local.wait() if isinstance(local, tc.AsyncCollectiveTensor) else local


def _are_apart(leaves: list[Any]) -> bool:
    """Whether every tensor has memory of its own."""
    owners = [tc.storage_id(_local(leaf)) for leaf in _tensors(leaves)]
    return len(set(owners)) == len(owners)


def _where(part: torch.Tensor, local: torch.Tensor) -> tuple[slice, ...]:
    """The slices that a part of a contiguous tensor was made with."""
    place, found = int(part.storage_offset()) - int(local.storage_offset()), []
    for n, step in zip(part.shape, contiguous_strides(local.shape)):
        start, place = divmod(place, step)
        found.append(slice(start, start + n))
    return tuple(found)


def _with_values(held: Contents, leaves: list[Any]) -> Contents:
    """The contents with the Python values, and the checksums of small tensors, of now."""
    kept = [
        leaf if leaf.tensor is not None else leaf._replace(value=(scalars.to_text(value) or ("", ""))[1])
        for leaf, value in zip(held.leaves, leaves)
    ]
    of: dict[int | None, Any] = {leaf.tensor: value for leaf, value in zip(held.leaves, leaves)}
    sums = {i: zlib.crc32(bytes_of(of[i].detach().cpu().contiguous())) for i in held.sums}
    return held._replace(leaves=kept, sums=sums)
