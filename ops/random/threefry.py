"""Threefry-2x32-20, the counter-based generator of JAX: a key and a 64-bit counter in, 64 random bits out.

The hash is written three times: over Python integers for a handful of subkeys, over numpy arrays for small blocks on
the CPU, and over tensors for all else. A tensor holds the 32-bit words as int32, whose additions wrap and whose right
shift has to be masked. Only add, xor, and, and shifts occur, so that every device and compiler gives the same bits.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["MASK32", "Schedule", "hash_", "hash_ints", "hash_small_", "schedule", "signed", "unsigned"]

MASK32 = 0xFFFFFFFF
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
_SHIFTS = tuple(tuple((np.uint32(r), np.uint32(32 - r)) for r in group) for group in ROTATIONS)
Schedule = tuple[tuple[Tensor, Tensor], ...]


def signed(word: int) -> int:
    """The int32 with the low 32 bits of `word`.

    >>> signed(0xFFFFFFFF)
    -1
    """
    word &= MASK32
    return word - (1 << 32) if word >> 31 else word


def unsigned(word: int) -> int:
    """The low 32 bits of `word` as a number from 0 to 2**32 - 1."""
    return word & MASK32


def hash_ints(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """The hash of one counter; words are unsigned.

    >>> [hex(word) for word in hash_ints((0, 0), (0, 0))]
    ['0x6b200159', '0x99ba4efe']
    """
    ks = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    x0, x1 = (counter[0] + ks[0]) & MASK32, (counter[1] + ks[1]) & MASK32
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0 = (x0 + x1) & MASK32
            x1 = ((x1 << r | x1 >> (32 - r)) & MASK32) ^ x0
        x0 = (x0 + ks[(i + 1) % 3]) & MASK32
        x1 = (x1 + ks[(i + 2) % 3] + i + 1) & MASK32
    return x0, x1


def schedule(key: Tensor) -> Schedule:
    """The words that `hash_` adds, a pair for each of its six injections.

    Args:
        key: int32[2].
    """
    ks = (key[0], key[1], key[0] ^ key[1] ^ signed(PARITY))
    return ((ks[0], ks[1]), *((ks[(i + 1) % 3], ks[(i + 2) % 3] + (i + 1)) for i in range(5)))


def hash_(injections: Schedule, x0: Tensor, x1: Tensor, scratch: Tensor) -> None:
    """Replaces the counters (x0, x1), high and low words, by their hashes.

    Args:
        injections: `schedule(key)`.
        x0, x1: int32, any shape.
        scratch: int32, of the same shape; overwritten.
    """
    x0.add_(injections[0][0])
    x1.add_(injections[0][1])
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0.add_(x1)
            # A rotation: the bits that leave on the left come back on the right; `alpha` shifts and merges at once.
            torch.bitwise_right_shift(x1, 32 - r, out=scratch)
            scratch.bitwise_and_((1 << r) - 1).add_(x1, alpha=1 << r)
            torch.bitwise_xor(scratch, x0, out=x1)
        x0.add_(injections[i + 1][0])
        x1.add_(injections[i + 1][1])


def hash_small_(key: Tensor, x0: Tensor, x1: Tensor, scratch: Tensor) -> None:
    """As `hash_`, for up to some ten thousand counters on the CPU, where numpy's calls cost a quarter of torch's.

    Args:
        key: int32[2].
        x0, x1, scratch: int32[n].
    """
    k0, k1 = map(unsigned, key.tolist())
    ks = (k0, k1, k0 ^ k1 ^ PARITY)
    a, b, t = (words.numpy().view(np.uint32) for words in (x0, x1, scratch))
    np.add(a, np.uint32(k0), out=a)
    np.add(b, np.uint32(k1), out=b)
    for i in range(5):
        for left, right in _SHIFTS[i % 2]:
            np.add(a, b, out=a)
            np.right_shift(b, right, out=t)
            np.left_shift(b, left, out=b)
            np.bitwise_or(b, t, out=b)
            np.bitwise_xor(b, a, out=b)
        np.add(a, np.uint32(ks[(i + 1) % 3]), out=a)
        np.add(b, np.uint32(unsigned(ks[(i + 2) % 3] + i + 1)), out=b)
