"""The processes of a benchmark, and calls to them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from tests.bench.worker import serve_jax, serve_rank

__all__ = ["ContenderFailed", "Processes", "cores"]

START_TIMEOUT = 180.0
GRACE = 15.0  # seconds that the other rank gets once one has failed


class ContenderFailed(Exception):
    """A contender raised or hung.

    Attributes:
        reason: one line.
        stuck: whether a process is still in it, so that the processes have to be replaced.
        trace: the traceback, if there is one.
    """

    def __init__(self, reason: str, *, stuck: bool, trace: str = ""):
        super().__init__(reason)
        self.reason, self.stuck, self.trace = reason, stuck, trace


def cores() -> tuple[int, ...]:
    """The cores that contenders run on: the first two that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0))[:2])


class Processes:
    """The two ranks, and the JAX process; each starts when it is first called, and all end on exit.

    >>> with Processes() as processes:                                                     # doctest: +SKIP
    ...     processes.call("ranks", 60.0, "visit", "ddp", 3)
    [[0.13, 0.13, 0.13], [0.13, 0.13, 0.13]]
    """

    def __init__(self) -> None:
        self._groups: dict[str, list[tuple[Any, Connection]]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in list(self._groups):
            self.end(group)

    def call(self, group: str, timeout: float, method: str, *arguments: Any, only: int | None = None) -> list[Any]:
        """Calls a method of `worker.Runner` in a group's processes; gives their results.

        Args:
            group: "ranks" or "jax".
            timeout: seconds.
            method: its name.
            arguments: its arguments.
            only: the one process to call.

        Raises:
            ContenderFailed: a process raised, died or did not answer in time.
        """
        members = self._members(group)
        pipes = [pipe for i, (_, pipe) in enumerate(members) if only in (None, i)]
        for pipe in pipes:
            pipe.send((method, *arguments))
        return _answers(pipes, timeout)

    def end(self, group: str) -> None:
        """Ends a group's processes, whatever they are doing."""
        for process, pipe in self._groups.pop(group, ()):
            pipe.close()
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _members(self, group: str) -> list[tuple[Any, Connection]]:
        if group not in self._groups:
            serve: Callable[..., None] = serve_rank if group == "ranks" else serve_jax
            port = _free_port()
            self._groups[group] = [_start(serve, rank, port) for rank in range(2 if group == "ranks" else 1)]
            _answers([pipe for _, pipe in self._groups[group]], START_TIMEOUT)
        return self._groups[group]


def _start(serve: Callable[..., None], rank: int, port: int) -> tuple[Any, Connection]:
    # Fresh processes: a fork would carry threads' locks, and the launching process's choice of JAX devices.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, rank, cores(), port), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _answers(pipes: list[Connection], timeout: float) -> list[Any]:
    deadline, answers = time.monotonic() + timeout, [None] * len(pipes)
    failure: tuple[str, str] | None = None
    stuck, open_pipes = False, dict(enumerate(pipes))
    while open_pipes and not stuck:
        ready = multiprocessing.connection.wait(list(open_pipes.values()), max(0.0, deadline - time.monotonic()))
        stuck = not ready
        for i in [i for i, pipe in open_pipes.items() if pipe in ready]:
            try:
                status, *rest = open_pipes.pop(i).recv()
            except EOFError:
                raise ContenderFailed("a process died", stuck=True) from None
            if status == "ok":
                answers[i] = rest[0]
            else:
                failure = failure or (rest[0], rest[1])
                deadline = min(deadline, time.monotonic() + GRACE)
    if failure is not None:
        raise ContenderFailed(failure[0].splitlines()[0], stuck=stuck, trace=failure[1])
    if stuck:
        raise ContenderFailed(f"no answer in {timeout:.0f} s", stuck=True)
    return answers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
