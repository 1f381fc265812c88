"""The page of the table of operators, written from the counts of the last run."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from tests.ops.coverage import indexing, layers, matmul, pointwise, reductions, views
from tests.ops.coverage.placements import MESHES

__all__ = ["COUNTS", "FAMILIES", "LIMITS", "PAGE", "page_text", "write_page"]

FAMILIES = {
    "pointwise": pointwise.CASES,
    "reductions": reductions.CASES,
    "matmul": matmul.CASES,
    "views": views.CASES,
    "indexing": indexing.CASES,
    "layers": layers.CASES,
}
COUNTS = Path(__file__).parent / "counts"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "ops.md"
LIMITS = {"2": 8, "4": 3, "2x2": 4, "3": 4}
"""How many placements of a case a run takes on each mesh, unless all are asked for."""

INTRODUCTION = """# Operators

Which operators give on sharded values what they give on one device: written by `python -m tests.ops.coverage`.

A case is a function of tensors, run with its gradient, in float64 as a rule, at placements of its arguments:
replicated, split along any dim, owed as a sum whose addends are not zero. A cell is a case at one placement of each
argument, on a simulated mesh of 2, 4 or 2x2 devices, compared with one device on every rank; {limits}. On a mesh of 3,
which divides few dims, a placement that would split one unevenly is refused (*uneven*). No cell gives another value and
says nothing. A sample of the cells runs in real processes too.

"""


def write_page() -> None:
    """Writes the page."""
    PAGE.write_text(page_text())


def page_text() -> str:
    """The page's text, from the counts."""
    results = {family: json.loads((COUNTS / f"{family}.json").read_text()) for family in FAMILIES}
    lines = ["| family | cases | cells | equal | refused | uneven | wrong |", "|---|---|---|---|---|---|---|"]
    everything: Counter[str] = Counter()
    for family, cases in results.items():
        total = _total(*(counts for meshes in cases.values() for counts in meshes.values()))
        lines.append(f"| {family} | {len(cases)} | {_row(total)} |")
        everything.update({"cases": len(cases), **total})
    lines.append(f"| all | {everything.pop('cases')} | {_row(everything)} |")
    most = ", ".join(f"{n} on {axes}" for axes, n in LIMITS.items())
    text = INTRODUCTION.format(limits=f"this run took at most so many of a case: {most}") + "\n".join(lines) + "\n"
    for family, cases in results.items():
        text += f"\n## {family.capitalize()}\n\n| case | {' | '.join(MESHES)} |\n|---|{'---|' * len(MESHES)}\n"
        for name, meshes in cases.items():
            text += f"| {name} | {' | '.join(_short(meshes.get(axes, {})) for axes in MESHES)} |\n"
        reasons = Counter()
        for name, meshes in cases.items():
            for counts in meshes.values():
                for why, n in counts.items():
                    if why.startswith("because: "):
                        reasons[name, re.sub(r"^together ", "a step that ", _plain(why))] += n
        if reasons:
            text += "\nRefused:\n\n" + "".join(f"- {name} ({n}): {why}\n" for (name, why), n in reasons.items())
    return text


def _plain(why: str) -> str:
    return why.removeprefix("because: ").replace("together ", "the step ").replace("|", "\\|")


def _total(*counts: dict[str, int]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update({kind: n for kind, n in one.items() if not kind.startswith("because: ")})
    return total


def _row(total: Counter[str]) -> str:
    return " | ".join(map(str, (sum(total.values()), *(total[k] for k in ("equal", "refused", "uneven", "wrong")))))


def _short(counts: dict[str, int]) -> str:
    total = _total(counts)
    return ", ".join(f"{total[kind]} {kind}" for kind in ("equal", "refused", "uneven", "wrong") if total[kind])
