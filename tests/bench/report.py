"""A comparison as a table, and as JSON."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.bench.compare import MISMATCH, Comparison, Ratio, Row
from tests.bench.model import SIZES, STEPS_TO_LOSS
from tests.bench.processes import cores
from tests.bench.roster import ROSTER

__all__ = ["GOALS", "goals", "table", "to_json"]

# size -> at most so many times as long: replicated and sharded against DDP at its best, sharded against FSDP2 at its
# best, each against JAX in the same mode. Names are groups of `roster.GROUPS`.
_BOUNDS = {
    "tiny": (0.97, 1.00, 0.70, 1.00),
    "small": (0.75, 0.80, 0.60, 0.65),
    "wide": (0.85, 0.95, 0.55, 0.75),
    "deep": (0.80, 0.85, 0.50, 0.70),
}
GOALS = tuple(
    goal
    for size, (replicated, sharded, fsdp, jax) in _BOUNDS.items()
    for goal in (
        (size, "replicated", "best DDP", replicated),
        (size, "sharded", "best DDP", sharded),
        (size, "sharded", "best FSDP2", fsdp),
        (size, "replicated", "JAX replicated", jax),
        (size, "sharded", "JAX sharded", jax),
    )
)
BASES = ("best DDP", "best FSDP2")


def table(comparison: Comparison) -> Table:
    """One size as a table: losses, milliseconds a step, and ratios with their quartiles; below, what did not run."""
    size = SIZES[comparison.size]
    title = f"{comparison.size} ({size.L} layers of {size.D}, batch {size.B} x {size.T}): {size.stresses}"
    absent = [f"{row.name}: {row.status}" for row in comparison.rows if row.status != "ok"]
    grid = Table(title=title, caption="\n".join(absent), title_justify="left", caption_justify="left")
    grid.add_column("contender", no_wrap=True)
    grid.add_column(f"loss 1, {STEPS_TO_LOSS}", no_wrap=True)
    grid.add_column("start s", justify="right", no_wrap=True)
    grid.add_column("ms/step", justify="right", no_wrap=True)
    grid.add_column("cpu ms", justify="right", no_wrap=True)
    for base in BASES:
        grid.add_column(f"x {base}", justify="right", no_wrap=True)
    for row in comparison.rows:
        grid.add_row(row.name, *_cells(comparison, row))
    return grid


def _cells(comparison: Comparison, row: Row) -> list[str]:
    shown = (row.losses or ())[: 2 if ROSTER[row.name].same_losses else 1]
    losses = " ".join(f"{loss:.5f}" for loss in shown) or "-"
    if row.status != "ok":
        return [losses, "-", "[red]MISMATCH[/red]" if row.status == MISMATCH else "not run", "-", "-", "-"]
    ratios = [_ratio(comparison.ratio(row.name, base)) for base in BASES]
    return [losses, f"{row.start_s:.1f}", f"{row.ms:.2f}", f"{row.cpu_ms:.2f}", *ratios]


def _ratio(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def goals(comparisons: list[Comparison]) -> list[dict[str, Any]]:
    """The goals that these comparisons bear on: ratio, bound, and whether it is met."""
    found = []
    for size, name, base, bound in GOALS:
        for comparison in comparisons:
            ratio = comparison.ratio(name, base) if comparison.size == size else None
            if ratio is not None:
                found.append(
                    {
                        "size": size,
                        "contender": name,
                        "base": base,
                        "ran": [comparison.best(name), comparison.best(base)],
                        "at_most": bound,
                        **ratio._asdict(),
                    }
                    | {"met": ratio.median <= bound}
                )
    return found


def to_json(comparisons: list[Comparison], *, steps: dict[str, int], rounds: dict[str, int]) -> dict[str, Any]:
    """All that was found, with the machine and the versions that it was found on."""
    return {
        "machine": {
            "cpu": _cpu(),
            "cores": list(cores()),
            "load": list(os.getloadavg()),
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "jax", "numpy")},
        },
        "sizes": {c.size: _size_json(c, steps[c.size], rounds[c.size]) for c in comparisons},
        "goals": goals(comparisons),
    }


def _size_json(comparison: Comparison, steps: int, rounds: int) -> dict[str, Any]:
    return {
        "model": {k: v for k, v in SIZES[comparison.size]._asdict().items() if k != "stresses"},
        "steps": steps,
        "rounds": rounds,
        "reference_losses": list(comparison.reference),
        "contenders": [_row_json(comparison, row) for row in comparison.rows],
    }


def _row_json(comparison: Comparison, row: Row) -> dict[str, Any]:
    ratios = {f"x_{base}": comparison.ratio(row.name, base) for base in BASES}
    return {
        "name": row.name,
        "about": ROSTER[row.name].about,
        "status": row.status,
        "losses": None if row.losses is None else list(row.losses),
        "start_s": row.start_s,
        "step_ms": row.ms,
        "cpu_ms": row.cpu_ms,
        "rounds_ms": [seconds * 1e3 for seconds in row.rounds],
        **{name: None if ratio is None else ratio._asdict() for name, ratio in ratios.items()},
    }


def _version(name: str) -> str | None:
    return importlib.metadata.version(name) if importlib.util.find_spec(name) else None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
