"""The memory that CPU ranks of one host share: rings of slots, and the collectives that are under way in them.

Each rank has a ring of slots that it alone writes and all others read, and counters: how many chunks it has published,
how many it has taken, and what kind of collective the chunk in each slot belongs to. x86-64 keeps stores in order, so
that whoever sees a counter sees the data before it; on other processors gloo stays in use. All that is waited for has a
deadline, and a rank whose process has ended is noticed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import mmap
import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence

import torch

from ptrainx.core import flags
from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import AgreementError, WorkerError

__all__ = ["CHUNK", "SLOTS", "Segment", "Views", "can_share", "chunks_of", "chunks_of_pieces", "open_segment"]

CHUNK = 1 << 20  # bytes of a slot
SLOTS = 4  # of a rank
_FOLDER = "/dev/shm"
_LINE = 16  # int64s of a counter's cache lines
_PUBLISHED, _TAKEN, _PID, _KINDS = range(4)  # lines of a rank's header
_HEADER = 4 * _LINE * 8  # bytes of a rank's header
_ALIVE_EVERY_S = 0.2
_VIEWS_KEPT = 1024  # of how many chunks, by their sizes, views are kept

_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute")
_CODES = {name: code for code, name in enumerate(_NAMES)}

Chunks = list[list[torch.Tensor]]
"""What a rank gives to a collective: for each slot that it takes, the flat tensors that go into it."""

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


def chunks_of(flat: torch.Tensor) -> Chunks:
    """A one-dimensional contiguous tensor in chunks that fit into a slot."""
    most = CHUNK // flat.element_size()
    return [[flat]] if flat.numel() <= most else [[part] for part in flat.split(most)]


def chunks_of_pieces(pieces: Sequence[torch.Tensor]) -> Chunks | None:
    """Flat tensors in chunks of whole ones; None if one is too large for a slot."""
    chunks: Chunks = [[]]
    room = CHUNK
    for piece in pieces:
        size = piece.numel() * piece.element_size()
        if size > CHUNK:
            return None
        if size > room:
            chunks.append([])
            room = CHUNK
        chunks[-1].append(piece)
        room -= size
    return chunks


class Views:
    """What all ranks of a group have put into one slot, each with equal sizes.

    Args:
        slots: each rank's memory for it, bytes.
        me: this rank's place among them.
        sizes: elements of the tensors that lie there one behind another.
        dtype: of the elements.
    """

    def __init__(self, slots: Sequence[torch.Tensor], me: int, sizes: tuple[int, ...], dtype: torch.dtype):
        self.me, self.sizes, self.count = me, sizes, sum(sizes)
        self.wholes = [slot[: self.count * dtype.itemsize].view(dtype) for slot in slots]

    @functools.cached_property
    def by_piece(self) -> list[torch.Tensor]:
        """All ranks' first tensors, then all ranks' second ones, and so on."""
        return [part for parts in zip(*(whole.split(self.sizes) for whole in self.wholes)) for part in parts]

    @functools.cached_property
    def own(self) -> list[list[torch.Tensor]]:
        """Of each rank, this rank's part of every tensor."""
        n = len(self.wholes)
        return [[piece.view(n, -1)[self.me] for piece in whole.split(self.sizes)] for whole in self.wholes]


class _Work:
    """A collective under way."""

    __slots__ = ("chunks", "done", "first", "kind", "published", "segment", "start", "take", "taken", "total")

    def __init__(self, segment: Segment, name: str, first: int, chunks: Chunks, take: Callable[[int, Views], None]):
        self.segment, self.first, self.chunks, self.take = segment, first, chunks, take
        # What is alike on every rank: which collective, and of how many bytes.
        self.kind = _CODES[name] << 56 | sum(part.numel() * part.element_size() for chunk in chunks for part in chunk)
        self.total = len(chunks)
        self.published = self.taken = self.start = 0
        self.done = False

    def wait(self) -> None:
        """Returns when the result is there."""
        if not self.done:
            self.segment.finish(self)


class Segment:
    """One rank's view of the memory, and the collectives that it has under way, in order."""

    def __init__(self, memory: mmap.mmap, me: int, ranks: Sequence[int]):
        self.me, self.n, self.ranks = me, len(ranks), ranks
        self.counters = memoryview(memory).cast("q")
        data = torch.frombuffer(memory, dtype=torch.uint8)[self.n * _HEADER :]
        self.slots = list(data.view(self.n, SLOTS, CHUNK).unbind(0))
        self.published_at = [(r * 4 + _PUBLISHED) * _LINE for r in range(self.n)]
        self.taken_at = [(r * 4 + _TAKEN) * _LINE for r in range(self.n)]
        self.kinds_at = [(r * 4 + _KINDS) * _LINE for r in range(self.n)]
        self.counters[(me * 4 + _PID) * _LINE] = os.getpid()
        self.next = 0
        self.queue: collections.deque[_Work] = collections.deque()
        # What was last read of the others' counters, which only grow: chunks before these numbers have free slots, and
        # are there from everybody.
        self.free_until, self.there_until = SLOTS, 0
        self.unpublished = 0  # chunks of what is under way
        self.views: dict[tuple, list[Views]] = {}  # by sizes and dtype: steps ask for the same ones over and over

    def start(self, name: str, chunks: Chunks, take: Callable[[int, Views], None]) -> _Work:
        """Starts a collective.

        Args:
            name: which.
            chunks: what this rank gives.
            take: called for each chunk with its first element's position in all that a rank gives, and with what the
                ranks have put into the slot.
        """
        work = _Work(self, name, self.next, chunks, take)
        self.next += work.total
        self.unpublished += work.total
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
        if not self.unpublished:
            return False
        moved = False
        counters = self.counters
        for work in self.queue:
            while work.published < work.total:
                number = work.first + work.published
                if number >= self.free_until:
                    self.free_until = min([counters[at] for at in self.taken_at]) + SLOTS
                    if number >= self.free_until:
                        return moved
                chunk = work.chunks[work.published]
                slot = self._views(number, chunk).wholes[self.me]
                if len(chunk) == 1:
                    slot.copy_(chunk[0])
                else:
                    torch.cat(chunk, out=slot)
                work.published += 1
                self.unpublished -= 1
                counters[self.kinds_at[self.me] + number % SLOTS] = work.kind
                counters[self.published_at[self.me]] = number + 1
                moved = True
        return moved

    def _take(self) -> bool:
        if not self.queue:
            return False
        work = self.queue[0]
        number, counters = work.first + work.taken, self.counters
        if number >= self.there_until:
            self.there_until = min([counters[at] for at in self.published_at])
            if number >= self.there_until:
                return False
        for at in self.kinds_at:
            if counters[at + number % SLOTS] != work.kind:
                self._refuse_mixture(work, number)
        views = self._views(number, work.chunks[work.taken])
        work.take(work.start, views)
        work.start += views.count
        work.taken += 1
        self.counters[self.taken_at[self.me]] = number + 1
        if work.taken == work.total:
            work.done = True
            self.queue.popleft()
        return True

    def _views(self, number: int, chunk: list[torch.Tensor]) -> Views:
        """The parts of all ranks' slots that hold a chunk's elements."""
        key = (*[part.numel() for part in chunk], chunk[0].dtype)
        views = self.views.get(key)
        if views is None:
            if len(self.views) >= _VIEWS_KEPT:
                self.views.clear()
            sizes, dtype = tuple(part.numel() for part in chunk), chunk[0].dtype
            views = [Views([ring[slot] for ring in self.slots], self.me, sizes, dtype) for slot in range(SLOTS)]
            self.views[key] = views
        return views[number % SLOTS]

    def _refuse_mixture(self, work: _Work, number: int) -> None:
        said = []
        for rank, at in zip(self.ranks, self.kinds_at):
            kind = self.counters[at + number % SLOTS]
            said.append(f"rank {rank}: {_NAMES[kind >> 56]} of {kind & (1 << 56) - 1} bytes")
        raise AgreementError(
            "the ranks are in different collectives",
            got="; ".join(said),
            fix="a rank that failed inside a step has left the others in it: start all of them again",
        )

    def _check_alive(self, waited: float) -> None:
        for place, rank in enumerate(self.ranks):
            pid = self.counters[(place * 4 + _PID) * _LINE]
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


def open_segment(ranks: tuple[int, ...], me: int, epoch: int) -> Segment | None:
    """The segment of these ranks; None on all of them if one of them can't have it."""
    _counts[epoch, ranks] += 1
    room = f"ptrainx/shared/{'-'.join(map(str, ranks))}/{_counts[epoch, ranks]}"
    store = tc.default_store()
    places = range(len(ranks))

    def exchange(kind: str, value: str) -> list[str]:
        store.set(f"{room}/{kind}/{me}", value)
        deadline = time.monotonic() + flags.agreement_timeout()
        missing = [place for place in places if not store.check([f"{room}/{kind}/{place}"])]
        while missing:
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"rank {', '.join(str(ranks[place]) for place in missing)} never came to a collective",
                    got=f"waited {flags.agreement_timeout():g} s",
                    fix="look for a rank that stopped or failed; PTRAINX_AGREEMENT_TIMEOUT sets the seconds",
                )
            time.sleep(1e-3)
            missing = [place for place in missing if not store.check([f"{room}/{kind}/{place}"])]
        return [store.get(f"{room}/{kind}/{place}").decode() for place in places]

    hosts = exchange("host", _host() if can_share() else "")
    if not hosts[0] or len(set(hosts)) > 1:
        return None
    path = os.path.join(_FOLDER, f"ptrainx-{uuid.uuid4().hex}") if me == 0 else ""
    size = len(ranks) * (_HEADER + SLOTS * CHUNK)
    memory = _map(path, size, create=True) if me == 0 else None
    path = exchange("path", path if memory is not None else "")[0]
    if me != 0 and path:
        memory = _map(path, size, create=False)
    segment = None if memory is None else Segment(memory, me, ranks)
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
