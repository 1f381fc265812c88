"""The command line: `ptrainx run`, `ptrainx doctor`, `ptrainx checkpoint`.

In: arguments. Out: an exit status: 0, 1 where the work failed (or the failed worker's own status), 2 where the
arguments are wrong, 130 after an interrupt. What a command needs is imported when that command runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

from ptrainx.cli.checkpoint_options import add_checkpoint
from ptrainx.core.errors import InputError, PtrainxError

__all__ = ["main"]

# Options of torchrun that are handed on as they are; without any of them a run is local.
ELASTIC = {
    "--nnodes": ("N[:MAX]", "number of nodes, or a range"),
    "--node-rank": ("RANK", "this node's number, for a static rendezvous"),
    "--rdzv-backend": ("NAME", "how nodes find each other: c10d or static"),
    "--rdzv-endpoint": ("HOST:PORT", "where they meet"),
    "--rdzv-id": ("ID", "the run's name, the same on all nodes"),
    "--rdzv-conf": ("K=V,...", "settings of the rendezvous"),
    "--master-addr": ("HOST", "address of node 0, for a static rendezvous"),
    "--master-port": ("PORT", "port of node 0, for a static rendezvous"),
    "--local-addr": ("HOST", "this node's address"),
}
# These make sense in a local run too, so they do not turn it into one of several nodes.
EITHER = {
    "--max-restarts": ("N", "restart all workers up to N times after a failure (default 0)"),
    "--shutdown-timeout": ("SECONDS", "time to end before a worker is killed (default 30)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments, without the program's name; the process's own if not given.

    Returns:
        The exit status.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except InputError as error:
        print(f"ptrainx: {error}", file=sys.stderr)
        return 2
    except PtrainxError as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ptrainx", description="Functional SPMD training over PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"ptrainx {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    doctor = commands.add_parser(
        "doctor", help="show versions, devices, backends, and what is missing", allow_abbrev=False
    )
    doctor.add_argument("--json", action="store_true", help="as one JSON object")
    doctor.set_defaults(command=_doctor)
    add_checkpoint(commands, _checkpoint)
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="run a script in several processes",
        usage="ptrainx run [-n N] [options] SCRIPT [ARGS ...]\n"
        "       ptrainx run [-n N] [options] -m MODULE [ARGS ...]",
        description="Runs a script in N processes on this machine. Their output passes through untouched; the first "
        "error is shown once, with its rank, and stops them all.",
        epilog="OMP_NUM_THREADS is set to cores / N for the workers unless the environment sets it. An interrupt is "
        "passed on to the workers; a second one ends them at once.",
        allow_abbrev=False,
    )
    run.add_argument("-n", "--processes", type=int, default=1, metavar="N", help="processes on this node (default 1)")
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, run as python -m does")
    run.add_argument("-v", "--verbose", action="store_true", help="show torch elastic's own log too")
    for options in (EITHER, ELASTIC):
        group = run if options is EITHER else run.add_argument_group("several nodes (as torchrun has them)")
        for option, (value, text) in options.items():
            group.add_argument(option, metavar=value, help=text)
    run.add_argument("script", metavar="SCRIPT", help="a Python file, or a module's name after -m")
    run.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")
    run.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ptrainx.runtime.elastic import local_options
    from ptrainx.runtime.script import run_script

    across = _given(arguments, ELASTIC)
    run_script(
        arguments.script,
        arguments.args,
        n=arguments.processes,
        module=arguments.module,
        options=[*(across or local_options()), *_given(arguments, EITHER)],
        verbose=arguments.verbose,
    )
    return 0


def _given(arguments: argparse.Namespace, options: dict[str, tuple[str, str]]) -> list[str]:
    """Those of `options` that stand on the command line, as torchrun takes them."""
    values = ((option, getattr(arguments, option.lstrip("-").replace("-", "_"))) for option in options)
    return [word for option, value in values if value is not None for word in (option, value)]


def _doctor(arguments: argparse.Namespace) -> int:
    from ptrainx.cli.doctor import examine, print_report

    return print_report(examine(), as_json=arguments.json)


def _checkpoint(arguments: argparse.Namespace) -> int:
    from ptrainx.cli.checkpoint import COMMANDS

    return COMMANDS[arguments.action](arguments)


def _version() -> str:
    try:
        return metadata.version("ptrainx")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
