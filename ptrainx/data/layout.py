"""Which rows of a global batch this process reads, and how its ranks' blocks are cut from them.

In: the leaves of a batch and a spec tree. Out: the row ranges to read; then, from the rows, the placed leaves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import ShapeDtypeStruct
from ptrainx.core.errors import MeshError, SpecError
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.partition_spec import P, PartitionSpec, axes_of
from ptrainx.mesh.placement import check_spec, local_block, tensor_spec
from ptrainx.mesh.simulated import wrap_all

__all__ = ["BatchLayout", "RowRange", "check_mesh"]

RowRange = tuple[int, int]


class BatchLayout:
    """The placement of one batch size.

    A sample is read whole: where leaves split the rows differently, a rank reads what any of its leaves needs.

    Args:
        leaves: each leaf's global shape, batch dim first, and dtype.
        paths: how the leaves are called in messages.
        specs: one a leaf.
        mesh: real or simulated.
        uneven: the rows may be cut unevenly, as those of an epoch's last batch are.

    Raises:
        SpecError: a spec that does not fit; its message speaks of `batch_size` where that is what is wrong.

    Attributes:
        row_ranges: the rows of the batch that this process needs: one (start, stop) for each different block.
    """

    def __init__(
        self,
        leaves: Sequence[ShapeDtypeStruct],
        paths: Sequence[str],
        specs: Sequence[PartitionSpec],
        mesh: Mesh,
        uneven: bool = False,
    ):
        for leaf, path, spec in zip(leaves, paths, specs):
            _check(leaf, path, spec, mesh, uneven)
        # Made once: a DTensor's spec costs ten times as much as the DTensor.
        self._placed = [tensor_spec(mesh.device_mesh, spec, mesh, leaf) for leaf, spec in zip(leaves, specs)]
        self._mesh, self._device = mesh, mesh.device
        self._blocks = {
            rank: [local_block(spec, mesh, leaf.shape, rank) for leaf, spec in zip(leaves, specs)]
            for rank in mesh.ranks
        }
        self._range_of: dict[int, RowRange] = {
            rank: (min(b[0].start for b in blocks), max(b[0].stop for b in blocks))
            for rank, blocks in self._blocks.items()
        }
        self.row_ranges: list[RowRange] = sorted(set(self._range_of.values()))

    def place(self, rows: Mapping[RowRange, Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The placed leaves, from CPU tensors of the rows in each of `row_ranges`, which they may take over."""
        return [self._place(i, rows) for i in range(len(self._placed))]

    def _place(self, i: int, rows: Mapping[RowRange, Sequence[torch.Tensor]]) -> torch.Tensor:
        def part(rank: int) -> torch.Tensor:
            first = self._range_of[rank][0]
            held, *rest = self._blocks[rank][i]
            block = rows[self._range_of[rank]][i][(slice(held.start - first, held.stop - first), *rest)].contiguous()
            if self._mesh.simulated:  # ranks that hold the same rows must not share their memory
                return block.clone()
            return block.to(self._device, non_blocking=True)

        if self._mesh.simulated:
            return wrap_all([part(rank) for rank in self._mesh.ranks], self._placed[i])
        return tc.wrap_local(part(self._mesh.rank), self._placed[i])


def check_mesh(mesh: Any) -> Mesh:
    """`mesh`, if values can be placed on it.

    Raises:
        MeshError: it is abstract, no mesh at all, or of a world that has ended.
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"batches can't be placed on {mesh!r}",
            expected="a mesh with devices",
            fix="use px.make_mesh(data=...), with simulate=True to try it in one process",
        )
    mesh.check_alive()
    return mesh


def _row_shards(spec: PartitionSpec, mesh: Mesh) -> int:
    """Into how many parts a spec splits the batch dim; axes that the mesh lacks are `check_spec`'s to refuse."""
    return math.prod(mesh.shape.get(axis, 1) for axis in axes_of(spec[0] if len(spec) else None))


def _check(leaf: ShapeDtypeStruct, path: str, spec: PartitionSpec, mesh: Mesh, uneven: bool) -> None:
    if spec.unreduced:
        raise SpecError(
            f"{path}: {spec} owes a sum, and a batch has none to owe",
            fix=f"write {P(*spec.entries)}",
        )
    rows, shards = leaf.shape[0], _row_shards(spec, mesh)
    if rows % shards and not uneven:
        split = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes_of(spec[0]))
        below, above = rows // shards * shards, -(-rows // shards) * shards
        raise SpecError(
            f"{path}: batch_size {rows} is not divisible by {split}",
            got=f"{spec} over {shards} shards",
            expected=f"a multiple of {shards}",
            fix=f"use batch_size={above}{f' or {below}' if below else ''}, or keep the batch whole with spec=P()",
        )
    check_spec(spec, mesh, leaf.shape, path)
