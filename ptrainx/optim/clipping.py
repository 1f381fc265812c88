"""Bounds on updates: each element (`clip`), or all leaves together by their norm (`clip_by_global_norm`)."""

from __future__ import annotations

from typing import Any

import torch

from ptrainx.core import tree
from ptrainx.optim.base import EmptyState, GradientTransformation
from ptrainx.optim.checks import POSITIVE_OR_TENSOR, check
from ptrainx.optim.scaling import times

__all__ = ["clip", "clip_by_global_norm", "global_norm"]


def global_norm(updates: Any) -> torch.Tensor:
    r"""The Euclidean norm of all leaves together, :math:`\sqrt{\sum_\ell \sum_i x_{\ell i}^2}`.

    Over sharded leaves the sums of squares stay unreduced until the root, so one all-reduce a mesh axis pays for all
    leaves, whatever their placements.

    Args:
        updates: pytree of tensors.

    Returns:
        0-d tensor: float64 if a leaf is, else float32 (halves are squared and summed in float32, where they can't
        overflow). Of an empty tree, zero.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
    tensor(5.)
    """
    values = tree.leaves(updates)
    if not values:
        return torch.zeros(())
    dtype = torch.float64 if any(v.dtype == torch.float64 for v in values) else torch.float32
    sums = [_sum_of_squares(v).to(dtype) for v in values]
    return torch.stack(sums).sum().sqrt()


def _sum_of_squares(value: torch.Tensor) -> torch.Tensor:
    value = value if value.dtype == torch.float64 else value.to(torch.float32)
    return (value * value).sum()


def clip_by_global_norm(max_norm: float | torch.Tensor) -> GradientTransformation:
    r"""Scales all updates by :math:`\min(1, \text{max\_norm} / \text{global\_norm})`.

    A norm that is NaN makes every update NaN; an infinite one makes finite elements zero and infinite ones NaN.

    Args:
        max_norm: a number > 0, or a 0-d tensor.

    Raises:
        HyperparameterError: `max_norm` is not positive, not finite, or of another type.

    >>> clip_by_global_norm(1.0).update(torch.tensor([3.0, 4.0]), EmptyState())[0]
    tensor([0.6000, 0.8000])

    Source: Pascanu et al., "On the difficulty of training Recurrent Neural Networks", 2013,
    https://arxiv.org/abs/1211.5063.
    """
    check("clip_by_global_norm", max_norm=(max_norm, POSITIVE_OR_TENSOR))

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        # The bound on the quotient, not on the norm, makes it exactly 1 where nothing is clipped, and at norm 0.
        return times(updates, (max_norm / global_norm(updates)).clamp(max=1.0)), state

    return GradientTransformation(lambda params: EmptyState(), update)


def clip(max_delta: float | torch.Tensor) -> GradientTransformation:
    """Bounds every element of the updates to [-max_delta, max_delta].

    Args:
        max_delta: a number > 0, or a 0-d tensor.

    Raises:
        HyperparameterError: `max_delta` is not positive, not finite, or of another type.

    >>> clip(1.0).update(torch.tensor([0.5, -3.0]), EmptyState())[0]
    tensor([ 0.5000, -1.0000])
    """
    check("clip", max_delta=(max_delta, POSITIVE_OR_TENSOR))
    low: Any = -max_delta
    high: Any = max_delta

    def bound(update: torch.Tensor) -> torch.Tensor:
        return update.clamp(low, high).to(update.dtype)

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        return tree.map(bound, updates), state

    return GradientTransformation(lambda params: EmptyState(), update)
