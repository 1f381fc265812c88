"""Reductions for which torch has a wrong rule.

torch 2.13's rule of `logsumexp` looks for `keepdim` among the keyword arguments, where the dispatcher never has it:
with `keepdim=True` it says that the result is split along a dim before the one that it is split along.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

from ptrainx.ops.sharding_rules.registry import register_sharding

__all__ = ["register_reduction_rules"]


def register_reduction_rules() -> None:
    """Registers the rules of this file."""
    register_sharding(torch.ops.aten.logsumexp.default)(_logsumexp)


def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> list[Any]:
    """A dim that is kept may be split."""
    ndim = len(x.shape)
    dims = [dim] if isinstance(dim, int) else list(dim) or list(range(ndim))
    reduced = {d % ndim for d in dims} if ndim else set()
    kept = [d for d in range(ndim) if d not in reduced]
    return [(Shard(d if keepdim else i), [Shard(d)]) for i, d in enumerate(kept)]
