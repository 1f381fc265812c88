"""Stochastic rounding to bfloat16 with an explicit key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError
from ptrainx.ops.random.draw import check_key, draw, overridable

__all__ = ["stochastic_round"]

_DROPPED = (1 << 16) - 1
"""The bits of a float32 that a bfloat16 lacks."""


@overridable
def stochastic_round(key: Tensor, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    r"""Rounds each element to one of its two neighbours in bfloat16, such that the mean is the element.

    With neighbours :math:`a \le x \le b` the result is :math:`b` with probability :math:`(x - a) / (b - a)`, in steps
    of :math:`2^{-16}`, which is exact for a float32. So updates that are smaller than the spacing of bfloat16 add up
    over steps, where rounding to the nearest would lose every one of them. What bfloat16 holds stays as it is; so do
    infinities and NaNs. Which neighbour it is depends on the key and the element's global index alone: the same on
    every mesh.

    Args:
        key: int32[2]; one for each call.
        x: float32; float64 and narrower ones are taken to float32 first. Sums that are owed are paid.
        dtype: bfloat16.

    Returns:
        bfloat16, shaped and placed as x. It has no gradient.

    Raises:
        InputError: a bad key, a tensor of integers, another dtype.

    >>> from ptrainx.ops.random import key
    >>> x = torch.full((10000,), 1.0 + 2**-9)  # a quarter of the way from 1 to 1.0078
    >>> (stochastic_round(key(0), x) > 1).float().mean()
    tensor(0.2469)

    Source: Gupta, Agrawal, Gopalakrishnan, Narayanan, "Deep Learning with Limited Numerical Precision", 2015,
    https://arxiv.org/abs/1502.02551.
    """
    check_key(key, "stochastic_round")
    _check(x, dtype)
    value = x.detach().to(torch.float32)
    if isinstance(value, DTensor):
        paid = tuple(Replicate() if placement.is_partial() else placement for placement in value.placements)
        value = value if paid == tuple(value.placements) else value.redistribute(value.device_mesh, paid)
        noise = draw(key, value.shape, "bits", placements=paid, like=value)
    else:
        noise = draw(key, value.shape, "bits")
    # The bits of a float count up with its size: a carry out of the dropped ones leads to the next bfloat16.
    moved = (value.view(torch.int32) + (noise & _DROPPED)) & ~_DROPPED
    return torch.where(value.isfinite(), moved.view(torch.float32), value).to(torch.bfloat16)


def _check(x: Any, dtype: Any) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise InputError(
            "px.random.stochastic_round: x is not a tensor of floats",
            got=describe(x),
            fix="the order is (key, x, ...); convert integers with x.float()",
        )
    if dtype != torch.bfloat16:
        raise InputError(
            "px.random.stochastic_round: no stochastic rounding to this dtype",
            got=str(dtype),
            expected="torch.bfloat16",
            fix="round to others with x.to(dtype), to the nearest",
        )
