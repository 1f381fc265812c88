"""Rows of a table that is split along its rows: each rank looks up its own, and owes a sum of what ranks have found.

The gradient of a rank's rows stays on the rank. DTensor's own rule computes that of the whole table on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from ptrainx.ops.collectives import wire
from ptrainx.ops.collectives.region import Region
from ptrainx.ops.parts import Call, check_no_empty_parts, local_of, on_parts, refuse_second_derivative, wrap

__all__ = ["look_up_rows"]


def look_up_rows(tokens: Any, table: Any, call: Call) -> Any:
    """`table[tokens]` of global values; a sum is owed over the mesh axes that split the table.

    Args:
        tokens: not split over those axes.
        table: [V, D], split along its rows or not at all.
        call: for reports.
    """
    return _LookUp.apply(table, tokens, call)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Any, tokens: Any, call: Call) -> Any:
        ctx.call, ctx.placements, ctx.shape = call, tuple(table.placements), tuple(table.shape)
        ctx.tokens = tuple(tokens.placements)
        axes = [i for i, p in enumerate(table.placements) if p == Shard(0)]
        check_no_empty_parts(call, "a table", table.shape[0], [table.device_mesh.shape[i] for i in axes])
        with on_parts(call):
            rows, ids = local_of(table), local_of(tokens)
            ctx.width = rows.shape[0]
            if axes:
                region = Region(call.trace, call.label, True)
                ids = ids - wire.own_start(region, [region.axis_names[i] for i in axes], table.shape[0])
            ctx.ids, ctx.elsewhere = ids, (ids < 0) | (ids >= rows.shape[0])
            found = torch.embedding(rows, ids.masked_fill(ctx.elsewhere, 0))
            found = found.masked_fill(ctx.elsewhere.unsqueeze(-1), 0)
        ctx.out = [Partial("sum") if i in axes else p for i, p in enumerate(tokens.placements)]
        return wrap(found, table.device_mesh, ctx.out, (*tokens.shape, table.shape[1]))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        call = ctx.call
        refuse_second_derivative([grad], call.label, call.source)
        # A sum that the cotangent owes over other axes than the table's may go on being owed.
        wanted = [
            Replicate() if own.is_partial() else now if now.is_partial() and own.is_replicate() else own
            for own, now in zip(ctx.out, grad.placements)
        ]
        if list(grad.placements) != wanted:
            with call.marked(True, "gradient of the rows"):
                grad = grad.redistribute(grad.device_mesh, wanted)
        with on_parts(call):
            own = local_of(grad).masked_fill(ctx.elsewhere.unsqueeze(-1), 0).reshape(-1, ctx.shape[1])
            ids = ctx.ids.masked_fill(ctx.elsewhere, 0).reshape(-1)
            out = torch.zeros(ctx.width, ctx.shape[1], dtype=own.dtype, device=own.device).index_add(0, ids, own)
        owed = [
            Partial("sum") if isinstance(t, Shard) or g.is_partial() else p
            for t, g, p in zip(ctx.tokens, wanted, ctx.placements)
        ]
        return wrap(out, grad.device_mesh, owed, ctx.shape), None, None
