"""Attention's CPU kernel: torch 2.13 has a sharding rule for CUDA's flash kernel, not for this one.

Batch (dim 0) and heads (dim 1) are independent in attention, so query, key, value and output may be split along either;
sequence and head dim may not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["register_attention_rules"]


def register_attention_rules() -> None:
    """Registers the forward and the backward kernel's rules."""
    aten = torch.ops.aten

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)  # type: ignore[untyped-decorator]
    def forward(query: Any, key: Any, value: Any, dropout_p: Any = 0.0, is_causal: Any = False, **kwargs: Any) -> Any:
        mask = kwargs.get("attn_mask")
        return [_rule(3, 2, 2, p, mask) for p in (Replicate(), Shard(0), Shard(1)) if _mask_fits(mask, p)]

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)  # type: ignore[untyped-decorator]
    def backward(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attn_mask")
        return [_rule(6, 3, 2, p, mask) for p in (Replicate(), Shard(0), Shard(1)) if _mask_fits(mask, p)]


def _rule(inputs: int, outputs: int, others: int, placement: Any, mask: Any) -> Any:
    """One acceptable row: every tensor at `placement`; numbers and flags are no tensors, hence None."""
    keyword = [] if mask is None else [_mask_placement(mask, placement)]
    return [placement] * outputs, [placement] * inputs + [None] * others + keyword


def _mask_shape(mask: Any) -> tuple[int, ...]:
    return tuple(mask.tensor_meta.shape if hasattr(mask, "tensor_meta") else mask.shape)


def _mask_placement(mask: Any, placement: Any) -> Any:
    shape = _mask_shape(mask)
    if isinstance(placement, Shard) and len(shape) == 4 and shape[placement.dim] > 1:
        return placement
    return Replicate()


def _mask_fits(mask: Any, placement: Any) -> bool:
    return mask is None or len(_mask_shape(mask)) in (2, 4)
