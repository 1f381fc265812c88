"""Functions that torch computes in a way that shards can't follow, written for global values.

A batch normalisation whose kernel writes into its operands without saying so; assignments through views of dims that
are sharded; cross-entropies (see `mean_losses`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptrainx.compile.instance_norm import instance_norm
from ptrainx.compile.lookups import embedding_bag
from ptrainx.compile.loss_forms import gaussian_nll_loss
from ptrainx.compile.mean_losses import cross_entropy, nll_loss
from ptrainx.compile.quantiles import quantile
from ptrainx.mesh.placement import uneven_axes

__all__ = ["GLOBAL_FORMS", "PER_SHARD_FORMS", "batch_norm", "prelu", "set_item"]

T = torch.Tensor


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm`; in training, means and variances are of the global batch.

    Source: Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167.
    """
    dims = [d for d in range(input.ndim) if d != 1]
    shape = [1, -1] + [1] * (input.ndim - 2)
    if training:
        count = input.numel() // input.shape[1]
        mean = input.mean(dims)
        centred = input - mean.reshape(shape)
        var = (centred * centred).mean(dims)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.copy_(running_mean * (1 - momentum) + momentum * mean)
                running_var.copy_(running_var * (1 - momentum) + momentum * var * (count / max(count - 1, 1)))
    else:
        assert running_mean is not None
        assert running_var is not None
        centred, var = input - running_mean.reshape(shape), running_var
    out = centred * torch.rsqrt(var.reshape(shape) + eps)
    if weight is not None:
        out = out * weight.reshape(shape)
    return out if bias is None else out + bias.reshape(shape)


def _batch_norm(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn: bool
) -> torch.Tensor:
    """`torch.batch_norm`, whose arguments are in another order."""
    return batch_norm(input, mean, var, weight, bias, training, momentum, eps)


def prelu(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.prelu`; its kernel meets a view that can't be moved to another placement."""
    shape = [1, -1] + [1] * (input.ndim - 2) if input.ndim > 1 else [-1]
    return torch.where(input > 0, input, weight.reshape(shape) * input)


def set_item(value: torch.Tensor, index: Any, new: Any) -> None:
    """`value[index] = new`. Where the index picks from a sharded dim, there is no view to write through: the value is
    gathered, written and split again. So is one with a dim that is cut unevenly, and one whose sum is owed."""
    placements = value.placements if isinstance(value, DTensor) else ()
    moves = any(p.is_partial() for p in placements) or (isinstance(value, DTensor) and uneven_axes(value))
    if not moves and not any(_picks(index, p.dim % value.ndim) for p in placements if isinstance(p, Shard)):
        T.__setitem__(value, index, new)
        return
    assert isinstance(value, DTensor)
    whole: Any = value.redistribute(value.device_mesh, [Replicate()] * len(placements)).clone()
    T.__setitem__(whole, index, new)
    value.copy_(whole.redistribute(value.device_mesh, [Replicate() if p.is_partial() else p for p in placements]))


def _picks(index: Any, dim: int) -> bool:
    """Whether an index takes less than all of a dim; yes, where that isn't plain."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, (int, slice)) for part in parts):
        return True
    return dim < len(parts) and parts[dim] != slice(None)


GLOBAL_FORMS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    torch.batch_norm: _batch_norm,
    T.__setitem__: set_item,
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.instance_norm: instance_norm,
    F.embedding_bag: embedding_bag,
    F.prelu: prelu,
    torch.quantile: quantile,
    T.quantile: quantile,
}
"""Function -> how it is computed where its arguments are global values."""

PER_SHARD_FORMS: dict[Any, Callable[..., Any]] = {F.batch_norm: batch_norm, torch.batch_norm: _batch_norm}
"""The same where they are one rank's own."""
