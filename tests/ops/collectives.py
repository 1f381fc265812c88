"""The named collectives as a table: bodies, and what they mean as functions of the list of all ranks' values.

A row's `whole` is the independent answer: it is called with the ranks' values, in the order of the ranks along the
axis, and gives the ranks' results. A row's result leaves `shard_map` joined along dim 0, whether or not
ranks agree in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import ptrainx as px

__all__ = ["COLLECTIVES", "Row", "linear_sum", "ring"]

Shards = list[torch.Tensor]


class Row(NamedTuple):
    """A body of (value, axis), its global meaning, and the kinds of collectives it makes."""

    body: Callable[[torch.Tensor, Any], torch.Tensor]
    whole: Callable[[Shards], Shards]
    kinds: tuple[str, ...] = ()


def ring(n: int) -> list[tuple[int, int]]:
    """Each to the next."""
    return [(i, (i + 1) % n) for i in range(n)]


def linear_sum(shards: Shards) -> torch.Tensor:
    """A weighted sum of all results, so that every element has a gradient of its own."""
    whole = torch.cat([s.reshape(-1) for s in shards])
    return (whole * torch.linspace(0.5, 1.5, whole.numel(), dtype=whole.dtype)).sum()


def _same(value: torch.Tensor, shards: Shards) -> Shards:
    return [value] * len(shards)


def _exchanged(shards: Shards, split: int, concat: int) -> Shards:
    blocks = [x.chunk(len(shards), split) for x in shards]
    return [torch.cat(came, concat) for came in zip(*blocks)]


def _stacked(shards: Shards, split: int, concat: int) -> Shards:
    return [torch.stack([x.select(split, j) for x in shards], concat) for j in range(len(shards))]


def _shifted(shards: Shards) -> Shards:
    return [torch.zeros_like(shards[0]), *shards[:-1]]


COLLECTIVES: dict[str, Row] = {
    "psum": Row(lambda x, a: px.psum(x, a), lambda s: _same(sum(s), s), ("all_reduce",)),  # type: ignore[arg-type]
    "pmean": Row(lambda x, a: px.pmean(x, a), lambda s: _same(sum(s) / len(s), s), ("all_reduce",)),  # type: ignore[arg-type]
    "pmax": Row(lambda x, a: px.pmax(x, a), lambda s: _same(torch.stack(s).amax(0), s), ("all_reduce",)),
    "pmin": Row(lambda x, a: px.pmin(x, a), lambda s: _same(torch.stack(s).amin(0), s), ("all_reduce",)),
    "all_gather": Row(lambda x, a: px.all_gather(x, a), lambda s: _same(torch.stack(s), s), ("all_gather",)),
    "all_gather 1": Row(
        lambda x, a: px.all_gather(x, a, axis=1), lambda s: _same(torch.stack(s, 1), s), ("all_gather",)
    ),
    "all_gather tiled": Row(
        lambda x, a: px.all_gather(x, a, tiled=True), lambda s: _same(torch.cat(s), s), ("all_gather",)
    ),
    "all_gather tiled 1": Row(
        lambda x, a: px.all_gather(x, a, axis=1, tiled=True), lambda s: _same(torch.cat(s, 1), s), ("all_gather",)
    ),
    "psum_scatter": Row(lambda x, a: px.psum_scatter(x, a), lambda s: list(sum(s).unbind(0)), ("reduce_scatter",)),  # type: ignore[union-attr]
    "psum_scatter tiled 1": Row(
        lambda x, a: px.psum_scatter(x, a, scatter_dimension=1, tiled=True),
        lambda s: list(sum(s).chunk(len(s), 1)),  # type: ignore[union-attr]
        ("reduce_scatter",),
    ),
    "all_to_all 0 1": Row(lambda x, a: px.all_to_all(x, a, 0, 1), lambda s: _stacked(s, 0, 1), ("all_to_all",)),
    "all_to_all tiled 0 1": Row(
        lambda x, a: px.all_to_all(x, a, 0, 1, tiled=True), lambda s: _exchanged(s, 0, 1), ("all_to_all",)
    ),
    "all_to_all tiled 1 0": Row(
        lambda x, a: px.all_to_all(x, a, 1, 0, tiled=True), lambda s: _exchanged(s, 1, 0), ("all_to_all",)
    ),
    "ppermute ring": Row(
        lambda x, a: px.ppermute(x, a, ring(px.axis_size(a))), lambda s: [s[-1], *s[:-1]], ("permute",)
    ),
    "ppermute shift": Row(lambda x, a: px.ppermute(x, a, ring(px.axis_size(a))[:-1]), _shifted, ("permute",)),
    "axis_index": Row(lambda x, a: x * (1 + px.axis_index(a)), lambda s: [x * (1 + i) for i, x in enumerate(s)], ()),
    "the sum, used again": Row(
        lambda x, a: x * px.psum(x, a).sin(),
        lambda s: [x * sum(s).sin() for x in s],
        ("all_reduce",),  # type: ignore[union-attr]
    ),
    "the whole, used again": Row(
        lambda x, a: (x * px.all_gather(x, a)).sum(0),
        lambda s: [(x * torch.stack(s)).sum(0) for x in s],
        ("all_gather",),
    ),
}
"""Values are [n, 2n] on each of n ranks."""
