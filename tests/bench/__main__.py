"""`python -m tests.bench`: a training step of ptrainx beside PyTorch's own ways and JAX, in turn on two cores.

Prints a table a size and writes everything as JSON. Exits with 1 if a contender's losses are wrong.

Tests never call this for its times: they depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.bench.compare import MISMATCH, Comparison, compare
from tests.bench.model import SIZES
from tests.bench.processes import Processes
from tests.bench.report import goals, table, to_json
from tests.bench.roster import DEFAULT, ROSTER

__all__ = ["main"]

SIZES_BY_DEFAULT = ("tiny", "small", "deep")
STEPS = {"tiny": 10, "small": 2, "wide": 3, "deep": 2}
WIDTH = 110  # of tables that go into a file
ROUNDS = {"tiny": 12, "small": 8, "wide": 12, "deep": 8}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the command line asks for; returns the exit status."""
    options = _options(argv)
    steps = {size: options.steps or STEPS[size] for size in options.sizes}
    rounds = {size: options.rounds or ROUNDS[size] for size in options.sizes}
    comparisons: list[Comparison] = []
    progress, console = Console(stderr=True), Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    path = options.json or Path("runs") / "bench" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with Processes() as processes:
        for size in options.sizes:
            with progress.status(size) as status:
                tell = status.update if progress.is_terminal else progress.print
                found = compare(
                    processes, size, options.contenders, steps=steps[size], rounds=rounds[size], report=tell
                )
            comparisons.append(found)
            console.print(table(found))
            path.write_text(json.dumps(to_json(comparisons, steps=steps, rounds=rounds), indent=1) + "\n")
    for goal in goals(comparisons):
        verdict = "[green]met[/green]" if goal["met"] else "[red]not met[/red]"
        at_most = f"at most {goal['at_most']} x {goal['base']}"
        console.print(f"{goal['size']}: {goal['contender']} {at_most}: {goal['median']:.2f}, {verdict}")
    console.print(f"written to {path}")
    wrong = [f"{c.size}: {row.name}" for c in comparisons for row in c.rows if row.status == MISMATCH]
    for name in wrong:
        console.print(f"[red]{name}: losses differ from those of one device[/red]")
    return 1 if wrong else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=_names(SIZES), default=SIZES_BY_DEFAULT, help=f"of {', '.join(SIZES)}")
    parser.add_argument("--contenders", type=_names(ROSTER), default=DEFAULT, help=f"of {', '.join(ROSTER)}")
    parser.add_argument("--steps", type=_positive, help="timed steps at each visit to a contender")
    parser.add_argument("--rounds", type=_positive, help="visits to each contender")
    parser.add_argument("--json", type=Path, help="file to write; default runs/bench/<time>.json")
    return parser.parse_args(argv)


def _names(known: dict):
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown) or repr(text)}; known: {', '.join(known)}")
        return names

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
