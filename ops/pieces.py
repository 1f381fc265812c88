"""Collectives over several tensors at once, whose results lie one behind another.

An all-gather of a flat buffer puts each rank's buffer behind the one before, so that a tensor of which each rank holds
a part comes out in as many places as there are ranks. These put each tensor's parts together:

    all_gather_pieces      [a0 b0], [a1 b1]  ->  [a0 a1 b0 b1] on both ranks
    reduce_scatter_pieces  [A0 A1 B0 B1] twice, summed  ->  [A0 B0], [A1 B1]

They stand in graphs alone, made by the passes; `mesh/exchange.py` says what they mean, `compile/channel.py` sends them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["ALL_GATHER_PIECES", "REDUCE_SCATTER_PIECES"]


def _gathered(x: Tensor, sizes: Sequence[int], group_size: int, group_name: str) -> Tensor:
    return x.new_empty([x.shape[0] * group_size])


def _scattered(x: Tensor, reduce_op: str, sizes: Sequence[int], group_size: int, group_name: str) -> Tensor:
    return x.new_empty([x.shape[0] // group_size])


_LIBRARY = torch.library.Library("ptrainx", "FRAGMENT")
for _schema, _meta in (
    ("all_gather_pieces(Tensor x, SymInt[] sizes, int group_size, str group_name) -> Tensor", _gathered),
    (
        "reduce_scatter_pieces(Tensor x, str reduce_op, SymInt[] sizes, int group_size, str group_name) -> Tensor",
        _scattered,
    ),
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_schema.partition("(")[0], _meta, "Meta")

ALL_GATHER_PIECES = torch.ops.ptrainx.all_gather_pieces.default
"""x: one-dimensional, this rank's parts one behind another; sizes: their elements."""
REDUCE_SCATTER_PIECES = torch.ops.ptrainx.reduce_scatter_pieces.default
"""x: one-dimensional, whole tensors one behind another; sizes: the elements of each one's part for a rank."""
