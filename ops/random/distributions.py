"""From random words to numbers: each distribution fills one segment of its output.

`bits`, `uniform`, `bernoulli` and, for spans up to 2**16 or powers of two, `randint` equal JAX's with
`jax_threefry_partitionable`; `normal` and `truncated_normal` agree with JAX's to a few ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ptrainx.ops.random.blocks import Segment
from ptrainx.ops.random.inverse_normal import LARGEST, normal_
from ptrainx.ops.random.stream import Stream
from ptrainx.ops.random.threefry import MASK32

__all__ = ["DISTRIBUTIONS", "Distribution", "float32", "keep_count", "truncated_range"]


class Distribution(NamedTuple):
    """How one distribution is drawn.

    Attributes:
        dtype: of the numbers.
        fill: writes a segment's numbers: (streams, segment, out[size], a, b).
        streams: which keys feed it: the key itself, or its first two subkeys.
        per_hash: elements that one hash serves.
    """

    dtype: torch.dtype
    fill: Callable[[tuple[Stream, ...], Segment, Tensor, float, float], None]
    streams: int = 1
    per_hash: int = 1

    def limit(self, length: int, hashes: int) -> int:
        """The most elements, in runs of this length, that so many hashes serve wherever the runs begin."""
        k = self.per_hash
        per_run = (length + 2 * (k - 1)) // k
        return min(k * hashes - 2 * (k - 1), hashes * length // per_run)


def float32(value: float) -> float:
    """The nearest float32."""
    return float(np.float32(value))


def keep_count(rate: float) -> int:
    """How many of 65,536 values of sixteen bits keep an element at this dropout rate; at least one."""
    return max(1, round((1.0 - rate) * 65536))


def truncated_range(lower: float, upper: float) -> tuple[float, float]:
    """Where u = erf(z / sqrt 2) lies for z between the bounds, as float32 inside (-1, 1)."""
    low, high = (float32(math.erf(z / math.sqrt(2.0))) for z in (lower, upper))
    return max(low, -LARGEST), min(high, LARGEST)


def _bits(streams: tuple[Stream, ...], segment: Segment, out: Tensor, a: float, b: float) -> None:
    out.copy_(streams[0].bits(segment))


def _mantissa(stream: Stream, segment: Segment) -> Tensor:
    """The upper 23 bits of each element, int32."""
    return stream.bits(segment).bitwise_right_shift_(9).bitwise_and_(0x7FFFFF)


def _affine(out: Tensor, low: float, high: float) -> None:
    """From [0, 1) to [low, high), rounded as JAX rounds."""
    if (low, high) != (0.0, 1.0):
        out.mul_(float32(high - low)).add_(low).clamp_min_(low)


def _uniform(streams: tuple[Stream, ...], segment: Segment, out: Tensor, a: float, b: float) -> None:
    out.copy_(_mantissa(streams[0], segment)).mul_(2.0**-23)
    _affine(out, float32(a), float32(b))


def _uniform64(streams: tuple[Stream, ...], segment: Segment, out: Tensor, a: float, b: float) -> None:
    high, low = (word.to(torch.int64) for word in streams[0].words(segment))
    out.copy_((high & MASK32) << 20 | (low >> 12) & 0xFFFFF).mul_(2.0**-52)
    if (a, b) != (0.0, 1.0):
        out.mul_(b - a).add_(a).clamp_min_(a)


def _bernoulli(streams: tuple[Stream, ...], segment: Segment, out: Tensor, a: float, b: float) -> None:
    # u < p with u = m * 2**-23 is m < p * 2**23.
    torch.lt(_mantissa(streams[0], segment), math.ceil(float32(a) * 2.0**23), out=out)


def _normal(streams: tuple[Stream, ...], segment: Segment, out: Tensor, a: float, b: float) -> None:
    out.copy_(_mantissa(streams[0], segment)).mul_(2.0**-22).add_(-LARGEST)
    normal_(out, streams[0].spare(segment))


def _truncated_normal(streams: tuple[Stream, ...], segment: Segment, out: Tensor, a: float, b: float) -> None:
    low, high = truncated_range(a, b)
    out.copy_(_mantissa(streams[0], segment)).mul_(2.0**-23)
    _affine(out, low, high)
    normal_(out.clamp_max_(high), streams[0].spare(segment))
    inf = np.float32(np.inf)
    out.clamp_(float(np.nextafter(np.float32(a), inf)), float(np.nextafter(np.float32(b), -inf)))


def _randint(streams: tuple[Stream, ...], segment: Segment, out: Tensor, a: float, b: float) -> None:
    """(2**32 * h + l) mod span, sixteen bits of l at a time so that nothing overflows for spans up to 2**40."""
    span = int(a)
    low = streams[1].bits(segment).to(torch.int64).bitwise_and_(MASK32)
    if span & (span - 1) == 0 and span <= 1 << 32:
        torch.bitwise_and(low, span - 1, out=out)
        return
    out.copy_(streams[0].bits(segment)).bitwise_and_(MASK32).remainder_(span)
    out.mul_(1 << 16).add_(low >> 16).remainder_(span)
    out.mul_(1 << 16).add_(low.bitwise_and_(0xFFFF)).remainder_(span)


def _dropout(streams: tuple[Stream, ...], segment: Segment, out: Tensor, a: float, b: float) -> None:
    # Comparing straight into float32 is four times as fast as into bool.
    torch.le(streams[0].quarters(segment), int(a) - 1 - 32768, out=out)
    if b != 1.0:
        out.mul_(b)


DISTRIBUTIONS: dict[str, Distribution] = {
    "bits": Distribution(torch.int32, _bits),
    "uniform": Distribution(torch.float32, _uniform),
    "uniform64": Distribution(torch.float64, _uniform64),
    "bernoulli": Distribution(torch.bool, _bernoulli),
    "normal": Distribution(torch.float32, _normal),
    "truncated_normal": Distribution(torch.float32, _truncated_normal),
    "randint": Distribution(torch.int64, _randint, streams=2),
    "dropout": Distribution(torch.float32, _dropout, per_hash=4),
}
