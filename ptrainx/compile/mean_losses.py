"""Cross-entropies whose mean is over counted targets, written for global values.

torch's kernel divides by the weights of the targets that it sees: over sharded rows, by those of a shard, and the mean
of the shards' means is not the mean where targets are ignored or weighted. Here the sum over all rows is divided by the
weight of all targets.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ptrainx.core.errors import InputError

__all__ = ["cross_entropy", "nll_loss"]


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy`; its mean is over the global batch."""
    _refuse_deprecated("cross_entropy", size_average, reduce)
    settings: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if reduction != "mean":
        return F.cross_entropy(input, target, reduction=reduction, **settings)
    total = F.cross_entropy(input, target, reduction="sum", **settings)
    if target.is_floating_point():  # probabilities: every row counts as one
        classes = input.shape[1] if input.ndim > 1 else input.shape[0]
        return total / (input.numel() // classes)
    return total / _counted(target, weight, ignore_index, input.dtype)


def nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.nll_loss`; its mean is over the global batch."""
    _refuse_deprecated("nll_loss", size_average, reduce)
    if reduction != "mean":
        return F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    total = F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction="sum")
    return total / _counted(target, weight, ignore_index, input.dtype)


def _counted(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight of all targets that are not ignored."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum().to(dtype)
    safe = target.masked_fill(~counts, 0)
    own = F.embedding(safe, weight.detach().unsqueeze(1)).squeeze(-1)
    return (own * counts).sum()


def _refuse_deprecated(name: str, size_average: Any, reduce: Any) -> None:
    if size_average is not None or reduce is not None:
        raise InputError(
            f"{name}: size_average and reduce are deprecated in torch, and not supported over sharded values",
            fix='pass reduction="mean", "sum" or "none"',
        )
