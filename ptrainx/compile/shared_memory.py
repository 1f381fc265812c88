"""Collectives of CPU ranks on one host, through memory that they share instead of through sockets.

It stands in for a gloo process group where all of its ranks run on one x86-64 Linux host. A collective is a sequence of
chunks. Each rank has a ring of slots that it alone writes and all others read: starting a collective copies the first
chunks into free slots and returns; waiting for it copies the rest, and takes every chunk as soon as all ranks have
published theirs. So data that one rank has put there early is found by the others when they come, with no thread in
between. Sums are taken in rank order, alike on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ptrainx.compile.shared_segment import Segment, Views, can_share, chunks_of, chunks_of_pieces, open_segment
from ptrainx.core import torch_compat as tc

__all__ = ["SharedMemoryGroup", "can_share", "permute_by_blocks"]

_OPS: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.PRODUCT, torch.mul),
)


class SharedMemoryGroup:
    """A process group of CPU ranks, as `Channel` uses one; through shared memory if all of its ranks can.

    The memory is opened at the first collective, which all ranks come to in one order.

    Args:
        group: the gloo group that it stands for; used where memory can't be shared.
        ranks: global ranks of its members.
        epoch: of the world.
    """

    def __init__(self, group: Any, ranks: Sequence[int], epoch: int):
        self.group, self.ranks, self.epoch = group, tuple(ranks), epoch
        self.me, self.n = self.ranks.index(dist.get_rank()), len(ranks)
        self._segment: Segment | None = None
        self._opened = False

    @property
    def messages(self) -> Any:
        """What carries messages between two members."""
        return self.group

    def size(self) -> int:
        """How many members."""
        return self.n

    def rank(self) -> int:
        """This process's place among them."""
        return self.me

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Reduces a contiguous tensor in place."""
        (x,) = tensors
        segment = self._shared(x)
        if segment is None:
            return self.group.allreduce(tensors, options)
        combine, flat = _combine(options), x.view(-1)

        def take(start: int, views: Views) -> None:
            parts, count = views.wholes, views.count
            out = flat if count == flat.numel() else flat[start : start + count]
            if len(parts) == 2:
                combine(parts[0], parts[1], out=out)
                return
            total = parts[0].clone()
            for part in parts[1:]:
                combine(total, part, out=total)
            out.copy_(total)

        return segment.start("all_reduce", chunks_of(flat), take)

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, *options: Any) -> Any:
        segment = self._shared(x)
        if segment is None:
            return self.group._allgather_base(out, x, *options)
        wholes = out.view(self.n, -1)

        def take(start: int, views: Views) -> None:
            parts = views.wholes
            for whole, part in zip(wholes, parts):
                whole[start : start + part.numel()].copy_(part)

        return segment.start("all_gather", chunks_of(x.view(-1)), take)

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Any:
        average = options.reduceOp == dist.ReduceOp.AVG
        combine = _combine(options)
        segment = self._shared(x)
        if segment is None:
            return _Scatter(self.group, out, x, combine, average)
        flat = out.view(-1)

        def take(start: int, views: Views) -> None:
            parts = views.wholes
            low, high, first = _overlap(start, parts[0].numel(), self.me * flat.numel(), flat.numel())
            if low >= high:
                return
            mine = flat[first : first + high - low]
            combine(parts[0][low:high], parts[1][low:high], out=mine)
            for part in parts[2:]:
                combine(mine, part[low:high], out=mine)
            if average:
                mine.div_(self.n)

        return segment.start("reduce_scatter", chunks_of(x.view(-1)), take)

    def all_gather_pieces(self, out: torch.Tensor, pieces: list[torch.Tensor]) -> Any:
        """Each piece's parts of all ranks, together; None if the pieces can't go through shared memory."""
        segment = self._shared(out)
        chunks = None if segment is None else chunks_of_pieces(pieces)
        if segment is None or chunks is None:
            return None

        def take(start: int, views: Views) -> None:
            first = self.n * start
            torch.cat(views.by_piece, out=out[first : first + self.n * views.count])

        return segment.start("all_gather", chunks, take)

    def reduce_scatter_pieces(self, out: torch.Tensor, pieces: list[torch.Tensor]) -> Any:
        """This rank's part of the sum of each piece, together; None if the pieces can't go through shared memory."""
        segment = self._shared(out)
        chunks = None if segment is None else chunks_of_pieces(pieces)
        if segment is None or chunks is None:
            return None

        def take(start: int, views: Views) -> None:
            mine = out[start // self.n : (start + views.count) // self.n]
            first, *rest = views.own
            torch.cat(first, out=mine)
            sums = mine.split([part.numel() for part in first])
            for parts in rest:
                tc.add_each_(sums, parts)

        return segment.start("reduce_scatter", chunks, take)

    def alltoall_base(self, out: torch.Tensor, x: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> Any:
        segment = None if len({*out_sizes, *in_sizes}) > 1 or out.shape != x.shape else self._shared(x)
        if segment is None:
            return self.group.alltoall_base(out, x, out_sizes, in_sizes)
        blocks = out.view(self.n, -1)
        block = blocks.shape[1]

        def take(start: int, views: Views) -> None:
            parts = views.wholes
            low, high, first = _overlap(start, parts[0].numel(), self.me * block, block)
            if low < high:
                for whole, part in zip(blocks, parts):
                    whole[first : first + high - low].copy_(part[low:high])

        return segment.start("all_to_all", chunks_of(x.view(-1)), take)

    def permute(self, out: torch.Tensor, x: torch.Tensor, sources: list[int]) -> Any:
        """Copies into `out`, which holds zeros, what member `sources[j]` gives, if that is one."""
        segment, source = self._shared(x), sources[self.me]
        if segment is None:
            return permute_by_blocks(self.group, out, x, sources, self.me)
        flat = out.view(-1)

        def take(start: int, views: Views) -> None:
            if source >= 0:
                part = views.wholes[source]
                flat[start : start + part.numel()].copy_(part)

        return segment.start("permute", chunks_of(x.view(-1)), take)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Copies the root's tensor into everybody's."""
        (x,) = tensors
        segment = self._shared(x)
        if segment is None:
            return self.group.broadcast(tensors, options)
        flat, root = x.view(-1), options.rootRank

        def take(start: int, views: Views) -> None:
            parts = views.wholes
            flat[start : start + parts[root].numel()].copy_(parts[root])

        return segment.start("broadcast", chunks_of(flat), take)

    def _shared(self, x: torch.Tensor) -> Segment | None:
        """The segment, if a tensor like this one goes through it: all ranks say the same."""
        if not self._opened:
            self._opened = True
            self._segment = open_segment(self.ranks, self.me, self.epoch)
        if x.device.type != "cpu" or x.dtype.is_complex or not x.numel():
            return None
        return self._segment


def _combine(options: Any) -> Callable[..., Any]:
    """The operator of a reduction; torch's own objects for it can't be looked up by hash."""
    return next(operator for op, operator in _OPS if options.reduceOp == op)


def permute_by_blocks(group: Any, out: torch.Tensor, x: torch.Tensor, sources: list[int], me: int) -> Any:
    """Member j's `out` gets the x of member `sources[j]`, if that is one: an all-to-all in which most send nothing."""
    flat = x.view(-1)
    gives = [flat.numel() if source == me else 0 for source in sources]
    takes = [flat.numel() if member == sources[me] else 0 for member in range(len(sources))]
    return group.alltoall_base(out.view(-1)[: sum(takes)], flat[: sum(gives)], takes, gives)


def _overlap(start: int, count: int, own: int, size: int) -> tuple[int, int, int]:
    """(low, high) of a chunk's elements that belong to [own, own + size), and where in that they begin."""
    low, high = max(start, own) - start, min(start + count, own + size) - start
    return low, high, start + low - own


class _Scatter:
    """A reduce-scatter through gloo: an all-to-all and a local sum in rank order, since gloo's own is much slower."""

    def __init__(self, group: Any, out: torch.Tensor, x: torch.Tensor, combine: Callable[..., Any], average: bool):
        self.out, self.combine, self.average = out, combine, average
        self.parts = torch.empty_like(x)
        self.work = group.alltoall_base(self.parts, x, [], [])

    def wait(self) -> None:
        """Returns when the result is there."""
        self.work.wait()
        first, *rest = self.parts.view(-1, *self.out.shape)
        self.out.copy_(first)
        for part in rest:
            self.combine(self.out, part, out=self.out)
        if self.average:
            self.out.div_(len(rest) + 1)
