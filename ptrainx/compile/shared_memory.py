"""Collectives of CPU ranks on one host, through memory that they share instead of through sockets.

It stands in for a gloo process group where all of its ranks run on one x86-64 Linux host. A collective is a sequence of
chunks. Each rank has a ring of slots that it alone writes and all others read: starting a collective copies the first
chunks into free slots and returns; waiting for it copies the rest, and takes every chunk as soon as all ranks have
published theirs. So data that one rank has put there early is found by the others when they come, with no thread in
between. Sums are taken in rank order, alike on every rank.

Two counters a rank order the accesses: how many chunks it has published, and how many it has taken. x86-64 keeps stores
in order, so that whoever sees a counter sees the data before it; on other processors gloo stays in use.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import mmap
import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ptrainx.core import flags
from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import WorkerError

__all__ = ["SharedMemoryGroup", "can_share"]

CHUNK = 1 << 20  # bytes of a slot
SLOTS = 4  # of a rank
_FOLDER = "/dev/shm"
_LINE = 16  # int64s of a counter's cache lines
_PUBLISHED, _TAKEN, _PID = 0, 1, 2
_HEADER = 3 * _LINE * 8  # bytes of a rank
_ALIVE_EVERY_S = 0.2

_OPS: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.PRODUCT, torch.mul),
)

# How often the ranks of a world have opened a segment together: all of them do it in one order.
_counts: collections.Counter[tuple] = collections.Counter()


def can_share() -> bool:
    """Whether this process could share memory with others of its host."""
    return (
        flags.shared_memory()
        and platform.system() == "Linux"
        and platform.machine() in ("x86_64", "AMD64")
        and os.access(_FOLDER, os.W_OK)
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
        self._segment: _Segment | None = None
        self._opened = False

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

        def take(start: int, parts: list[torch.Tensor]) -> None:
            out = flat[start : start + parts[0].numel()]
            if len(parts) == 2:
                combine(parts[0], parts[1], out=out)
                return
            total = parts[0].clone()
            for part in parts[1:]:
                combine(total, part, out=total)
            out.copy_(total)

        return segment.start(flat, take)

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, *options: Any) -> Any:
        segment = self._shared(x)
        if segment is None:
            return self.group._allgather_base(out, x, *options)
        wholes = out.view(self.n, -1)

        def take(start: int, parts: list[torch.Tensor]) -> None:
            for whole, part in zip(wholes, parts):
                whole[start : start + part.numel()].copy_(part)

        return segment.start(x.view(-1), take)

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Any:
        average = options.reduceOp == dist.ReduceOp.AVG
        combine = _combine(options)
        segment = self._shared(x)
        if segment is None:
            return _Scatter(self.group, out, x, combine, average)
        flat = out.view(-1)

        def take(start: int, parts: list[torch.Tensor]) -> None:
            low, high, first = _overlap(start, parts[0].numel(), self.me * flat.numel(), flat.numel())
            if low >= high:
                return
            mine = flat[first : first + high - low]
            combine(parts[0][low:high], parts[1][low:high], out=mine)
            for part in parts[2:]:
                combine(mine, part[low:high], out=mine)
            if average:
                mine.div_(self.n)

        return segment.start(x.view(-1), take)

    def alltoall_base(self, out: torch.Tensor, x: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> Any:
        segment = None if len({*out_sizes, *in_sizes}) > 1 or out.shape != x.shape else self._shared(x)
        if segment is None:
            return self.group.alltoall_base(out, x, out_sizes, in_sizes)
        blocks = out.view(self.n, -1)
        block = blocks.shape[1]

        def take(start: int, parts: list[torch.Tensor]) -> None:
            low, high, first = _overlap(start, parts[0].numel(), self.me * block, block)
            if low < high:
                for whole, part in zip(blocks, parts):
                    whole[first : first + high - low].copy_(part[low:high])

        return segment.start(x.view(-1), take)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        """Copies the root's tensor into everybody's."""
        (x,) = tensors
        segment = self._shared(x)
        if segment is None:
            return self.group.broadcast(tensors, options)
        flat, root = x.view(-1), options.rootRank

        def take(start: int, parts: list[torch.Tensor]) -> None:
            flat[start : start + parts[root].numel()].copy_(parts[root])

        return segment.start(flat, take)

    def _shared(self, x: torch.Tensor) -> _Segment | None:
        """The segment, if a tensor like this one goes through it: all ranks say the same."""
        if not self._opened:
            self._opened = True
            self._segment = _open(self.ranks, self.me, self.epoch)
        if x.device.type != "cpu" or x.dtype.is_complex or not x.numel():
            return None
        return self._segment


def _combine(options: Any) -> Callable[..., Any]:
    """The operator of a reduction; torch's own objects for it can't be looked up by hash."""
    return next(operator for op, operator in _OPS if options.reduceOp == op)


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


class _Work:
    """A collective under way."""

    __slots__ = ("done", "first", "flat", "per_chunk", "published", "segment", "take", "taken", "total")

    def __init__(self, segment: _Segment, first: int, flat: torch.Tensor, take: Callable[..., None]):
        self.segment, self.first, self.flat, self.take = segment, first, flat, take
        self.per_chunk = CHUNK // flat.element_size()
        self.total = -(-flat.numel() // self.per_chunk)
        self.published = self.taken = 0
        self.done = False

    def wait(self) -> None:
        """Returns when the result is there."""
        if not self.done:
            self.segment.finish(self)


class _Segment:
    """One rank's view of the memory, and the collectives that it has under way, in order."""

    def __init__(self, memory: mmap.mmap, me: int, ranks: Sequence[int]):
        self.me, self.n, self.ranks = me, len(ranks), ranks
        self.counters = memoryview(memory).cast("q")
        data = torch.frombuffer(memory, dtype=torch.uint8)[self.n * _HEADER :]
        self.slots = list(data.view(self.n, SLOTS, CHUNK).unbind(0))
        self.published_at = [(r * 3 + _PUBLISHED) * _LINE for r in range(self.n)]
        self.taken_at = [(r * 3 + _TAKEN) * _LINE for r in range(self.n)]
        self.counters[(me * 3 + _PID) * _LINE] = os.getpid()
        self.next = 0
        self.queue: collections.deque[_Work] = collections.deque()

    def start(self, flat: torch.Tensor, take: Callable[[int, list[torch.Tensor]], None]) -> _Work:
        """Starts a collective.

        Args:
            flat: what this rank gives, one-dimensional and contiguous.
            take: called with the position of a chunk in it and every rank's part of that chunk.
        """
        work = _Work(self, self.next, flat, take)
        self.next += work.total
        self.queue.append(work)
        self._publish()
        return work

    def finish(self, work: _Work) -> None:
        """Brings the collectives forward, in order, until this one is done."""
        spins, begin, looked = 0, 0.0, 0.0
        while not work.done:
            if self._publish() | self._take():
                spins = 0
                continue
            spins += 1
            if spins < 100:
                continue
            os.sched_yield()
            if spins < 2000:
                continue
            now = time.monotonic()
            if spins == 2000:
                begin = looked = now
            elif now - looked > _ALIVE_EVERY_S:
                self._check_alive(now - begin)
                looked = now
            time.sleep(min(1e-3, (now - begin) / 50))

    def _publish(self) -> bool:
        moved = False
        counters = self.counters
        for work in self.queue:
            while work.published < work.total:
                number = work.first + work.published
                if number >= SLOTS and min(counters[at] for at in self.taken_at) < number - SLOTS + 1:
                    return moved
                begin = work.published * work.per_chunk
                part = work.flat[begin : begin + work.per_chunk]
                self._part(self.me, number, part).copy_(part)
                work.published += 1
                counters[self.published_at[self.me]] = number + 1
                moved = True
        return moved

    def _take(self) -> bool:
        if not self.queue:
            return False
        work = self.queue[0]
        number = work.first + work.taken
        if min(self.counters[at] for at in self.published_at) <= number:
            return False
        begin = work.taken * work.per_chunk
        like = work.flat[begin : begin + work.per_chunk]
        work.take(begin, [self._part(rank, number, like) for rank in range(self.n)])
        work.taken += 1
        self.counters[self.taken_at[self.me]] = number + 1
        if work.taken == work.total:
            work.done = True
            self.queue.popleft()
        return True

    def _part(self, rank: int, number: int, like: torch.Tensor) -> torch.Tensor:
        """The part of a slot that holds a chunk's elements."""
        size = like.numel() * like.element_size()
        return self.slots[rank][number % SLOTS, :size].view(like.dtype)

    def _check_alive(self, waited: float) -> None:
        for place, rank in enumerate(self.ranks):
            pid = self.counters[(place * 3 + _PID) * _LINE]
            if pid and not _is_alive(pid):
                raise WorkerError(
                    f"rank {rank} has ended while others wait for it in a collective",
                    got=f"its process {pid} is gone",
                    fix=f"look at what rank {rank} reported last",
                )
        if waited > flags.collective_timeout():
            behind = [r for r, at in zip(self.ranks, self.published_at) if self.counters[at] <= self._waiting_for()]
            raise WorkerError(
                f"rank {', '.join(map(str, behind))} did not come to a collective",
                got=f"waited {waited:.0f} s",
                fix="look for a rank that is stuck; PTRAINX_COLLECTIVE_TIMEOUT sets the seconds",
            )

    def _waiting_for(self) -> int:
        return self.queue[0].first + self.queue[0].taken


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _host() -> str:
    """What processes have in common that can share memory and see each other."""
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.stat(_FOLDER).st_dev}"
    return uuid.uuid4().hex


def _open(ranks: tuple[int, ...], me: int, epoch: int) -> _Segment | None:
    """The segment of these ranks; None on all of them if one of them can't have it."""
    _counts[epoch, ranks] += 1
    room = f"ptrainx/shared/{'-'.join(map(str, ranks))}/{_counts[epoch, ranks]}"
    store = tc.default_store()
    places = range(len(ranks))

    def exchange(kind: str, value: str) -> list[str]:
        store.set(f"{room}/{kind}/{me}", value)
        keys = [f"{room}/{kind}/{place}" for place in places]
        store.wait(keys, datetime.timedelta(seconds=flags.collective_timeout()))
        return [store.get(key).decode() for key in keys]

    hosts = exchange("host", _host() if can_share() else "")
    if not hosts[0] or len(set(hosts)) > 1:
        return None
    path = os.path.join(_FOLDER, f"ptrainx-{uuid.uuid4().hex}") if me == 0 else ""
    size = len(ranks) * (_HEADER + SLOTS * CHUNK)
    memory = _map(path, size, create=True) if me == 0 else None
    path = exchange("path", path if memory is not None else "")[0]
    if me != 0 and path:
        memory = _map(path, size, create=False)
    segment = None if memory is None else _Segment(memory, me, ranks)
    all_have = all(exchange("mapped", "yes" if segment is not None else ""))
    if me == 0 and path:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return segment if all_have else None


def _map(path: str, size: int, create: bool) -> mmap.mmap | None:
    try:
        handle = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.posix_fallocate(handle, 0, size)
            return mmap.mmap(handle, size)
        finally:
            os.close(handle)
    except OSError:
        if create:
            with contextlib.suppress(OSError):
                os.unlink(path)
        return None
