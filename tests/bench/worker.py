"""One process of the benchmark: builds contenders and runs their steps when the driver asks.

In, over a pipe: `(method, *arguments)`. Out: `("ok", result)`, or `("error", message, traceback)`.
A rank has one core and one thread; the JAX process has both cores, for its two devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["serve_jax", "serve_rank"]


class Runner:
    """The contenders of one process.

    Args:
        rank: of this process.
        barrier: called before each step, so that no rank waits for a late one inside its time.
    """

    def __init__(self, rank: int, barrier: Callable[[], Any]):
        self.rank, self.barrier = rank, barrier
        self.steps: dict[str, Callable[[], Any]] = {}

    def build(self, name: str, where: str, size: str, steps: int) -> dict[str, Any]:
        """Builds a contender and trains it for its first steps, which warm it up.

        Returns:
            `start_s`, the seconds up to the end of the first step (tracing and compiling are in it), and the `losses`.
        """
        module, function = where.split(":")
        begin = time.perf_counter()
        step = self.steps[name] = getattr(importlib.import_module(module), function)(size, self.rank)
        losses = [float(step())]
        start_s = time.perf_counter() - begin
        losses += [float(step()) for _ in range(steps - 1)]
        return {"start_s": start_s, "losses": losses}

    def visit(self, name: str, steps: int) -> tuple[list[float], float]:
        """Seconds of each of the next steps, and processor seconds a step.

        One more step comes first, untimed: another contender has had the caches. Garbage is collected before, so in no
        contender's time.
        """
        step, times, used = self.steps[name], [], 0.0
        gc.collect()
        gc.disable()
        step()
        for _ in range(steps):
            self.barrier()
            begin, begin_used = time.perf_counter(), time.process_time()
            step()
            times.append(time.perf_counter() - begin)
            used += time.process_time() - begin_used
        gc.enable()
        return times, used / steps

    def resident(self, name: str, steps: int) -> float:
        """MiB that a contender which has been built has resident at most, and its processes without it do not.

        What stays once its state is gone is no part of it: everything imported and compiled.
        """
        step = self.steps[name]
        _reset_peak()
        for _ in range(steps):
            step()
        peak = _status("VmHWM")
        del step
        self.drop(name)
        _trim()
        return peak - _status("VmRSS")

    def live(self, name: str, where: str, size: str, steps: int) -> float:
        """MiB of tensors alive at once at most in a step of a contender, from all allocations since its build began."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            self.build(name, where, size, steps)
            begin = time.time_ns()
            self.steps[name]()
        self.drop(name)
        total = most = 0
        for event in sorted(trace.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                total += event.nbytes()
                most = max(most, total) if event.start_ns() >= begin else total
        return most / 2**20

    def drop(self, *names: str) -> None:
        """Forgets contenders; all, without names."""
        for name in names or list(self.steps):
            self.steps.pop(name, None)
        gc.collect()


def _status(field: str) -> float:
    """A line of this process's status, MiB."""
    with open("/proc/self/status") as status:
        return next(float(line.split()[1]) for line in status if line.startswith(field)) / 1024


def _reset_peak() -> None:
    """Lets the peak of resident memory begin anew."""
    _trim()
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def _trim() -> None:
    """Gives the memory that nobody holds back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _serve(runner: Runner, pipe: Connection) -> None:
    pipe.send(("ok", None))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            method, *arguments = pipe.recv()
            try:
                pipe.send(("ok", getattr(runner, method)(*arguments)))
            except Exception as error:
                text = "".join(traceback.format_exception_only(error)).strip()
                pipe.send(("error", text, traceback.format_exc()))


def serve_rank(pipe: Connection, rank: int, cores: tuple[int, ...], port: int) -> None:
    """The life of one of the PyTorch processes."""
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        KINETO_LOG_LEVEL="99",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _serve(Runner(rank, dist.barrier), pipe)
    dist.destroy_process_group()


def serve_jax(pipe: Connection, rank: int, cores: tuple[int, ...], port: int) -> None:
    """The life of the JAX process."""
    os.sched_setaffinity(0, set(cores))
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    _serve(Runner(rank, lambda: None), pipe)
