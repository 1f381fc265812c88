"""`python -m tests.bench.memory`: what contenders hold while they train, each in processes of its own.

Prints a table a size: growth of resident memory over a process in which everything is imported and compiled, and the
peak of live tensors from allocation events; of the rank that holds more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.bench.compare import BUILD_TIMEOUT, VISIT_TIMEOUT
from tests.bench.model import SIZES
from tests.bench.processes import ContenderFailed, Processes
from tests.bench.roster import ROSTER, missing

__all__ = ["main"]

CONTENDERS = (
    "ddp",
    "ddp-compiled",
    "fsdp2",
    "fsdp2-compiled",
    "ptrainx-inductor",
    "ptrainx-scan-inductor",
    "ptrainx-zero3-inductor",
    "ptrainx-zero3-scan-inductor",
)
STEPS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.memory", description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=("small", "wide", "deep"))
    parser.add_argument("--contenders", nargs="+", choices=tuple(ROSTER), default=CONTENDERS)
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 110)
    for size in options.sizes:
        table = Table(title=f"{size}: MiB", title_justify="left")
        table.add_column("contender", no_wrap=True)
        table.add_column("resident, growth", justify="right")
        table.add_column("live tensors, peak", justify="right")
        for name in options.contenders:
            table.add_row(name, *_measure(name, size))
        console.print(table)
    return 0


def _measure(name: str, size: str) -> tuple[str, str]:
    contender = ROSTER[name]
    reason = missing(contender)
    if reason is not None:
        return "not run", reason
    found = []
    try:
        with Processes() as processes:
            processes.call("ranks", BUILD_TIMEOUT, "build", name, contender.where, size, STEPS)
            found.append(max(processes.call("ranks", VISIT_TIMEOUT, "resident", name, STEPS)))
        with Processes() as processes:
            found.append(max(processes.call("ranks", BUILD_TIMEOUT, "live", name, contender.where, size, STEPS)))
    except ContenderFailed as error:
        return "failed", error.reason
    return f"{found[0]:.1f}", f"{found[1]:.1f}"


if __name__ == "__main__":
    sys.exit(main())
