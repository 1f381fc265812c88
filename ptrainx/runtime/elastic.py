"""One run of worker processes under torch elastic's agent, quietly.

In: torchrun's options, and a command or a function. Out: nothing where all workers succeed; the first failure as a
`RankFailedError` where one does not. The ways in are `ptrainx.runtime.script` (a command) and
`ptrainx.runtime.launch` (a function).

torch's launcher is imported only when a run starts, so that importing ptrainx stays cheap.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ptrainx.core.errors import InputError, WorkerError
from ptrainx.runtime.failure import first_failure, read_records

__all__ = ["local_options", "run_workers", "threads_per_worker"]

# The packages whose loggers tell of every step and every failure a second time.
NOISY = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run", "torch.multiprocessing")


def local_options() -> list[str]:
    """torchrun's options for a run on this machine alone, over loopback, on a port that the system picks."""
    endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", uuid.uuid4().hex]
    return [*endpoint, "--local-addr", "127.0.0.1"]


def threads_per_worker(n: int) -> int:
    """Threads that each of `n` processes may use, so that together they take the cores this process may run on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // n)


def run_workers(
    n: int, entrypoint: str | Callable, args: Sequence[Any], *, options: Sequence[str], verbose: bool = False
) -> None:
    """Starts `n` workers on this node, waits for them, and stops all as soon as one fails.

    OMP_NUM_THREADS is set for the workers to a fair share of the cores unless the environment sets it. Signal handlers
    and environment are as before when this returns; a signal that ended the run is delivered again afterwards, so that
    an interrupt becomes the usual `KeyboardInterrupt`.

    Args:
        n: processes to start on this node.
        entrypoint: a program's path, or a function.
        args: what it is called with.
        options: further options of torchrun, such as `local_options()`.
        verbose: leaves torch elastic's own log as it is.

    Raises:
        InputError: torchrun does not accept the options.
        RankFailedError: a worker failed.
        WorkerError: the workers could not find each other.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    interrupted: signal.Signals | None = None
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_worker(n)))}
    with tempfile.TemporaryDirectory(prefix="ptrainx-") as folder, _quiet(verbose), _unchanged(threads):
        line = ["--nproc-per-node", str(n), *options, "--log-dir", folder, "-"]
        try:
            config, _, _ = config_from_args(parse_args(line))
        except (AssertionError, RuntimeError, ValueError) as error:
            raise InputError(
                "the launcher's options do not fit together",
                got=str(error),
                fix="start from `ptrainx run -n N script.py` and add one option at a time; see `ptrainx run --help`",
            ) from error
        try:
            elastic_launch(config, entrypoint)(*args)
        except ChildFailedError as error:
            raise first_failure(error.failures, read_records(Path(folder))) from None
        except RendezvousError as error:
            raise WorkerError(
                "the workers could not find each other", got=str(error), fix="check --rdzv-endpoint and --nnodes"
            ) from error
        except SignalException as error:
            interrupted = error.sigval
    if interrupted is not None:
        signal.raise_signal(interrupted)


@contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """Silences torch elastic's loggers."""
    names = ["torchelastic-events-null", *(name for name in logging.root.manager.loggerDict if name.startswith(NOISY))]
    loggers = [] if verbose else [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextmanager
def _unchanged(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables, and leaves environment and signal handlers as they were, though the agent changes both."""
    environment = dict(os.environ)
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    main_thread = threading.current_thread() is threading.main_thread()
    handlers = [(number, signal.getsignal(number)) for number in signals] if main_thread else []
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers:
            if handler is not None:
                signal.signal(number, handler)
