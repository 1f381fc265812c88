"""Runs a script or a module in several processes: what `ptrainx run` does.

In: a script with its arguments and a number of processes. Out: the workers' own output, untouched; the first failure
as an error. Next: `ptrainx.runtime.elastic` starts the processes, `ptrainx.runtime.bootstrap` runs in each.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ptrainx.core.errors import InputError
from ptrainx.runtime import bootstrap
from ptrainx.runtime.elastic import local_options, run_workers

__all__ = ["run_script"]


def run_script(
    target: str,
    args: Sequence[str] = (),
    *,
    n: int,
    module: bool = False,
    options: Sequence[str] | None = None,
    verbose: bool = False,
) -> None:
    """Runs `python target args...` in `n` processes that find each other by torchrun's environment variables.

    Args:
        target: a script's path, or a module's name where `module` is true.
        args: the program's arguments.
        n: processes on this node.
        module: runs as `python -m target` does.
        options: torchrun's options for a run of several nodes; without them the run is local, over loopback.
        verbose: shows torch elastic's own log too.

    Raises:
        InputError: no such script or module, or fewer than one process.
        RankFailedError: a worker failed; it names the first.

    Example:
        run_script("train.py", ["--steps", "10"], n=2)
    """
    if n < 1:
        raise InputError("a run needs at least one process", got=f"-n {n}", fix="give -n 1 or more")
    (check_module if module else check_script)(target)
    line = [bootstrap.__file__, "module" if module else "script", target, *args]
    run_workers(n, sys.executable, line, options=local_options() if options is None else options, verbose=verbose)


def check_script(path: str) -> None:
    """Refuses a script that is not there, before processes are started for it."""
    script = Path(path)
    if not script.exists():
        near = sorted(p.name for p in script.parent.glob("*.py"))[:5] if script.parent.is_dir() else []
        fix = f"scripts there: {', '.join(near)}" if near else "check the path; -m runs a module by name"
        raise InputError(f"no such script: {path}", got=f"working directory {os.getcwd()}", fix=fix)
    if script.is_dir() and not (script / "__main__.py").exists():
        raise InputError(f"{path} is a folder without a __main__.py", fix="give a Python file")


def check_module(name: str) -> None:
    """Refuses a module whose package is nowhere on the path, without importing anything."""
    top = name.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise InputError(f"no module named {top}", fix="install it, or run from the folder that holds it")
