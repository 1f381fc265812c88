"""Attention's CPU kernel: torch 2.13 has a sharding rule for CUDA's flash kernel, not for this one.

Batch (dim 0) and heads (dim 1) are independent in attention, so query, key, value and output may be split along either;
sequence and head dim may not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from ptrainx.ops.sharding_rules.registry import register_sharding

__all__ = ["register_attention_rules"]


def register_attention_rules() -> None:
    """Registers the forward and the backward kernel's rules."""
    aten = torch.ops.aten

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)
    def forward(*args: Any, **kwargs: Any) -> list[Any]:
        return _rows(2, 3, args, kwargs)

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    def backward(*args: Any, **kwargs: Any) -> list[Any]:
        return _rows(3, 6, args, kwargs)


def _rows(results: int, operands: int, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Every tensor split along the batch, or every tensor along the heads; the mask with them where it has the dim."""
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.ndim not in (2, 4):
        return []
    rest = [None] * (len(args) - operands)
    return [
        ([split] * results, [split] * operands + rest + [_mask_placement(split, value) for value in kwargs.values()])
        for split in (Shard(0), Shard(1))
    ]


def _mask_placement(split: Shard, mask: Any) -> Any:
    if not hasattr(mask, "shape"):
        return None
    return split if mask.ndim == 4 and mask.shape[split.dim] > 1 else Replicate()
