"""The distributions, with JAX's names and order of arguments.

Each is a function of key, shape and parameters alone: the numbers do not depend on the mesh, and a shard of an array
holds the same numbers as that part of the whole array.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError
from ptrainx.ops.random.distributions import float32, truncated_range
from ptrainx.ops.random.draw import Shape, check_key, check_shape, draw, overridable

__all__ = ["bernoulli", "bits", "normal", "randint", "truncated_normal", "uniform"]

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# Mantissa bits, and the random bits that JAX cuts them from.
_HALVES = {torch.float16: (10, 16), torch.bfloat16: (7, 8)}
_LARGEST_SPAN = 1 << 40
# A truncated normal is refused where float32 leaves fewer values than this between its bounds.
_LEAST_RESOLUTION = 4096


@overridable
def bits(key: Tensor, shape: Shape = ()) -> Tensor:
    """Random bits.

    Args:
        key: int32[2].
        shape: of the result.

    Returns:
        int32: 32 independent bits an element, those of JAX's uint32.

    >>> from ptrainx.ops.random import key
    >>> bits(key(0), (2,))
    tensor([-224768089,  -91998574], dtype=torch.int32)
    """
    check_key(key, "bits")
    return draw(key, check_shape(shape, "bits"), "bits")


@overridable
def uniform(
    key: Tensor,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    minval: float = 0.0,
    maxval: float = 1.0,
) -> Tensor:
    """Uniform numbers in [minval, maxval).

    Args:
        key: int32[2].
        shape: of the result.
        dtype: float32 (23 random bits), float64 (52), float16 (10) or bfloat16 (7), as JAX.
        minval, maxval: numbers. Where they are much larger than their distance, rounding may give `maxval` itself.

    Raises:
        InputError: a bad key, shape, dtype or bound.

    >>> from ptrainx.ops.random import key
    >>> uniform(key(0), (2,))
    tensor([0.9477, 0.9786])
    """
    check_key(key, "uniform")
    sizes = check_shape(shape, "uniform")
    _check_dtype(dtype, _FLOATS, "uniform")
    low, high = _bounds(minval, maxval, "uniform")
    if dtype == torch.float32:
        return draw(key, sizes, "uniform", low, high)
    if dtype == torch.float64:
        return draw(key, sizes, "uniform64", low, high)
    mantissa, width = _HALVES[dtype]
    u = draw(key, sizes, "bits").bitwise_right_shift(width - mantissa).bitwise_and((1 << mantissa) - 1).to(dtype)
    u = u * 2.0**-mantissa
    return u if (low, high) == (0.0, 1.0) else (u * (high - low) + low).clamp_min(low)


@overridable
def normal(key: Tensor, shape: Shape = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of mean 0 and variance 1.

    Drawn by the inverse of the distribution function, in float32 from 23 bits, whatever the dtype: exact to 3.3 units
    in the last place, between -5.42 and 5.22.

    Args:
        key: int32[2].
        shape: of the result.
        dtype: any float dtype; the float32 numbers are rounded to it.

    Raises:
        InputError: a bad key, shape or dtype.

    >>> from ptrainx.ops.random import key
    >>> normal(key(0), (2,)) * 0.02
    tensor([0.0325, 0.0405])
    """
    check_key(key, "normal")
    sizes = check_shape(shape, "normal")
    _check_dtype(dtype, _FLOATS, "normal")
    return _cast(draw(key, sizes, "normal"), dtype)


@overridable
def truncated_normal(
    key: Tensor, lower: float, upper: float, shape: Shape = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal numbers, given that they lie between two bounds.

    Args:
        key: int32[2].
        lower, upper: numbers, -inf and inf too, in standard deviations.
        shape: of the result.
        dtype: any float dtype; the float32 numbers are rounded to it.

    Returns:
        numbers in (lower, upper); not scaled to variance 1.

    Raises:
        InputError: a bad key, shape or dtype; bounds in the wrong order, or so close or so far out that float32 holds
            fewer than 4,096 values between them.

    >>> from ptrainx.ops.random import key
    >>> truncated_normal(key(0), -2, 2, (2,))
    tensor([1.4560, 1.7147])
    """
    check_key(key, "truncated_normal")
    sizes = check_shape(shape, "truncated_normal")
    _check_dtype(dtype, _FLOATS, "truncated_normal")
    low, high = _bounds(lower, upper, "truncated_normal", finite=False)
    a, b = truncated_range(low, high)
    values = (b - a) / float(np.spacing(np.float32(max(abs(a), abs(b)))))
    if values < _LEAST_RESOLUTION:
        raise InputError(
            "px.random.truncated_normal: too little of the normal distribution lies between the bounds",
            got=f"lower={lower}, upper={upper}, with about {max(int(values), 0)} float32 values between them",
            expected=f"at least {_LEAST_RESOLUTION}",
            fix="move the bounds apart or towards zero; far out, draw an exponential tail instead",
        )
    return _cast(draw(key, sizes, "truncated_normal", low, high), dtype)


@overridable
def randint(key: Tensor, shape: Shape, minval: int, maxval: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Uniform integers in [minval, maxval).

    A 64-bit random number modulo the span: no value is likelier than another by more than span / 2**64. Spans up to
    2**16, and powers of two up to 2**32, give JAX's int32 numbers; JAX's own are biased for larger spans.

    Args:
        key: int32[2].
        shape: of the result.
        minval, maxval: integers, at most 2**40 apart.
        dtype: any integer dtype that holds them.

    Raises:
        InputError: a bad key, shape or dtype; an empty or too large range; a bound that the dtype can't hold.

    >>> from ptrainx.ops.random import key
    >>> randint(key(0), (5,), 0, 10)
    tensor([9, 0, 2, 3, 1])
    """
    check_key(key, "randint")
    sizes = check_shape(shape, "randint")
    _check_dtype(dtype, _INTEGERS, "randint")
    try:
        low, high = operator.index(minval), operator.index(maxval)
    except TypeError:
        low, high = 0, 0
    info = torch.iinfo(dtype)
    if not (0 < high - low <= _LARGEST_SPAN and info.min <= low and high - 1 <= info.max):
        raise InputError(
            f"px.random.randint: no {dtype} integers in [minval, maxval)",
            got=f"minval={minval!r}, maxval={maxval!r}",
            expected=f"integers with 0 < maxval - minval <= 2**40, from {info.min} to {info.max}",
            fix="pass Python ints; a traced bound needs scaling by hand: (px.random.uniform(key, shape) * n).long()",
        )
    out = draw(key, sizes, "randint", float(high - low))
    return _cast(out + low if low else out, dtype)


@overridable
def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Shape | None = None) -> Tensor:
    """Bools that are true with probability p.

    Args:
        key: int32[2].
        p: a number from 0 to 1, rounded up to a multiple of 2**-23; or a float tensor of them.
        shape: of the result; the shape of `p` if left out. `p` broadcasts to it.

    Raises:
        InputError: a bad key, shape or probability.

    >>> from ptrainx.ops.random import key
    >>> bernoulli(key(0), 0.5, (3,))
    tensor([False, False,  True])
    """
    check_key(key, "bernoulli")
    if isinstance(p, Tensor):
        _check_dtype(p.dtype, _FLOATS, "bernoulli")
        sizes = tuple(p.shape) if shape is None else check_shape(shape, "bernoulli")
        return draw(key, sizes, "uniform") < p
    sizes = check_shape(() if shape is None else shape, "bernoulli")
    if not _is_number(p) or not 0.0 <= float(p) <= 1.0:
        raise InputError("px.random.bernoulli: p is not a probability", got=repr(p), expected="a number from 0 to 1")
    return draw(key, sizes, "bernoulli", float32(float(p)))


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype == dtype else value.to(dtype)


def _is_number(value: Any) -> bool:
    return not isinstance(value, (Tensor, str, bytes)) and hasattr(value, "__float__")


def _bounds(low: Any, high: Any, where: str, finite: bool = True) -> tuple[float, float]:
    ok = _is_number(low) and _is_number(high) and float(low) <= float(high)
    if not ok or (finite and not math.isfinite(float(high) - float(low))):
        raise InputError(
            f"px.random.{where}: the bounds are not an interval",
            got=f"{low!r} and {high!r}" if not isinstance(low, Tensor) else f"{describe(low)} and {describe(high)}",
            expected="two numbers, the lower one first",
            fix="pass Python numbers; scale by a tensor afterwards: px.random.uniform(key, shape) * (high - low) + low",
        )
    return float(low), float(high)


def _check_dtype(dtype: Any, allowed: tuple[torch.dtype, ...], where: str) -> None:
    if dtype not in allowed:
        raise InputError(
            f"px.random.{where}: no numbers of this dtype",
            got=str(dtype),
            expected="one of " + ", ".join(str(d).removeprefix("torch.") for d in allowed),
        )
