"""The operators that everything random is made of, in torch's namespace `ptrainx`.

They are functions of key and global index alone and keep no state, so they may be moved, narrowed, repeated and run on
any rank. The numbers are computed in cache-sized segments, in place; an operator's own output is the only large tensor.

    random(key, shape, start, size, dist, a, b)   the block [start, start + size) of the array of `shape`
        dist       a, b                     dtype    values
        bits       -                        int32    32 random bits
        uniform    low, high                float32  [low, high)
        uniform64  low, high                float64  [low, high)
        bernoulli  p, -                     bool     true with probability p
        normal     -                        float32  mean 0, variance 1
        truncated_normal  lower, upper      float32  normal, given that it lies between the bounds
        randint    span, -                  int64    [0, span), span at most 2**40
        dropout    kept, value              float32  `value` with probability kept / 65536, else 0
    hash(key, data)     int32[2], any integers -> int32[*data.shape, 2]: the key folded with each number
    subkeys(key, first, count)    the same for data = first, ..., first + count - 1, without a tensor of them
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ptrainx.ops.random.blocks import layout, segments
from ptrainx.ops.random.distributions import DISTRIBUTIONS
from ptrainx.ops.random.stream import Stream
from ptrainx.ops.random.threefry import hash_, hash_ints, schedule, signed, unsigned

__all__ = ["HASH", "RANDOM", "SUBKEYS"]

# Hashes in one segment: three buffers of a megabyte on a CPU, where a call must not cost more than its arithmetic.
_CPU_SEGMENT = 1 << 18
_DEVICE_SEGMENT = 1 << 22
# Up to here a Python loop is faster than a hundred operators on a small tensor.
_FEW = 16


def _random(
    key: Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int], dist: str, a: float, b: float
) -> Tensor:
    how = DISTRIBUTIONS[dist]
    out = key.new_empty(math.prod(size), dtype=how.dtype)
    if out.numel():
        keys = (key,) if how.streams == 1 else _subkeys(key, 0, how.streams).unbind()
        capacity = min(out.numel() + 4, _CPU_SEGMENT if key.device.type == "cpu" else _DEVICE_SEGMENT)
        streams = tuple(Stream(k, capacity) for k in keys)
        runs = layout(shape, start, size)
        for segment in segments(runs, how.limit(runs.length, capacity), key.device):
            how.fill(streams, segment, out[segment.position : segment.position + segment.size], a, b)
    return out.view(list(size))


def _random_meta(
    key: Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int], dist: str, a: float, b: float
) -> Tensor:
    return key.new_empty(list(size), dtype=DISTRIBUTIONS[dist].dtype)


def _hash(key: Tensor, data: Tensor) -> Tensor:
    if key.device.type == "cpu" and data.numel() <= _FEW:
        return _hash_few(key, data.flatten().tolist()).view(*data.shape, 2)
    data = data.to(torch.int64)
    words = torch.stack([data >> 32, data], -1).to(torch.int32)
    x0, x1 = words.unbind(-1)
    hash_(schedule(key), x0, x1, torch.empty_like(x0))
    return words


def _hash_few(key: Tensor, data: Sequence[int]) -> Tensor:
    k0, k1 = map(unsigned, key.tolist())
    words = [hash_ints((k0, k1), (unsigned(n >> 32), unsigned(n))) for n in data]
    return torch.tensor([[signed(w) for w in pair] for pair in words], dtype=torch.int32).reshape(len(words), 2)


def _hash_meta(key: Tensor, data: Tensor) -> Tensor:
    return key.new_empty([*data.shape, 2])


def _subkeys(key: Tensor, first: int, count: int) -> Tensor:
    if key.device.type == "cpu" and count <= _FEW:
        return _hash_few(key, range(first, first + count))
    return _hash(key, torch.arange(first, first + count, dtype=torch.int64, device=key.device))


def _subkeys_meta(key: Tensor, first: int, count: int) -> Tensor:
    return key.new_empty([count, 2])


# A fragment, so that other rooms may add operators to the namespace. Kept, since its end would take the operators away.
_LIBRARY = torch.library.Library("ptrainx", "FRAGMENT")
for _schema, _kernel, _meta in (
    (
        "random(Tensor key, SymInt[] shape, SymInt[] start, SymInt[] size, str dist, float a, float b) -> Tensor",
        _random,
        _random_meta,
    ),
    ("hash(Tensor key, Tensor data) -> Tensor", _hash, _hash_meta),
    ("subkeys(Tensor key, int first, SymInt count) -> Tensor", _subkeys, _subkeys_meta),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _meta, "Meta")

RANDOM = torch.ops.ptrainx.random.default
HASH = torch.ops.ptrainx.hash.default
SUBKEYS = torch.ops.ptrainx.subkeys.default
