"""The collectives of a mesh axis, or of several taken together, as the generated code calls them on a real mesh.

Each starts the collective and returns a `Pending`; `wait()` gives the result. Ranks of one host exchange data through
memory that they share (`shared_memory`), others through their process group. Handles are held here rather than left
to torch's functional collectives: with gloo, several functional gathers in flight crash the process now and then.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ptrainx.compile.shared_memory import SharedMemoryGroup, can_share, permute_by_blocks
from ptrainx.mesh.axes import join_axes, split_axes

__all__ = ["Channel", "Channels", "FlatChannel", "Pending", "open_channels", "tapped"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}


class Pending:
    """A collective under way."""

    __slots__ = ("finish", "held", "result", "work")

    def __init__(self, result: torch.Tensor, work: Any = None, finish: Callable | None = None, held: Any = None):
        self.result, self.work, self.finish, self.held = result, work, finish, held

    def wait(self) -> torch.Tensor:
        """The result, once it is there."""
        if self.work is not None:
            self.work.wait()
        return self.result if self.finish is None else self.finish(self.result)


class Channel:
    """One mesh axis of this process.

    Args:
        group: the process group.
        ranks: its members' global ranks.
    """

    def __init__(self, group: Any, ranks: Sequence[int]):
        self.group, self.ranks, self.size = group, list(ranks), len(ranks)
        self.sent: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()
        self.gloo = not isinstance(group, SharedMemoryGroup) and "gloo" in dist.get_backend(group)

    def all_reduce(self, x: torch.Tensor, op: str, owned: bool = False) -> Pending:
        """Partial -> Replicate. `owned`: x may be overwritten."""
        out = x if owned and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        if self.size == 1:
            return Pending(out)
        work = self.group.allreduce([out], _all_reduce_options(op))
        return Pending(out, work, (lambda t: t / self.size) if op == "avg" else None)

    def all_gather_into_tensor(self, x: torch.Tensor, group_size: int) -> Pending:
        """Shard(0) -> Replicate."""
        x = x.contiguous()
        if self.size == 1:
            return Pending(x.clone())
        out = x.new_empty((x.shape[0] * self.size, *x.shape[1:]))
        return Pending(out, self.group._allgather_base(out, x), held=x)

    def reduce_scatter_tensor(self, x: torch.Tensor, op: str, group_size: int) -> Pending:
        """Partial -> Shard(0). On gloo an all-to-all and a local sum in rank order: its own is several times slower."""
        if self.size == 1:
            return Pending(x.clone(memory_format=torch.contiguous_format))
        x = x.contiguous()
        out_shape = (x.shape[0] // self.size, *x.shape[1:])
        if self.gloo or op not in ("sum", "avg"):
            parts = torch.empty_like(x)
            work = self.group.alltoall_base(parts, x, [], [])
            return Pending(parts, work, lambda t: _reduce_parts(t.view(self.size, *out_shape), op), held=x)
        out = x.new_empty(out_shape)
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
        return Pending(out, self.group._reduce_scatter_base(out, x, options), held=x)

    def all_gather_pieces(self, x: torch.Tensor | list[torch.Tensor], sizes: list[int], group_size: int) -> Pending:
        """Shard(0) -> Replicate of several tensors at once; `x`: each flat, or all of them joined."""
        pieces = list(x.split(sizes)) if isinstance(x, torch.Tensor) else x
        if self.size == 1:
            return Pending(torch.cat(pieces))
        out = pieces[0].new_empty(sum(sizes) * self.size)
        work = self._at_once("all_gather_pieces", out, pieces)
        if work is not None:
            return Pending(out, work, held=pieces)
        flat = torch.cat(pieces)
        work = self.group._allgather_base(out, flat)

        def finish(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([part.reshape(-1) for part in rows.view(self.size, -1).split(sizes, 1)])

        return Pending(out, work, finish, held=flat)

    def reduce_scatter_pieces(
        self, x: torch.Tensor | list[torch.Tensor], op: str, sizes: list[int], group_size: int
    ) -> Pending:
        """Partial -> Shard(0) of several tensors at once; `x`: each flat, or all of them joined."""
        pieces = list(x.split([size * self.size for size in sizes])) if isinstance(x, torch.Tensor) else x
        if self.size == 1:
            return Pending(torch.cat(pieces))
        if op in ("sum", "avg"):
            out = pieces[0].new_empty(sum(sizes))
            work = self._at_once("reduce_scatter_pieces", out, pieces)
            if work is not None:
                return Pending(out, work, (lambda t: t.div_(self.size)) if op == "avg" else None, held=pieces)
        rows = torch.cat([piece.view(self.size, -1) for piece in pieces], 1)
        return self.reduce_scatter_tensor(rows.view(-1), op, group_size)

    def _at_once(self, method: str, out: torch.Tensor, pieces: list[torch.Tensor]) -> Any:
        """The collective by a group that takes pieces as they are; None if this one, or these pieces, can't go so."""
        send = getattr(self.group, method, None)
        return None if send is None else send(out, pieces)

    def all_to_all_single(self, x: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> Pending:
        """Shard(i) -> Shard(j), by blocks of dim 0."""
        x = x.contiguous()
        if self.size == 1:
            return Pending(x.clone())
        out = x.new_empty((sum(out_sizes), *x.shape[1:]))
        return Pending(out, self.group.alltoall_base(out, x, list(out_sizes), list(in_sizes)), held=x)

    def shard_dim_alltoall(self, x: torch.Tensor, gather_dim: int, shard_dim: int) -> torch.Tensor:
        """Shard(gather_dim) -> Shard(shard_dim); waited for at once."""
        if self.size == 1:
            return x.clone()
        blocks = torch.stack([part.contiguous() for part in x.chunk(self.size, shard_dim)])
        out = torch.empty_like(blocks)
        self.group.alltoall_base(out, blocks, [], []).wait()
        return torch.cat(list(out.unbind(0)), gather_dim)

    def ppermute(self, x: torch.Tensor, sources: Sequence[int]) -> Pending:
        """Member j gets the value of member `sources[j]`; zeros where that is -1."""
        x = x.contiguous()
        out = torch.zeros_like(x)
        if hasattr(self.group, "permute"):
            return Pending(out, self.group.permute(out, x, list(sources)), held=x)
        me = self.ranks.index(dist.get_rank())
        return Pending(out, permute_by_blocks(self.group, out, x, list(sources), me), held=x)

    def send(self, x: torch.Tensor, peer: int, tag: int) -> None:
        """Starts sending a value to a member, by its place; it must not be overwritten before `flush`."""
        group = getattr(self.group, "messages", self.group)
        self.sent.append((group.send([x], peer, tag), x))
        while len(self.sent) > 8 and self.sent[0][0].is_completed():
            self.sent.popleft()

    def receive(self, size: Sequence[int], dtype: torch.dtype, device: Any, peer: int, tag: int) -> Pending:
        """Starts receiving a value from a member."""
        out = torch.empty(size, dtype=dtype, device=device)
        group = getattr(self.group, "messages", self.group)
        return Pending(out, group.recv([out], peer, tag))

    def flush(self) -> None:
        """Waits until everything that was sent is delivered."""
        while self.sent:
            self.sent.popleft()[0].wait()

    def broadcast(self, x: torch.Tensor, source: int) -> Pending:
        """The value of global rank `source`, everywhere."""
        out = x.clone(memory_format=torch.contiguous_format)
        if self.size == 1:
            return Pending(out)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.ranks.index(source), 0
        return Pending(out, self.group.broadcast([out], options))


@functools.cache
def _all_reduce_options(op: str) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = _OPS["sum" if op == "avg" else op]
    return options


def _reduce_parts(parts: torch.Tensor, op: str) -> torch.Tensor:
    """The parts reduced in rank order, whatever the number of threads."""
    if op in ("max", "min"):
        return parts.amax(0) if op == "max" else parts.amin(0)
    total = parts[0]
    for part in parts[1:]:
        total = total * part if op == "product" else total + part
    return total / len(parts) if op == "avg" else total


class FlatChannel(Channel):
    """Several mesh axes of this process taken together.

    Its group is made at its first collective: by then the ranks have agreed on the program, so all of them come there
    in one order.
    """

    def __init__(self, mesh: Any, axes: tuple[str, ...]):
        self.mesh, self.axes = mesh, axes
        self.size = math.prod(mesh.shape[axis] for axis in axes)

    @functools.cached_property
    def own_group(self) -> Any:
        """The group, as the mesh made it."""
        return self.mesh.group_over(self.axes)

    @functools.cached_property
    def group(self) -> Any:
        return _tapped(self.mesh, join_axes(self.axes), _fast(self.mesh, self.axes, self.own_group))

    @functools.cached_property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return dist.get_process_group_ranks(self.own_group)

    @functools.cached_property
    def gloo(self) -> bool:  # type: ignore[override]
        return not can_share() and "gloo" in dist.get_backend(self.own_group)


class Channels(dict[str, Channel]):
    """Axis -> its channel, on a real mesh; `data*model` is the channel of both together, made when it is asked for."""

    def __init__(self, mesh: Any):
        super().__init__()
        self.mesh = mesh
        for axis in mesh.axis_names:
            group = mesh.group_over((axis,))
            fast = _fast(mesh, (axis,), group)
            self[axis] = Channel(fast, dist.get_process_group_ranks(group))
            self[axis].group = _tapped(mesh, axis, fast)

    def __missing__(self, name: str) -> Channel:
        self[name] = FlatChannel(self.mesh, split_axes(name))
        return self[name]

    def __setitem__(self, name: str, channel: Channel) -> None:
        super().__setitem__(name, channel)
        channels_of(self.mesh)[name].add(channel)


def channels_of(mesh: Any) -> dict[str, weakref.WeakSet[Channel]]:
    """Axis -> the channels that the compiled steps of a mesh have over it."""
    return mesh.__dict__.setdefault("_channels", collections.defaultdict(weakref.WeakSet))


@contextlib.contextmanager
def tapped(mesh: Any, tap: Callable[[str, Any], Any]) -> Iterator[None]:
    """Inside, the steps of a mesh send through `tap(axis, group)` instead of each group."""
    mesh.__dict__["_tap"] = tap
    replaced = []
    for axis, channels in channels_of(mesh).items():
        for channel in channels:
            if not isinstance(channel, FlatChannel) or "group" in channel.__dict__:
                replaced.append((channel, channel.group))
                channel.group = tap(axis, channel.group)
    try:
        yield
    finally:
        del mesh.__dict__["_tap"]
        for channel, group in replaced:
            channel.group = group
        for channels in channels_of(mesh).values():
            for channel in channels:
                if hasattr(channel.__dict__.get("group"), "tapped"):
                    channel.group = channel.group.tapped


def _fast(mesh: Any, axes: tuple[str, ...], group: Any) -> Any:
    """The group, or what stands in for it where ranks may share memory; the steps of a mesh have it in common."""
    if "gloo" not in dist.get_backend(group) or not can_share():
        return group
    shared = mesh.__dict__.setdefault("_shared_memory", {})
    if axes not in shared:
        shared[axes] = SharedMemoryGroup(group, dist.get_process_group_ranks(group), mesh.epoch)
    return shared[axes]


def _tapped(mesh: Any, axis: str, group: Any) -> Any:
    tap = mesh.__dict__.get("_tap")
    return group if tap is None else tap(axis, group)


def open_channels(mesh: Any) -> Channels:
    """The channels of a real mesh."""
    return Channels(mesh)
