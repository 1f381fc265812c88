"""The page of the table of operators, written from what the last runs have counted."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tests.ops.coverage import indexing, layers, matmul, pointwise, reductions, views
from tests.ops.coverage.placements import MESHES

__all__ = ["COUNTS", "FAMILIES", "PAGE", "counts_file", "page_text", "write_page"]

FAMILIES = {
    "pointwise": pointwise.CASES,
    "reductions": reductions.CASES,
    "matmul": matmul.CASES,
    "views": views.CASES,
    "indexing": indexing.CASES,
    "layers": layers.CASES,
}
COUNTS = Path(__file__).parent / "counts"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "operators.md"
KINDS = ("equal", "refused", "wrong")

INTRODUCTION = """# Operators

Which operators give on sharded values what they give on one device.

A *case* is a function of tensors, run together with its gradient, in float64 as a rule. A *cell* is a case at one
placement of each argument: over each axis of the mesh an argument is replicated, split along any of its dims, or owed
as a sum whose addends are not zero. Every cell is compared with one device, on every rank of a simulated mesh, and is
*equal*, or *refused* by a typed error that says what to do. No cell gives another value and says nothing. On 3 devices
dims of 8 and of 4 are cut unevenly, into 3, 3, 2 and 2, 2, 0. The tests run a part of the cells in real processes, and
on the other backends.

`python -m tests.ops.coverage` runs the table, and writes this page; with `--new` it runs what has been added to it.

"""


def counts_file(family: str, axes: str) -> Path:
    """Where the counts of a family on a mesh are kept."""
    return COUNTS / f"{family}-{axes}.json"


def write_page() -> None:
    """Writes the page."""
    PAGE.write_text(page_text())


def page_text() -> str:
    """The page's text, from the counts."""
    runs = {
        (family, axes): json.loads(counts_file(family, axes).read_text())
        for family in FAMILIES
        for axes in MESHES
        if counts_file(family, axes).exists()
    }
    return (
        INTRODUCTION
        + "## Counts\n\n"
        + _summary(runs)
        + "\n## Placements that were run\n\nAt most so many a case; they are chosen so that each argument's "
        "placements vary.\n\n" + _limits(runs) + "".join(_family(family, runs) for family in FAMILIES)
    )


def _summary(runs: dict[tuple[str, str], Any]) -> str:
    lines = ["| family | cases | cells | equal | refused | % refused | wrong |", "|---|---|---|---|---|---|---|"]
    everything: Counter[str] = Counter()
    for family, cases in FAMILIES.items():
        total = _total(runs, family)
        lines.append(f"| {family} | {len(cases)} | {_row(total)} |")
        everything += total
    lines.append(f"| all | {sum(map(len, FAMILIES.values()))} | {_row(everything)} |")
    return "\n".join(lines) + "\n"


def _limits(runs: dict[tuple[str, str], Any]) -> str:
    lines = [f"| family | {' | '.join(MESHES)} |", f"|---|{'---|' * len(MESHES)}"]
    for family in FAMILIES:
        limits = [runs[family, axes]["limit"] or "all" if (family, axes) in runs else "not run" for axes in MESHES]
        lines.append(f"| {family} | {' | '.join(map(str, limits))} |")
    return "\n".join(lines) + "\n"


def _family(family: str, runs: dict[tuple[str, str], Any]) -> str:
    lines = [f"\n## {family.capitalize()}\n", f"| case | {' | '.join(MESHES)} |", f"|---|{'---|' * len(MESHES)}"]
    for case in FAMILIES[family]:
        found = [runs.get((family, axes), {"cases": {}})["cases"].get(case.name, {}) for axes in MESHES]
        lines.append(f"| {_cell(case.name)} | {' | '.join(map(_short, found))} |")
    reasons: Counter[tuple[str, str]] = Counter()
    for axes in MESHES:
        for name, why, n in runs.get((family, axes), {"refused": []})["refused"]:
            reasons[name, _plain(why)] += n
    if reasons:
        lines += ["\nRefused:\n", *(f"- {name} ({n}): {why}" for (name, why), n in reasons.items())]
    return "\n".join(lines) + "\n"


def _plain(why: str) -> str:
    return re.sub(r"\btogether\b", "the step", why)


def _cell(name: str) -> str:
    return name.replace("|", "\\|")


def _total(runs: dict[tuple[str, str], Any], family: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for axes in MESHES:
        for counts in runs.get((family, axes), {"cases": {}})["cases"].values():
            total.update(counts)
    return total


def _row(total: Counter[str]) -> str:
    cells = sum(total.values())
    share = f"{100 * total['refused'] / max(cells, 1):.1f}"
    return " | ".join(map(str, (cells, total["equal"], total["refused"], share, total["wrong"])))


def _short(counts: dict[str, int]) -> str:
    if set(counts) == {"equal"}:
        return str(counts["equal"])
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts.get(kind))
