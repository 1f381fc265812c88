"""One worker of the test pool: a fresh Python that runs functions of test modules on request.

In: requests over one connection, whose file descriptor is the first argument. Out: a `Reply` to each; standard output
and error go where the pool has pointed them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

__all__ = ["RemoteError", "Reply", "Request"]


class Request(NamedTuple):
    """A function to call: its module's name and file, its qualified name, pickled (args, kwargs), environment."""

    module: str
    file: str
    qualname: str
    arguments: bytes
    environment: dict[str, str]


class Reply(NamedTuple):
    """What came of a request: a pickled result, or a pickled exception with its traceback as text."""

    ok: bool
    payload: bytes
    trace: str = ""


class RemoteError(Exception):
    """Stands in for a worker's exception that cannot be pickled; the message holds its type and text."""


def load(name: str, file: str) -> Any:
    """The module of that name, imported from exactly that file, whether or not the import system can find it."""
    if name in sys.modules:
        return sys.modules[name]
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin and os.path.samefile(found.origin, file):
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def call(request: Request) -> Any:
    """Finds the function, calls it in the request's environment, and returns its result."""
    function = load(request.module, request.file)
    for part in request.qualname.split("."):
        function = getattr(function, part)
    args, kwargs = pickle.loads(request.arguments)
    os.environ.update(request.environment)
    return function(*args, **kwargs)


def leave_world() -> None:
    """Ends whatever world the function joined, so that the next function may join another."""
    world = sys.modules.get("ptrainx.mesh.world")
    if world is not None and hasattr(world, "shutdown"):
        world.shutdown()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def failure(error: BaseException) -> Reply:
    """The reply for an exception; its type is kept if it survives pickling."""
    trace = "".join(traceback.format_exception(error))
    try:
        payload = pickle.dumps(error)
        if type(pickle.loads(payload)) is not type(error):
            raise TypeError("the exception changes its type when it is pickled")
    except Exception:
        payload = pickle.dumps(RemoteError(f"{type(error).__qualname__}: {error}"))
    return Reply(False, payload, trace)


def answer(request: Request) -> Reply:
    """Runs one request from a clean environment back to a clean environment."""
    before = dict(os.environ)
    try:
        reply = Reply(True, pickle.dumps(call(request)))
    except BaseException as error:
        reply = failure(error)
    try:
        leave_world()
    except BaseException as error:
        reply = failure(error) if reply.ok else reply
    os.environ.clear()
    os.environ.update(before)
    sys.stdout.flush()
    sys.stderr.flush()
    return reply


def follow(parent: int) -> None:
    """Ends this process once the test run is gone, even when a function hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Serves requests until the pool closes the connection."""
    # By name, so that a pickled Request is the same class on both sides, though this file runs as __main__.
    from tests.support import worker

    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=follow, args=(int(sys.argv[2]),), daemon=True).start()
    import torch.distributed  # noqa: F401  (paid for once, before the first function's time starts)

    from tests.support.collector import rest_collector

    rest_collector()

    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(worker.answer(request))


if __name__ == "__main__":
    main()
