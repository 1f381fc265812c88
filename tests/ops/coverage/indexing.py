"""Indexing, gathers and scatters, embeddings, assignments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.ops.coverage.case import Case, ints, mask, values

__all__ = ["CASES"]

X, ROWS, NEW = values(8, 4), ints(4), values(4, 4, seed=3)


def _assign(index: Any) -> Any:
    """`y[index] = new` on a copy."""

    def fn(x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[index] = new
        return y

    return fn


def _masked_assign(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[m] = 0.5
    return y


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, halves; x: [batch, time, heads, dim], cos, sin: [time, dim/2]."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _rotary_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same on neighbouring elements."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[None, :, None], sin[None, :, None]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


ROTARY = (values(4, 8, 2, 4), values(8, 2).cos(), values(8, 2).sin())

CASES = [
    Case("x[i]", lambda x: x[3], (X,)),
    Case("x[a:b]", lambda x: x[2:6], (X,)),
    Case("x[::2]", lambda x: x[::2], (X,)),
    Case("x[:, a:b]", lambda x: x[:, 1:3], (X,)),
    Case("x[..., i]", lambda x: x[..., 1], (X,)),
    Case("x[None]", lambda x: x[None, :, None], (X,)),
    Case("x[-1:]", lambda x: x[-1:], (X,)),
    Case("x[integers]", lambda x, i: x[i], (X, ROWS)),
    Case("x[:, integers]", lambda x, i: x[:, i], (X, ints(4, below=4))),
    Case("x[integers, integers]", lambda x, i, j: x[i, j], (X, ROWS, ints(4, below=4))),
    Case("x[integers of two dims]", lambda x, i: x[i], (X, ints(4, 2))),
    Case("x[i] = new", _assign(3), (X, values(4, seed=3))),
    Case("x[a:b] = new", _assign(slice(2, 6)), (X, NEW)),
    Case("x[:, i] = new", _assign((slice(None), 1)), (X, values(8, seed=3))),
    Case("x[integers] = new", _assign(torch.tensor([1, 4, 6, 7])), (X, NEW)),
    Case("x[mask] = number", _masked_assign, (X, mask(8, 4))),
    Case("index_select", lambda x, i: x.index_select(0, i), (X, ROWS)),
    Case("index_select, dim 1", lambda x, i: x.index_select(1, i), (X, ints(4, below=4))),
    Case("index_add", lambda x, i, y: x.index_add(0, i, y), (X, ROWS, NEW)),
    Case("index_copy", lambda x, i, y: x.index_copy(0, i, y), (X, torch.tensor([1, 4, 6, 7]), NEW)),
    Case("index_fill", lambda x, i: x.index_fill(0, i, 0.5), (X, ROWS)),
    Case("index_put, accumulate", lambda x, i, y: x.index_put((i,), y, accumulate=True), (X, ROWS, NEW)),
    Case("gather, dim 0", lambda x, i: x.gather(0, i), (X, ints(4, 4))),
    Case("gather, dim 1", lambda x, i: x.gather(1, i), (X, ints(8, 4, below=4))),
    Case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), (X, ints(8, 2, below=4))),
    Case("take", lambda x, i: x.take(i), (X, ints(4, below=32))),
    Case("scatter", lambda x, i, y: x.scatter(0, i, y), (X, torch.arange(4).repeat(4, 1).t() * 2, NEW)),
    Case("scatter, number", lambda x, i: x.scatter(1, i, 0.5), (X, ints(8, 1, below=4))),
    Case("scatter_add, dim 0", lambda x, i, y: x.scatter_add(0, i, y), (X, ints(4, 4), NEW)),
    Case("scatter_add, dim 1", lambda x, i, y: x.scatter_add(1, i, y), (X, ints(8, 4, below=4), values(8, 4, seed=5))),
    Case("scatter_reduce", lambda x, i, y: x.scatter_reduce(0, i, y, "amax"), (X, ints(4, 4), NEW)),
    Case("select_scatter", lambda x, y: x.select_scatter(y, 0, 2), (X, values(4))),
    Case("slice_scatter", lambda x, y: x.slice_scatter(y, 0, 2, 6), (X, NEW)),
    Case("masked_scatter", lambda x, m, y: x.masked_scatter(m, y), (X, mask(8, 4), values(8, 4, seed=6))),
    Case("F.embedding", lambda table, i: F.embedding(i, table), (X, ints(4, 2))),
    Case("F.embedding, padding", lambda table, i: F.embedding(i, table, padding_idx=2), (X, ints(4, 2))),
    Case("F.embedding_bag", lambda table, i: F.embedding_bag(i, table, mode="mean"), (X, ints(4, 2))),
    Case("F.one_hot", lambda i: F.one_hot(i, 8), (ROWS,)),
    Case("one-hot product", lambda table, i: F.one_hot(i, 8).to(table.dtype) @ table, (X, ROWS)),
    Case("rotary", _rotary, ROTARY, whole=(2,)),
    Case("rotary, pairs", _rotary_pairs, ROTARY, whole=(2,)),
    Case("arange index", lambda x: x[torch.arange(4) * 2], (X,)),
    Case("causal mask", lambda x: x.masked_fill(torch.ones(8, 8).tril() == 0, -9.0), (values(8, 8),)),
    Case("nonzero", lambda x: x.nonzero(), (ints(8, below=2),), refused="its shape depends on values"),
    Case("masked_select", lambda x, m: x.masked_select(m), (X, mask(8, 4)), refused="its shape depends on values"),
]
