"""A pool of worker processes for tests that need a real world of several ranks.

In: a module-level function of a test module and its arguments. Out: each rank's result, by rank. The processes are
fresh Pythons (never forks), are started on first use and reused, since importing torch costs seconds:

    def total():
        mesh = px.make_mesh(data=2)
        ...

    def test_total(pool):
        assert pool.run(total, 2) == [3, 3]

A run sets the launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) on a fresh port, so the function may join the
world itself; the pool leaves that world afterwards.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.worker import Reply, Request

__all__ = ["Outcome", "Pool", "WorkerDied", "WorkerHung", "WorkerTraceback", "free_port"]

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 120.0
# Once a rank has failed, `run` waits this long for the others before it ends them.
GRACE = 10.0


class WorkerHung(TimeoutError):
    """A rank did not come back in time; the message holds the stacks of its threads."""


class WorkerDied(RuntimeError):
    """A rank's process ended in the middle of a function; the message holds its exit status."""


class WorkerTraceback(Exception):
    """The cause of a re-raised exception: the traceback as it was in the worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Outcome(NamedTuple):
    """What one rank came to: `result`, or `error` where it raised, hung or died."""

    result: Any = None
    error: BaseException | None = None


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Worker:
    """One process of the pool with its connection and its captured output."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        # Files, not pipes: a worker never blocks on them, and what a hung one wrote can still be read.
        self.output, self.errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._read = {"output": 0, "errors": 0}
        self._ready = False
        path = os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, sys.path)]))
        drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {k: v for k, v in os.environ.items() if k not in drop}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.support.worker", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            start_new_session=True,
        )
        theirs.close()

    def ensure_ready(self) -> None:
        """Waits until the process has imported torch."""
        if self._ready:
            return
        try:
            if not self.connection.poll(START_TIMEOUT):
                raise WorkerHung(f"a worker of the test pool did not start in {START_TIMEOUT:.0f} s")
            self.connection.recv()
        except EOFError:
            raise WorkerDied(f"a worker of the test pool did not start:\n{self.fresh('errors')}") from None
        self._ready = True

    def fresh(self, stream: str) -> str:
        """What the process has written to `stream` ("output" or "errors") since the last call."""
        descriptor = getattr(self, stream).fileno()
        data = os.pread(descriptor, os.fstat(descriptor).st_size - self._read[stream], self._read[stream])
        self._read[stream] += len(data)
        return data.decode(errors="replace")

    def stacks(self) -> str:
        """The stacks of all threads of a hung process."""
        before = self.fresh("errors")
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline, text = time.monotonic() + 2.0, ""
        while time.monotonic() < deadline and "most recent call first" not in text:
            time.sleep(0.05)
            text += self.fresh("errors")
        time.sleep(0.05)
        return before + text + self.fresh("errors")

    def stop(self) -> None:
        """Ends the process and everything it started."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.output.close()
        self.errors.close()


class Pool:
    """Runs functions in up to `size` processes, one a rank."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[Worker] = []

    def run(
        self, function: Callable[..., Any], world: int = 2, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Calls `function(*args, **kwargs)` in `world` processes and returns the results by rank.

        Where ranks fail, the exception of the lowest one is raised with its own type, the worker's traceback as its
        cause; an exception that only says that a peer has gone yields to the one that made it go.
        """
        outcomes = self._outcomes(function, world, args, kwargs, timeout, grace=GRACE)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            raise min(errors, key=_remoteness)
        return [outcome.result for outcome in outcomes]

    def run_outcomes(
        self, function: Callable[..., Any], world: int = 2, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Outcome]:
        """Like `run`, but returns what each rank came to, and gives every rank the whole `timeout`."""
        return self._outcomes(function, world, args, kwargs, timeout, grace=timeout)

    def close(self) -> None:
        """Ends all workers."""
        while self._workers:
            self._workers.pop().stop()

    def _outcomes(
        self,
        function: Callable[..., Any],
        world: int,
        args: tuple,
        kwargs: dict[str, Any],
        timeout: float,
        grace: float,
    ) -> list[Outcome]:
        requests = _requests(function, world, args, kwargs)
        workers = self._take(world)
        for worker, request in zip(workers, requests, strict=True):
            worker.connection.send(request)
        outcomes = _collect(workers, timeout, grace)
        for worker in workers:
            sys.stdout.write(worker.fresh("output"))
            sys.stderr.write(worker.fresh("errors"))
        for worker, outcome in zip(workers, outcomes, strict=True):
            if isinstance(outcome.error, WorkerHung | WorkerDied):
                self._workers.remove(worker)
                worker.stop()
        return outcomes

    def _take(self, world: int) -> list[Worker]:
        if not 1 <= world <= self.size:
            raise ValueError(f"the test pool runs 1 to {self.size} ranks, not {world}")
        self._workers += [Worker() for _ in range(world - len(self._workers))]
        for worker in self._workers[:world]:
            worker.ensure_ready()
        return self._workers[:world]


def _requests(function: Callable[..., Any], world: int, args: tuple, kwargs: dict[str, Any]) -> list[Request]:
    """One request a rank."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    if "<" in function.__qualname__ or file is None:
        raise TypeError(
            f"the test pool runs module-level functions, not {function.__qualname__}; pass data as arguments"
        )
    arguments, port = pickle.dumps((args, kwargs)), free_port()
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [{k: str(v) for k, v in {**shared, "RANK": r, "LOCAL_RANK": r}.items()} for r in range(world)]
    return [Request(function.__module__, file, function.__qualname__, arguments, e) for e in environments]


def _collect(workers: list[Worker], timeout: float, grace: float) -> list[Outcome]:
    """Waits for every worker's reply, at most `timeout` seconds, and `grace` seconds from the first failure on."""
    outcomes: dict[int, Outcome] = {}
    deadline, cut_short = time.monotonic() + timeout, False
    while len(outcomes) < len(workers):
        pending: dict[Connection, int] = {
            worker.connection: rank for rank, worker in enumerate(workers) if rank not in outcomes
        }
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        for connection in ready:
            rank = pending[connection]  # type: ignore[index]
            outcomes[rank] = _receive(rank, workers[rank])
            if outcomes[rank].error is not None and time.monotonic() + grace < deadline:
                deadline, cut_short = time.monotonic() + grace, True
        if not ready:
            why = f"{grace:g} s after another rank failed" if cut_short else f"after {timeout:g} s"
            for rank in pending.values():
                stacks = workers[rank].stacks()
                outcomes[rank] = Outcome(error=WorkerHung(f"rank {rank} had not finished {why}; it stood at\n{stacks}"))
    return [outcomes[rank] for rank in range(len(workers))]


def _receive(rank: int, worker: Worker) -> Outcome:
    """Reads one reply; a closed connection means that the process is gone."""
    try:
        reply: Reply = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        status = worker.process.wait(10)
        return Outcome(error=WorkerDied(f"rank {rank} died with exit status {status}\n{worker.fresh('errors')}"))
    value = pickle.loads(reply.payload)
    if reply.ok:
        return Outcome(result=value)
    value.__cause__ = WorkerTraceback(f"rank {rank}:\n{reply.trace}")
    return Outcome(error=value)


def _remoteness(error: BaseException) -> int:
    """How far an error is from the cause: 0 its own, 1 it lost a peer, 2 it was ended while it waited for one."""
    if isinstance(error, WorkerHung):
        return 2
    lost = type(error).__module__.startswith("torch") or type(error) is RuntimeError
    return int(lost and any(word in str(error).lower() for word in ("connection", "gloo", "broken pipe", "recv")))
