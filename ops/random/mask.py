"""Dropout with an explicit key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError
from ptrainx.ops.random.distributions import keep_count
from ptrainx.ops.random.draw import check_key, draw, overridable

__all__ = ["dropout"]


@overridable
def dropout(key: Tensor, x: Tensor, rate: float) -> Tensor:
    """Zeroes elements at random and scales the others up, so that the mean stays.

    An element is kept with probability q = round((1 - rate) * 65536) / 65536, at least 1 / 65536, and then divided by
    q: sixteen random bits decide, so that one hash serves four elements. Whether an element is kept depends on the key
    and its global index alone: the same on every mesh. Each rank draws the mask of its own shard; a sum that is owed
    (`Partial`) stays owed.

    Args:
        key: int32[2]; one for each call.
        x: a tensor of floats.
        rate: the share to drop, from 0 up to but not including 1, a Python number.

    Returns:
        x * mask / q, shaped and placed as x. The gradient with respect to x is mask / q.

    Raises:
        InputError: a bad key, a tensor of integers, a rate outside [0, 1).

    >>> from ptrainx.ops.random import key
    >>> dropout(key(0), torch.ones(6), 0.5)
    tensor([0., 0., 0., 2., 0., 0.])

    Source: Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov, "Dropout", JMLR 15, 2014.
    """
    check_key(key, "dropout")
    _check(x, rate)
    if rate == 0:
        return x
    kept = keep_count(float(rate))
    scale = 65536 / kept
    exact = x.dtype == torch.float32
    mask = _mask(key, x, kept, scale if exact else 1.0)
    # In other dtypes the scale is applied in full precision and the mask is of zeros and ones.
    return x * mask if exact else x * scale * mask.to(x.dtype)


def _mask(key: Tensor, x: Tensor, kept: int, value: float) -> Tensor:
    if isinstance(x, DTensor):
        return draw(key, x.shape, "dropout", float(kept), value, placements=x.placements, like=x)
    return draw(key, x.shape, "dropout", float(kept), value)


def _check(x: Any, rate: Any) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise InputError(
            "px.random.dropout: x is not a tensor of floats",
            got=describe(x),
            fix="the order is (key, x, ...); convert integers with x.float()",
        )
    if isinstance(rate, Tensor) or not hasattr(rate, "__float__") or not 0.0 <= float(rate) < 1.0:
        raise InputError(
            "px.random.dropout: rate is not in [0, 1)",
            got=describe(rate) if isinstance(rate, Tensor) else repr(rate),
            expected="a Python number: the share of elements to drop",
            fix="to keep a share p, pass rate = 1 - p; to turn dropout off, pass rate = 0",
        )
