"""Lookups in a table whose rows are sharded: each rank looks up the rows that it holds, and owes a sum of them.

torch 2.13's rule leaves the rows of other ranks unmasked until the sum is paid. It has lost the mask by then if an
operator came in between, and knows of one axis only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import TraceContext
from ptrainx.mesh.placement import contiguous_strides, uneven_axes

__all__ = ["LOOKUPS", "embedding_bag", "look_up"]

LOOKUPS = {torch.ops.aten.embedding.default}


def look_up(table: Any, indices: Any, trace: TraceContext) -> DTensor:
    """`table[indices]` of global values, with a sum owed over the axes that split the rows.

    Over an axis that splits the indices too, or the rows unevenly, the table is gathered; over one that splits its
    columns, the indices are.
    """
    mesh: Any = next(x.device_mesh for x in (table, indices) if isinstance(x, DTensor))
    uneven = uneven_axes(table) if isinstance(table, DTensor) else set()
    rows_at = [Replicate() if i in uneven and _at(table, i) == Shard(0) else _at(table, i) for i in range(mesh.ndim)]
    tables, ids, outs = zip(*(_ways(p, _at(indices, i), indices.ndim) for i, p in enumerate(rows_at)))
    with trace.marked(asked=False, reason="operands of aten.embedding.default"):
        rows, local = _local(table, tables), _local(indices, ids)
    if Shard(0) in tables:
        own = local - _first_row(mesh, [i for i, p in enumerate(tables) if p == Shard(0)], rows)
        elsewhere = (own < 0) | (own >= rows.shape[0])
        found = torch.embedding(rows, own.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
    else:
        found = torch.embedding(rows, local)
    shape = (*indices.shape, table.shape[1])
    return tc.wrap_local(found, tc.make_spec(mesh, outs, torch.Size(shape), contiguous_strides(shape), table.dtype))


def _first_row(mesh: Any, axes: list[int], rows: torch.Tensor) -> Any:
    """The number of a rank's first row; in the eager backend, where one process plays all ranks, that of each."""
    coordinates = mesh.get_coordinate()

    def first(rank: int | None) -> int:
        place = 0
        for i in axes:
            place = place * mesh.size(i) + tc.number_of_rank(coordinates[i], rank)
        return place * int(rows.shape[0])

    if not isinstance(rows, tc.LocalTensor):
        return first(None)
    return tc.LocalTensor({rank: torch.tensor(first(rank)) for rank in rows._local_tensors})


def embedding_bag(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.nn.functional.embedding_bag`; sums and means of rows of equal length are written as such.

    torch merges the dims of the indices, and has no way to gather what is split along both.
    """
    mode, shares = kwargs.get("mode", "mean"), kwargs.get("per_sample_weights")
    others = [value for name, value in kwargs.items() if name not in ("mode", "per_sample_weights")]
    unusual = any(isinstance(value, torch.Tensor) or value not in (None, False, 2.0) for value in others)
    if args or unusual or input.ndim != 2 or mode not in ("sum", "mean"):
        return F.embedding_bag(input, weight, *args, **kwargs)
    rows = F.embedding(input, weight)
    if shares is not None:
        rows = rows * shares.unsqueeze(-1)
    return rows.sum(1) if mode == "sum" else rows.mean(1)


def _at(value: Any, axis: int) -> Any:
    return value.placements[axis] if isinstance(value, DTensor) else Replicate()


def _ways(table: Any, indices: Any, ndim: int) -> tuple[Any, Any, Any]:
    """Over one axis: the placements of the table, the indices and the result."""
    if table == Shard(1):
        return table, Replicate(), Shard(ndim)
    if table == Shard(0) and indices == Replicate():
        return table, indices, Partial("sum")
    kept = indices if isinstance(indices, Shard) else Replicate()
    return Replicate(), kept, kept


def _local(value: Any, placements: tuple) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    # Where nothing moves, `redistribute` writes its argument's metadata in place.
    same = tuple(value.placements) == placements
    return (value if same else value.redistribute(value.device_mesh, placements))._local_tensor
