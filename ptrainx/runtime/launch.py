"""`px.launch`: a function in several processes, from a notebook, a script or a test.

In: a function and its arguments. Out: each rank's result, by rank.

How the workers get the function:

- One that can be imported (module level, in a module other than `__main__`) runs in fresh Python processes. Nothing of
  this process is inherited, so CUDA, threads and process groups in it do no harm, and the main script is not run again.
- Any other (a notebook's, a script's own, a lambda, a closure) cannot be sent by name, so the workers are forks of this
  process and see everything that is defined in it. A fork keeps neither threads nor CUDA: workers compute on one thread
  each, and a process that has used CUDA or has joined a world cannot be forked, which is refused with what to do.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TypeVar

from ptrainx.core.errors import BackendError, InputError, MeshError
from ptrainx.runtime import bootstrap
from ptrainx.runtime.elastic import local_options, run_workers

__all__ = ["launch"]

Result = TypeVar("Result")


def launch(fn: Callable[..., Result], n: int, *args: Any, **kwargs: Any) -> list[Result]:
    """Calls `fn(*args, **kwargs)` in `n` processes on this machine and returns the results by rank.

    Each process finds its place in torchrun's environment variables, so `px.make_mesh` inside `fn` spans all of them.
    Output goes where this process writes. All processes have ended when this returns or raises.

    Args:
        fn: what each rank runs.
        n: number of processes.
        args: passed on; must pickle if `fn` is importable, as each result must always.
        kwargs: passed on in the same way.

    Returns:
        `n` results, the one of rank 0 first.

    Raises:
        InputError: `n` is below one.
        WorkerError: a rank failed; the message names the first one, with its traceback. `error.rank` is its number.
        BackendError: `fn` is not importable and this process cannot be forked, for instance because it has used CUDA.
        MeshError: `fn` is not importable and this process has itself joined a world.

    Example:
        >>> launch(pow, 2, 3, 2)
        [9, 9]
    """
    if n < 1:
        raise InputError("launch needs at least one process", got=f"n={n}", fix="give n=1 or more")
    with tempfile.TemporaryDirectory(prefix="ptrainx-launch-") as folder:
        if _is_importable(fn):
            with open(os.path.join(folder, bootstrap.CALL_FILE), "wb") as file:
                pickle.dump(sys.path, file)
                pickle.dump((fn, args, kwargs), file)
            run_workers(n, sys.executable, [bootstrap.__file__, "call", folder], options=local_options())
        else:
            _check_fork(fn)
            with warnings.catch_warnings():
                # Later Pythons warn of every fork beside threads; a notebook always has some, and workers use none.
                warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
                options = [*local_options(), "--start-method", "fork"]
                run_workers(n, _in_fork, [fn, args, kwargs, folder], options=options)
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(n)]


def _is_importable(fn: Callable[..., Any]) -> bool:
    """Whether a fresh process would find this very function by its module and name."""
    name, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    module = sys.modules.get(name or "")
    if name is None or module is None or name in ("__main__", "__mp_main__"):
        return False
    try:
        found: Any = module
        for part in qualname.split("."):
            found = getattr(found, part)
    except AttributeError:
        return False
    return found is fn and (name in sys.builtin_module_names or _origin(name) == getattr(module, "__file__", None))


def _origin(name: str) -> str | None:
    """The file that a fresh process would import as `name`; unlike importlib's, this search trusts no loaded module."""
    path: Any = None
    spec: ModuleSpec | None = None
    for end in [i for i, character in enumerate(name + ".") if character == "."]:
        found = (finder.find_spec(name[:end], path) for finder in sys.meta_path)
        spec = next((candidate for candidate in found if candidate is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec.origin if spec is not None else None


def _check_fork(fn: Callable[..., Any]) -> None:
    """Refuses what a fork would turn into a hang or a crash later."""
    import torch

    name = getattr(fn, "__qualname__", repr(fn))
    move = f"put {name} into a module and import it"
    if not hasattr(os, "fork"):
        raise BackendError(f"launch({name}): this system cannot fork, and {name} cannot be imported", fix=move)
    if torch.cuda.is_initialized():
        raise BackendError(
            f"launch({name}): this process has used CUDA, so it cannot be forked, and {name} cannot be imported",
            fix=f"{move}, or restart and launch before anything touches a CUDA device",
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise MeshError(
            f"launch({name}): this process has joined a world, which its forks cannot use",
            got=f"rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()}",
            fix=f"call px.shutdown() first, or {move}",
        )


def _in_fork(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], folder: str) -> None:
    """What a forked worker runs: the function, its result stored, its failure recorded."""
    import torch

    # The threads of the OpenMP pool were not forked; an operation that counted on them would wait for ever.
    torch.set_num_threads(1)
    # A notebook's stream sends every piece of a line by itself; the plain one, which it watches, sends whole lines.
    sys.stdout = sys.__stdout__ or sys.stdout
    bootstrap.prepare_streams()
    try:
        bootstrap.store_result(folder, fn(*args, **kwargs))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        bootstrap.record(error)
        sys.stdout.flush()
        os._exit(1)
