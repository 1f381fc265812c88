"""`python -m tests.bench.compile_time`: how long a step takes to trace and compile, cold and from the cache folder.

Each figure is of a fresh process: seconds from the first call to its result, everything imported. Cold: an empty cache
folder. Warm: the same folder again. Deep is measured as a scan at 2 and at 24 layers, replicated and under ZeRO-3.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["main"]

# (what it is called, size, sharded, scanned, layers)
CASES = (
    ("small", "small", False, False, None),
    ("small, ZeRO-3", "small", True, False, None),
    ("deep scanned, 2 layers", "deep", False, True, 2),
    ("deep scanned, 24 layers", "deep", False, True, 24),
    ("deep scanned, 2 layers, ZeRO-3", "deep", True, True, 2),
    ("deep scanned, 24 layers, ZeRO-3", "deep", True, True, 24),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every case; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.compile_time", description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="cold and warm starts of each case; medians are told")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case is not None:
        print(_seconds(options.case))
        return 0
    table = Table(title=f"seconds to the first result, median of {options.repeats}", title_justify="left")
    for column in ("case", "cold", "warm"):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    medians = []
    for i, case in enumerate(CASES):
        cold, warm = zip(*(_cold_and_warm(i) for _ in range(options.repeats)))
        medians.append((statistics.median(cold), statistics.median(warm)))
        table.add_row(case[0], *(f"{median:.1f}" for median in medians[-1]))
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    for few, many in ((2, 3), (4, 5)):
        ratios = [b / a for a, b in zip(medians[few], medians[many])]
        console.print(f"{CASES[many][0]} / {CASES[few][0]}: cold {ratios[0]:.2f}, warm {ratios[1]:.2f}")
    return 0


def _cold_and_warm(case: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PTRAINX_CACHE_DIR": os.path.join(folder, "cache"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.bench.compile_time", "--case", str(case)]
        outs = [subprocess.run(command, env=environment, check=True, capture_output=True, text=True) for _ in range(2)]
        cold, warm = (float(out.stdout.split()[-1]) for out in outs)
        return cold, warm


def _seconds(case: int) -> float:
    """Seconds from the first call to its result, on a mesh of one rank."""
    import ptrainx as px
    from tests.bench.ptrainx_contenders import trainer

    _, size, sharded, scanned, layers = CASES[case]
    step, state, data = trainer(size, px.make_mesh(data=1), sharded, "inductor", scanned, layers)
    begin = time.perf_counter()
    _, loss = step(state, *data)
    float(loss)
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
