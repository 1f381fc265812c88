"""The random words of a key, by global index: the only place where indices become counters.

Element i of a global array takes the hash of counter i. For dropout, one hash serves four elements: element i takes
sixteen of the 64 bits of counter i // 4, the quarter i % 4, counted from the low half of the first word.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ptrainx.ops.random.blocks import Segment
from ptrainx.ops.random.threefry import Schedule, hash_, hash_small_, schedule, signed

__all__ = ["Stream"]

# Up to here numpy is faster than torch.
_SMALL = 1 << 14


class Stream:
    """The words of one key, computed into buffers that the next call overwrites.

    Args:
        key: int32[2].
        capacity: the most hashes in one call.
    """

    def __init__(self, key: Tensor, capacity: int):
        self._key = key
        self._schedule: Schedule | None = None
        self._buffers = torch.empty(3, capacity, dtype=torch.int32, device=key.device)
        self._iota = torch.arange(capacity, dtype=torch.int32, device=key.device)
        self._pairs: Tensor | None = None

    def words(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """Both words of each element's hash, int32[size] each."""
        x0, x1, scratch = self._buffers[:, : segment.size].unbind()
        self._count(segment, x0, x1)
        self._hash(x0, x1, scratch)
        return x0, x1

    def bits(self, segment: Segment) -> Tensor:
        """32 random bits for each element, int32[size]: the two words, xored, as JAX does it."""
        x0, x1 = self.words(segment)
        return x0.bitwise_xor_(x1)

    def spare(self, segment: Segment) -> tuple[Tensor, Tensor, Tensor]:
        """Three float32[size] to work in: the memory of the words, once they have been used."""
        a, b, c = self._buffers[:, : segment.size].view(torch.float32).unbind()
        return a, b, c

    def quarters(self, segment: Segment) -> Tensor:
        """Sixteen random bits for each element, int16[size], one hash for four elements."""
        if segment.step % 4 or sys.byteorder != "little":
            return self._quarters_apart(segment)
        phase = segment.first & 3
        hashes = (phase + segment.length + 3) >> 2
        starts = None if segment.starts is None else segment.starts >> 2
        x0, x1 = self.words(Segment(0, segment.first >> 2, hashes, starts))
        if self._pairs is None:
            self._pairs = x0.new_empty(self._iota.numel(), 2)
        pairs = self._pairs[: x0.numel()]
        pairs[:, 0].copy_(x0)
        pairs[:, 1].copy_(x1)
        halves = pairs.view(torch.int16).view(segment.runs, 4 * hashes)
        return halves[:, phase : phase + segment.length].reshape(-1)

    def _quarters_apart(self, segment: Segment) -> Tensor:
        """The same where runs begin in different quarters: each element hashed for itself."""
        index = self._indices(segment)
        x0, x1, scratch = (torch.empty_like(index, dtype=torch.int32) for _ in range(3))
        _split_words(index >> 2, x0, x1)
        self._hash(x0, x1, scratch)
        word = torch.where((index & 2) == 0, x0, x1)
        return (word >> (16 * (index & 1)).to(torch.int32)).to(torch.int16)

    def _hash(self, x0: Tensor, x1: Tensor, scratch: Tensor) -> None:
        if x0.numel() <= _SMALL and x0.device.type == "cpu":
            hash_small_(self._key, x0, x1, scratch)
            return
        self._schedule = self._schedule or schedule(self._key)
        hash_(self._schedule, x0, x1, scratch)

    def _count(self, segment: Segment, x0: Tensor, x1: Tensor) -> None:
        high = segment.first >> 32
        if segment.starts is None and high == (segment.first + segment.length - 1) >> 32:
            x0.fill_(signed(high))
            torch.add(self._iota[: segment.length], signed(segment.first), out=x1)
        else:
            _split_words(self._indices(segment), x0, x1)

    def _indices(self, segment: Segment) -> Tensor:
        """The global linear index of each element, int64[size]."""
        steps = torch.arange(segment.length, dtype=torch.int64, device=self._iota.device)
        if segment.starts is None:
            return steps + segment.first
        return (segment.starts[:, None] + steps).reshape(-1)


def _split_words(index: Tensor, x0: Tensor, x1: Tensor) -> None:
    x0.copy_(index >> 32)
    x1.copy_(index)
