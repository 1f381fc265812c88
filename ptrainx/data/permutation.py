"""The order in which an epoch's samples come: a pure function of (length, seed, epoch), looked up piece by piece.

In: positions in an epoch. Out: the samples that stand there. Nothing of the size of the data set is ever made, so the
first batch, or the one after a resume, costs the same for a thousand samples as for a trillion.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ptrainx.core.errors import InputError

__all__ = ["Permutation", "SampleOrder", "splitmix64"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Enough that for 2 to 6 samples all n! orders are equally likely as far as 400,000 seeds can tell; 16 are too few.
_ROUNDS = 24
# Numpy's cost a call, spread over many samples: looking up 16 or 4096 takes nearly the same time.
_BLOCK = 4096


def _mix(z: Any) -> Any:
    """The output function of SplitMix64 on uint64 arrays; a bijection of 64-bit words."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def splitmix64(state: int, count: int) -> np.ndarray:
    """The first `count` outputs of the generator SplitMix64 from `state`, uint64 [count].

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    >>> int(splitmix64(1234567, 1)[0])
    6457827717110365317
    """
    states = [(state + (i + 1) * _GOLDEN) & _MASK for i in range(count)]
    return _mix(np.array(states, dtype=np.uint64))


class Permutation:
    """A pseudorandom permutation of 0 ... n-1, computed only where it is asked for.

    The domain is a grid of a x b >= n cells, nearly square. Rounds of an alternating Feistel network add to one
    coordinate a keyed hash of the other, which can be undone, so the network permutes the grid; a result outside
    0 ... n-1 is put through again until it falls inside (cycle walking), which permutes 0 ... n-1. Since
    a x b < n + a, few have to walk. The hash is SplitMix64's output function, the round keys its stream.

    Args:
        n: the number of samples, 1 to 2**62.
        seed: at least 0; taken modulo 2**64.
        epoch: at least 0; each epoch has a permutation of its own.

    Raises:
        InputError: a number out of range.

    >>> order = Permutation(10, seed=0, epoch=0)
    >>> sorted(order(np.arange(10)).tolist()) == list(range(10))
    True

    Source: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (generalized Feistel, cycle walking).
    """

    def __init__(self, n: int, seed: int, epoch: int = 0):
        if not 1 <= n <= 1 << 62 or seed < 0 or epoch < 0:
            raise InputError(
                "no permutation for these numbers",
                got=f"n={n}, seed={seed}, epoch={epoch}",
                expected="1 <= n <= 2**62, seed >= 0, epoch >= 0",
            )
        self.n, self.seed, self.epoch = n, seed, epoch
        rows = math.isqrt(n - 1) + 1
        self._grid = rows, -(-n // rows)
        stream = int(splitmix64(seed & _MASK, 1)[0]) + epoch
        self._keys = splitmix64(stream & _MASK, _ROUNDS)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The samples at these positions: integers in [0, n) in, int64 of the same shape out."""
        flat = np.asarray(positions).astype(np.uint64).reshape(-1)
        samples = self._network(flat)
        outside = np.flatnonzero(samples >= self.n)
        while outside.size:
            again = self._network(samples[outside])
            samples[outside] = again
            outside = outside[again >= self.n]
        return samples.astype(np.int64).reshape(np.shape(positions))

    def _network(self, cells: np.ndarray) -> np.ndarray:
        columns = np.uint64(self._grid[1])
        halves, sizes = [cells // columns, cells % columns], [np.uint64(size) for size in self._grid]
        for i, key in enumerate(self._keys):
            one, other = i % 2, 1 - i % 2
            size, half = sizes[one], halves[one]
            # The hash's upper 32 bits scaled to [0, size): sizes stay below 2**32, and no division is needed.
            half = half + (((_mix(halves[other] + key) >> np.uint64(32)) * size) >> np.uint64(32))
            halves[one] = np.where(half >= size, half - size, half)
        return halves[0] * columns + halves[1]


class SampleOrder:
    """Which samples stand at consecutive positions of an epoch.

    Args:
        n: the number of samples.
        seed: as for `Permutation`.
        shuffle: False gives 0, 1, 2, ... in every epoch.
    """

    def __init__(self, n: int, seed: int, shuffle: bool):
        self._n, self._seed, self._shuffle = n, seed, shuffle
        self._permutation: Permutation | None = None
        self._start, self._block = 0, np.empty(0, np.int64)

    def take(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions `start` to `stop` of an epoch, int64 [stop - start]."""
        if not self._shuffle:
            return np.arange(start, stop)
        if self._permutation is None or self._permutation.epoch != epoch:
            self._permutation = Permutation(self._n, self._seed, epoch)
            self._block = self._block[:0]
        if not self._start <= start <= stop <= self._start + len(self._block):
            ahead = min(max(stop, start + _BLOCK), self._n)
            self._start, self._block = start, self._permutation(np.arange(start, ahead))
        return self._block[start - self._start : stop - self._start]
