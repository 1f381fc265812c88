"""A process group that counts what goes through it, beside what `comms()` says.

Bytes are counted by the convention of `comms()`: what one rank sends with ring algorithms, worked out from the tensors
of the calls that were made. On gloo a reduce-scatter goes as an all-to-all, which sends as many.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from ptrainx.compile.comms import wire_bytes
from ptrainx.compile.shared_memory import permute_by_blocks

__all__ = ["CountingGroup", "Sent"]


@dataclasses.dataclass
class Sent:
    """What a rank has sent.

    Attributes:
        calls: (kind, axis) -> number of collectives.
        bytes_of: (kind, axis) -> bytes that this rank has sent in them.
    """

    calls: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    bytes_of: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """All that this rank has sent."""
        return sum(self.bytes_of.values())

    def add(self, kind: str, axis: str, operand: torch.Tensor, members: int) -> None:
        """Counts one collective."""
        key = (kind, axis)
        self.calls[key] = self.calls.get(key, 0) + 1
        self.bytes_of[key] = self.bytes_of.get(key, 0) + wire_bytes(kind, operand, members)


class CountingGroup(dist.ProcessGroup):
    """A process group in front of another one.

    Args:
        axis: the mesh axis that it is for.
        group: what does the work.
        sent: where to count.
    """

    def __init__(self, axis: str, group: Any, sent: Sent):
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.axis, self.tapped, self.sent = axis, group, sent

    def _count(self, kind: str, operand: torch.Tensor) -> None:
        self.sent.add(kind, self.axis, operand, self.tapped.size())

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> Any:  # type: ignore[override]
        for tensor in tensors:
            self._count("all_reduce", tensor)
        return self.tapped.allreduce(tensors, *options)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, *options: Any) -> Any:
        self._count("all_gather", tensor)
        return self.tapped._allgather_base(output, tensor, *options)

    def all_gather_pieces(self, output: torch.Tensor, pieces: list[torch.Tensor]) -> Any:
        return self._pieces("all_gather", output, pieces)

    def reduce_scatter_pieces(self, output: torch.Tensor, pieces: list[torch.Tensor]) -> Any:
        return self._pieces("reduce_scatter", output, pieces)

    def _pieces(self, kind: str, output: torch.Tensor, pieces: list[torch.Tensor]) -> Any:
        send = getattr(self.tapped, f"{kind}_pieces", None)
        work = None if send is None else send(output, pieces)
        if work is not None:
            self._count(kind, torch.cat(pieces))
        return work

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, *options: Any) -> Any:
        self._count("reduce_scatter", tensor)
        return self.tapped._reduce_scatter_base(output, tensor, *options)

    def alltoall_base(self, output: torch.Tensor, tensor: torch.Tensor, *rest: Any) -> Any:
        self._count("all_to_all", tensor)
        return self.tapped.alltoall_base(output, tensor, *rest)

    def permute(self, output: torch.Tensor, tensor: torch.Tensor, sources: list[int]) -> Any:
        """Counts a permutation, which shared memory knows and other groups run by blocks."""
        self._count("permute", tensor)
        if hasattr(self.tapped, "permute"):
            return self.tapped.permute(output, tensor, sources)
        return permute_by_blocks(self.tapped, output, tensor, sources, self.tapped.rank())

    @property
    def messages(self) -> Any:
        """Counts messages too."""
        return _CountedMessages(self)

    def broadcast(self, tensors: list[torch.Tensor], *options: Any) -> Any:  # type: ignore[override]
        for tensor in tensors:
            self._count("broadcast", tensor)
        return self.tapped.broadcast(tensors, *options)


class _CountedMessages:
    """What carries messages between two members, counted."""

    def __init__(self, group: CountingGroup):
        self.group = group
        self.under: Any = getattr(group.tapped, "messages", group.tapped)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.group._count("send", tensors[0])
        return self.under.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self.under.recv(tensors, peer, tag)
