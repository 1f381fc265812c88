"""Attention to keys and values that are gathered whole: for derivatives of derivatives, which a ring has none of."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ptrainx.ops.attention.order import zigzag
from ptrainx.ops.collectives.all_gather import all_gather
from ptrainx.ops.collectives.axis_index import axis_index

__all__ = ["whole_attention"]


def whole_attention(q: Any, k: Any, v: Any, axis: str, n: int, causal: bool, order: str, scale: float) -> Any:
    """This rank's queries' attention to all keys; per-shard values, in the body of a `shard_map`."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if n == 1:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    k, v = (all_gather(x, axis, axis=2, tiled=True) for x in (k, v))
    mask = None
    if causal:
        length = k.shape[2]
        positions = zigzag(length, n) if order == "zigzag" else torch.arange(length)
        own = positions.view(n, -1).index_select(0, axis_index(axis)[None])[0]
        mask = own[:, None] >= positions
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
