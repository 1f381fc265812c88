"""The simulator: every rank's program in one process, run in lockstep.

Each rank's program is a generator that stops at a collective. A collective happens once all members of its group have
reached it; members that ask for different ones, or a ring of ranks that wait for each other, are errors that show
every side with its source line. A message lies with its receiver until it is asked for.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from ptrainx.compile.lower import CollectiveCall
from ptrainx.core.errors import AgreementError
from ptrainx.mesh.axes import split_axes
from ptrainx.mesh.exchange import exchange
from ptrainx.mesh.virtual import axis_groups

__all__ = ["Lockstep"]

SEND, RECEIVED = "ptrainx::send", "ptrainx::received"

Step = Generator[tuple[int, torch.Tensor] | None, torch.Tensor | None, list[torch.Tensor]]


class Lockstep:
    """Runs the programs of all ranks of a simulated mesh.

    Args:
        programs: each rank's generator function and its collectives.
        shape: axis -> size.
    """

    def __init__(
        self,
        programs: Sequence[tuple[Callable[[list[torch.Tensor]], Any], list[CollectiveCall]]],
        shape: dict[str, int],
    ):
        self.programs = list(programs)
        self.shape = dict(shape)
        self.group_of: dict[str, list[list[int]]] = {}
        self.mail: dict[tuple[int, int, str, int], collections.deque[torch.Tensor]] = {}

    def run(self, args: Sequence[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Each rank's results from each rank's local tensors; the lists are emptied.

        Raises:
            AgreementError: collectives that do not match, or ranks that wait for each other for ever.
        """
        steps: list[Step] = [fn(list_) for (fn, _), list_ in zip(self.programs, args)]
        results: list[list[torch.Tensor] | None] = [None] * len(steps)
        waiting: dict[int, tuple[int, torch.Tensor]] = {}
        ready: list[tuple[int, torch.Tensor | None]] = [(rank, None) for rank in range(len(steps))]
        self.mail.clear()
        while ready:
            for rank, value in ready:
                try:
                    request = steps[rank].send(value)
                    while request is not None and self._sends(rank, request):
                        request = steps[rank].send(None)
                except StopIteration as stop:
                    results[rank] = stop.value
                else:
                    if request is not None:
                        waiting[rank] = request
            ready = self._meet(waiting, results)
        return results  # type: ignore[return-value]

    def _sends(self, rank: int, request: tuple[int, torch.Tensor]) -> bool:
        """Whether a request sends a message, which then lies with whom it is for."""
        call = self._call(rank, request)
        if call.name != SEND:
            return False
        peer, tag = call.args
        receiver = self._group(call.axis, rank)[peer]
        self.mail.setdefault((rank, receiver, call.axis, tag), collections.deque()).append(request[1].clone())
        return True

    def _arrivals(self, waiting: dict[int, tuple[int, torch.Tensor]]) -> list[tuple[int, Any]]:
        """The messages that ranks wait for and that are there."""
        found: list[tuple[int, Any]] = []
        for rank in sorted(waiting):
            call = self._call(rank, waiting[rank])
            if call.name == RECEIVED:
                peer, tag = call.args
                box = self.mail.get((self._group(call.axis, rank)[peer], rank, call.axis, tag))
                if box:
                    found.append((rank, box.popleft()))
                    del waiting[rank]
        return found

    def _group(self, axis: str, rank: int) -> list[int]:
        """The members of a rank's group over an axis, or over several taken together."""
        if axis not in self.group_of:
            dims = [list(self.shape).index(a) for a in split_axes(axis)]
            groups = axis_groups(tuple(self.shape.values()), *dims)
            self.group_of[axis] = [next(g for g in groups if r in g) for r in range(len(self.programs))]
        return self.group_of[axis][rank]

    def _call(self, rank: int, request: tuple[int, torch.Tensor]) -> CollectiveCall:
        return self.programs[rank][1][request[0]]

    def _meet(self, waiting: dict[int, tuple[int, torch.Tensor]], results: list) -> list[tuple[int, Any]]:
        """Fires every collective whose whole group is there."""
        ready = self._arrivals(waiting)
        for rank in sorted(waiting):
            if rank not in waiting:
                continue
            call = self._call(rank, waiting[rank])
            if call.name == RECEIVED:
                continue
            group = self._group(call.axis, rank)
            if not all(member in waiting for member in group):
                continue
            calls = [self._call(member, waiting[member]) for member in group]
            if any(c.axis != call.axis or c.name == RECEIVED for c in calls):
                continue
            self._check_match(group, calls)
            inputs = [waiting.pop(member)[1] for member in group]
            outputs = exchange(call.name, inputs, [c.args for c in calls])
            ready.extend(zip(group, outputs))
        if waiting and not ready:
            sides = [f"rank {r} waits in {describe_call(self._call(r, q))}" for r, q in sorted(waiting.items())]
            sides += [f"rank {r} has finished" for r, result in enumerate(results) if result is not None]
            raise AgreementError(
                "the ranks wait for each other for ever:\n    " + "\n    ".join(sides),
                fix="every rank has to run the same collectives in the same order",
            )
        return ready

    def _check_match(self, group: Sequence[int], calls: Sequence[CollectiveCall]) -> None:
        for i, j in itertools.combinations(range(len(group)), 2):
            a, b = calls[i], calls[j]
            if (a.name, a.dtype) != (b.name, b.dtype) or not _sizes_match(a, i, b, j):
                raise AgreementError(
                    "collectives do not match across ranks",
                    got=f"rank {group[i]}: {describe_call(a)}\n            rank {group[j]}: {describe_call(b)}",
                    fix="every rank has to run the same collectives, in the same order, on the same shapes",
                )


def _sizes_match(a: CollectiveCall, i: int, b: CollectiveCall, j: int) -> bool:
    """Whether the calls of members i and j of a group fit together."""
    if a.name == "_c10d_functional::all_to_all_single":
        # (rows to receive from each member, rows to send to each)
        return a.shape[1:] == b.shape[1:] and a.args[0][j] == b.args[1][i] and b.args[0][i] == a.args[1][j]
    return a.shape == b.shape and a.args == b.args


def describe_call(call: CollectiveCall) -> str:
    """A collective with its operand, axis and source line."""
    kind, dtype = call.name.split("::")[-1], str(call.dtype).removeprefix("torch.")
    if call.name == RECEIVED:
        peer, tag = call.args
        sender = f"member {peer} of {call.axis!r} (tag {tag})"
        return f"a message of {dtype}{list(call.shape)} from {sender} at {call.origin.source}"
    return f"{kind} over {call.axis!r} of {dtype}{list(call.shape)} at {call.origin.source}"
