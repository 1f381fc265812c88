"""What a rank does with a block of keys and values of another rank, by the order of the sequence.

In: this rank's queries, in the chunks of the order, and a block. Out: attention to it, added to what was there, or the
block's part of the gradients. `before` is a 0-d boolean: whether the block's rank comes before this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from ptrainx.ops.attention.blocks import attend, attend_backward, merge

__all__ = ["Contiguous", "Order", "Zigzag"]

T = torch.Tensor
Chunks = Sequence[T]
INF = float("inf")


class Order(Protocol):
    """How a rank's part of the sequence is divided, and what of a block its queries see."""

    def split(self, x: T, dim: int = 2) -> tuple[T, ...]:
        """The chunks of this rank's part."""

    def pack(self, a: T, b: T) -> T:
        """Two parts, such as keys and values, as the one tensor that travels."""

    def unpack(self, block: T) -> tuple[T, T]:
        """The two parts of a packed one."""

    def add(self, before: T, q: Chunks, block: T, out: Chunks, lse: Chunks) -> list[T]:
        """(chunks of out, chunks of lse) with the attention to a block of packed (k, v) added."""

    def slopes(self, before: T, rows: Sequence[Chunks], block: T) -> list[T]:
        """(chunks of q's gradient, packed gradients of v and k) that a block of packed (v, k) has a part in.

        `rows` are the chunks of the result's gradient, q, the result, and lse.
        """


@dataclasses.dataclass(frozen=True)
class Contiguous:
    """One chunk, which sees all of a block or, causal and from a rank behind, nothing of it."""

    causal: bool
    scale: float

    def split(self, x: T, dim: int = 2) -> tuple[T, ...]:
        return (x,)

    def pack(self, a: T, b: T) -> T:
        return torch.stack([a, b])

    def unpack(self, block: T) -> tuple[T, T]:
        return block[0], block[1]

    def add(self, before: T, q: Chunks, block: T, out: Chunks, lse: Chunks) -> list[T]:
        k, v = self.unpack(block)
        found, found_lse = attend(q[0], k, v, False, self.scale)
        if self.causal:
            found_lse = torch.where(before, found_lse, -INF)
        return [*merge(out[0], lse[0], found, found_lse)]

    def slopes(self, before: T, rows: Sequence[Chunks], block: T) -> list[T]:
        (grad,), (q,), (out,), (lse,) = rows
        v, k = self.unpack(block)
        if self.causal:
            lse = torch.where(before, lse, INF)
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse, False, self.scale)
        return [dq, self.pack(dv, dk)]


@dataclasses.dataclass(frozen=True)
class Zigzag:
    """Two chunks, of which always the same half is seen, causally.

        block from a rank before    both chunks of queries see its first chunk, neither its second
        block from a rank behind    the second chunk of queries sees both of its chunks, the first neither

    So the second chunk of queries always sees the first one of keys. What else is seen is one pair of chunks, (first,
    first) or (second, second).
    """

    scale: float

    def split(self, x: T, dim: int = 2) -> tuple[T, ...]:
        return tuple(x.chunk(2, dim))

    def pack(self, a: T, b: T) -> T:
        (a1, a2), (b1, b2) = self.split(a), self.split(b)
        return torch.stack([a1, b1, a2, b2])

    def unpack(self, block: T) -> tuple[T, T]:
        a1, b1, a2, b2 = block.unbind()
        return torch.cat([a1, a2], 2), torch.cat([b1, b2], 2)

    def add(self, before: T, q: Chunks, block: T, out: Chunks, lse: Chunks) -> list[T]:
        first, second = block.split(2)
        out2, lse2 = merge(out[1], lse[1], *attend(q[1], first[0], first[1], False, self.scale))
        kv = torch.where(before, first, second)
        pair, pair_lse = attend(torch.where(before, q[0], q[1]), kv[0], kv[1], False, self.scale)
        out1, lse1 = merge(out[0], lse[0], pair, torch.where(before, pair_lse, -INF))
        out2, lse2 = merge(out2, lse2, pair, torch.where(before, -INF, pair_lse))
        return [out1, out2, lse1, lse2]

    def slopes(self, before: T, rows: Sequence[Chunks], block: T) -> list[T]:
        first, second = block.split(2)
        dq2, dk1, dv1 = self._slopes([chunks[1] for chunks in rows], first)
        chosen = [torch.where(before, chunks[0], chunks[1]) for chunks in rows]
        dq, dk, dv = self._slopes(chosen, torch.where(before, first, second))
        none = torch.zeros((), dtype=dq.dtype, device=dq.device)
        pair = torch.stack([dv, dk])
        packed = torch.cat([torch.stack([dv1, dk1]) + torch.where(before, pair, none), torch.where(before, none, pair)])
        return [torch.where(before, dq, none), dq2 + torch.where(before, none, dq), packed]

    def _slopes(self, rows: Sequence[T], vk: T) -> tuple[T, T, T]:
        grad, q, out, lse = rows
        return attend_backward(grad, q, vk[1], vk[0], out, lse, False, self.scale)
