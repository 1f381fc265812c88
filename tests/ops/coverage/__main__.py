"""`python -m tests.ops.coverage [FAMILY ...] [--mesh NAME ...] [--limit N]`: runs the table, and writes its page.

What it finds goes into `counts/`, a file for each family and mesh, and the page is made of all of them. Without
`--limit` a case has every placement of its arguments; `--page` runs nothing.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import ptrainx as px
from tests.ops.coverage.driver import Cell, run_cells
from tests.ops.coverage.page import COUNTS, FAMILIES, counts_file, write_page
from tests.ops.coverage.placements import MESHES, cells_of


def count(family: str, axes: str, limit: int | None) -> dict[str, Any]:
    """{"limit", "cases": case -> kind of outcome -> how often, "refused": [[case, reason, how often]]}."""
    mesh = px.make_mesh(MESHES[axes], simulate=True)
    cells = [Cell(case, specs) for case in FAMILIES[family] for specs in cells_of(case, axes, limit)]
    found: dict[str, Counter[str]] = {case.name: Counter() for case in FAMILIES[family]}
    reasons: Counter[tuple[str, str]] = Counter()
    for cell, outcome in zip(cells, run_cells(cells, mesh)):
        found[cell.case.name][outcome.kind] += 1
        if outcome.kind != "equal":
            reasons[cell.case.name, outcome.why] += 1
            print(family, axes, outcome.kind, cell.case.name, cell.specs, outcome.why, flush=True)
    print(family, axes, dict(sum(found.values(), Counter())), flush=True)
    return {
        "limit": limit,
        "cases": {name: dict(kinds) for name, kinds in found.items()},
        "refused": [[name, why, n] for (name, why), n in reasons.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.coverage")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--mesh", action="append", choices=list(MESHES), help="all, unless some are named")
    parser.add_argument("--limit", type=int, help="at most so many placements of a case's arguments")
    parser.add_argument("--page", action="store_true", help="write the page from what was counted before")
    options = parser.parse_args()
    COUNTS.mkdir(exist_ok=True)
    for axes in [] if options.page else options.mesh or MESHES:
        for family in options.families or FAMILIES:
            text = json.dumps(count(family, axes, options.limit), indent=1)
            counts_file(family, axes).write_text(text + "\n")
    write_page()


if __name__ == "__main__":
    main()
