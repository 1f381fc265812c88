"""Keys: where all random numbers come from. A key is a value, made from a seed and split, never advanced.

The same key gives the same numbers, so use each key once: split it into one for every use.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError
from ptrainx.ops.random.draw import check_key, on_local, overridable
from ptrainx.ops.random.operator import HASH, SUBKEYS
from ptrainx.ops.random.threefry import signed

__all__ = ["fold_in", "key", "split"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def key(seed: int) -> Tensor:
    """The key of a seed.

    Args:
        seed: an integer, from -2**63 to 2**64 - 1.

    Returns:
        int32[2]: the upper and the lower half of the seed, as JAX has them.

    Raises:
        InputError: not an integer, or out of range.

    >>> key(42)
    tensor([ 0, 42], dtype=torch.int32)
    """
    number = _index(seed)
    if number is None or not -(1 << 63) <= number < 1 << 64:
        raise InputError(
            "px.random.key: seed is not a 64-bit integer",
            got=describe(seed),
            expected="an int from -2**63 to 2**64 - 1",
            fix="pass an int; to vary a key by a traced number, use px.random.fold_in(key, number)",
        )
    return torch.tensor([signed(number >> 32), signed(number)], dtype=torch.int32)


@overridable
def split(key: Tensor, num: int = 2) -> Tensor:
    """New keys from one; the old one is used up.

    Args:
        key: int32[2].
        num: how many.

    Returns:
        int32[num, 2]: iterate over it, or index it. The first keys do not depend on `num`.

    Raises:
        InputError: a bad key, or `num` not a positive integer.

    >>> k1, k2 = split(key(0))
    >>> k1
    tensor([ 1797259609, -1715843330], dtype=torch.int32)
    """
    check_key(key, "split")
    count = _index(num)
    if count is None or count < 1:
        raise InputError("px.random.split: num is not a positive integer", got=describe(num), fix="split(key, 2)")
    return on_local(lambda k: SUBKEYS(k, 0, count), key)


@overridable
def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and a number, such as a step, a layer or a microbatch.

    Args:
        key: int32[2].
        data: an integer of 64 bits, or a 0-d integer tensor, which may be traced. Numbers from 0 to 2**32 - 1 give
            JAX's keys.

    Returns:
        int32[2].

    Raises:
        InputError: a bad key, or `data` not an integer.

    >>> fold_in(key(0), 1)
    tensor([ 928981903, -841280227], dtype=torch.int32)
    """
    check_key(key, "fold_in")
    if isinstance(data, Tensor) and data.ndim == 0 and data.dtype in _INTEGERS:
        return on_local(HASH, key, data)
    number = None if isinstance(data, Tensor) else _index(data)
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise InputError(
            "px.random.fold_in: data is not an integer",
            got=describe(data),
            expected="an int, or a 0-d integer tensor",
            fix="fold in one number a call; for several keys use px.random.split(key, n)",
        )
    return on_local(lambda k: SUBKEYS(k, number, 1).view(2), key)


def _index(value: Any) -> int | None:
    """A Python or numpy integer as an int; None for all else, bools and tensors too."""
    if isinstance(value, (bool, Tensor)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
