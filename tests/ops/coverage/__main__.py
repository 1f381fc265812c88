"""`python -m tests.ops.coverage [FAMILY ...] [--mesh NAME ...] [--limit N | --new]`: the table, and its page.

What it finds goes into `counts/`, a file for each family and mesh, and the page is made of all of them. Without
`--limit` a case has every placement of its arguments. `--new` runs cases that have not been counted yet, as many
placements of them as of the others; `--page` runs nothing.
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

Counts = dict[str, Any]
"""{"limit", "cases": case -> kind of outcome -> how often, "refused": [[case, reason, how often]]}."""


def count(family: str, axes: str, limit: int | None, known: Counts) -> Counts:
    """Runs the cases of a family that are not among those `known`, and gives the counts of all."""
    mesh = px.make_mesh(MESHES[axes], simulate=True)
    fresh = [case for case in FAMILIES[family] if case.name not in known["cases"]]
    cells = [Cell(case, specs) for case in fresh for specs in cells_of(case, axes, limit)]
    found = {case.name: Counter(known["cases"].get(case.name, {})) for case in FAMILIES[family]}
    reasons = Counter({(name, why): n for name, why, n in known["refused"] if name in found})
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
    parser.add_argument("--new", action="store_true", help="only cases that have not been counted")
    parser.add_argument("--page", action="store_true", help="write the page from what was counted before")
    options = parser.parse_args()
    COUNTS.mkdir(exist_ok=True)
    for axes in [] if options.page else options.mesh or MESHES:
        for family in options.families or FAMILIES:
            file, known = counts_file(family, axes), {"limit": options.limit, "cases": {}, "refused": []}
            if options.new:
                known = json.loads(file.read_text())
            file.write_text(json.dumps(count(family, axes, known["limit"], known), indent=1) + "\n")
    write_page()


if __name__ == "__main__":
    main()
