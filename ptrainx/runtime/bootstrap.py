"""What a worker process runs first: a script, a module, or a stored call, with its failure written down.

In: the command line that `ptrainx.runtime.script` and `ptrainx.runtime.launch` make for a worker, and the launcher's
environment. Out: the program's own output and exit status; where it raises, a record in the file that
TORCHELASTIC_ERROR_FILE names, which `ptrainx.runtime.failure` reads and shows once.

This file runs as a program, before anything else is imported: only the standard library may be used, so that a script
can still set the environment that torch reads when it loads.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import io
import json
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

__all__ = ["call_stored", "main", "record", "run_script", "store_result"]

PR_SET_PDEATHSIG = 1
CALL_FILE = "call.pkl"


def main(argv: list[str]) -> None:
    """Runs `script FILE ARGS...`, `module NAME ARGS...` or `call FOLDER` and exits as that program would.

    Args:
        argv: the form, its target, and the program's own arguments.
    """
    end_with_parent()
    prepare_streams()
    form, target, *arguments = argv
    programs: dict[str, Callable[[], None]] = {
        "script": lambda: run_script(target, arguments),
        "module": lambda: run_module(target, arguments),
        "call": lambda: call_stored(target),
    }
    try:
        programs[form]()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:
        if error.code is None or error.code == 0:
            raise
        record(error)
        sys.exit(error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        # A program with a hook of its own shows its traceback itself; then only the last line is recorded. The hook
        # that torch.distributed sets on import is no such choice.
        hooked = sys.excepthook is not sys.__excepthook__ and not sys.excepthook.__module__.startswith("torch")
        if hooked:
            sys.excepthook(type(error), error, user_frames(error.__traceback__))
        record(error, with_frames=not hooked)
        leave_failed()


def leave_failed() -> None:
    """Exits with status 1; out of a world that still stands, without taking it down.

    gloo's threads, left in the middle of a collective, abort the process when its objects are destroyed, and the
    abort's message would stand beside the failure. What is registered to run at exit does run.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        sys.exit(1)
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)


def end_with_parent() -> None:
    """Asks Linux to end this process when the launcher is gone, even when that was killed."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(1)


def prepare_streams() -> None:
    """Writes whole lines, so that those of different ranks never mix, and shows the stack of a crash in native code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    with contextlib.suppress(io.UnsupportedOperation, ValueError):
        faulthandler.enable(sys.__stderr__ or sys.stderr)


def run_script(path: str, arguments: list[str]) -> None:
    """Runs a file, or a folder's `__main__.py`, as `python PATH ARGS...` does.

    The module stays `__main__` until the process ends, so that what runs at exit, or pickles by name, finds it.
    """
    sys.argv = [path, *arguments]
    file = os.path.abspath(path)
    file = os.path.join(file, "__main__.py") if os.path.isdir(file) else file
    replace_own_path(os.path.dirname(file))
    program = ModuleType("__main__")
    program.__dict__.update(__file__=file, __builtins__=builtins)
    sys.modules["__main__"] = program
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec")
    exec(code, program.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    """Runs a module as `python -m NAME ARGS...` does."""
    sys.argv = [name, *arguments]
    replace_own_path(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def replace_own_path(folder: str) -> None:
    """Puts `folder` first on the import path, where python has put this file's own."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def call_stored(folder: str) -> None:
    """Calls the function stored in `folder` and stores this rank's result there.

    The import path comes first in the file, since the function and its arguments are found by it.
    """
    with open(os.path.join(folder, CALL_FILE), "rb") as file:
        sys.path[:] = pickle.load(file)
        function, args, kwargs = pickle.load(file)
    store_result(folder, function(*args, **kwargs))


def store_result(folder: str, result: Any) -> None:
    """Writes this rank's result where the launching process looks for it."""
    with open(os.path.join(folder, f"{os.environ['RANK']}.pkl"), "wb") as file:
        pickle.dump(result, file)


def record(error: BaseException, *, with_frames: bool = True) -> None:
    """Writes a failure into the launcher's error file: torch elastic's form, with rank and exact time added.

    Args:
        error: what ended the program.
        with_frames: records the whole traceback, not its last line alone.
    """
    if isinstance(error, SystemExit):
        trace = f"exit status {error.code}" if isinstance(error.code, int) else str(error.code)
    elif with_frames:
        trace = "".join(traceback.format_exception(type(error), error, user_frames(error.__traceback__))).strip()
    else:
        trace = "".join(traceback.format_exception_only(error)).strip()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        print(trace, file=sys.stderr)
        return
    now = time.time_ns()
    known_to_elastic = {"message": str(error), "extraInfo": {"py_callstack": trace, "timestamp": str(now // 10**9)}}
    raised = not isinstance(error, SystemExit)
    ours = {"rank": int(os.environ["RANK"]), "time_ns": now, "trace": trace, "raised": raised}
    with open(path, "w") as file:
        json.dump({"message": known_to_elastic, "ptrainx": ours}, file)


def user_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on, without those that merely started the program."""
    while frames is not None and starts_program(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


def starts_program(file: str) -> bool:
    """Whether a frame in that file belongs to the launcher: this file's neighbours, and runpy."""
    return os.path.dirname(file) == os.path.dirname(__file__) or file in (runpy.__file__, "<frozen runpy>")


if __name__ == "__main__":
    main(sys.argv[1:])
