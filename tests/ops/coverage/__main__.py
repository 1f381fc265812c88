"""`python -m tests.ops.coverage [FAMILY ...] [--every]`: runs the table of operators, and writes its page.

Without `--every` a case has at most as many placements on a mesh as `LIMITS` says. The counts of families that are not
named stay as they are in `counts/`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import ptrainx as px
from tests.ops.coverage.driver import Cell, run_cells
from tests.ops.coverage.page import COUNTS, FAMILIES, LIMITS, write_page
from tests.ops.coverage.placements import MESHES, cells_of


def count(family: str, every: bool) -> dict[str, dict[str, dict[str, int]]]:
    """Case -> mesh -> kind of outcome, or reason of a refusal -> how often."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for axes in MESHES:
        mesh = px.make_mesh(MESHES[axes], simulate=True)
        limit = None if every else LIMITS[axes]
        cells = [Cell(case, specs) for case in FAMILIES[family] for specs in cells_of(case, axes, limit)]
        for cell, outcome in zip(cells, run_cells(cells, mesh)):
            counts = found.setdefault(cell.case.name, {}).setdefault(axes, {})
            counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
            if outcome.kind in ("refused", "wrong"):
                why = f"because: {outcome.why}"
                counts[why] = counts.get(why, 0) + 1
                print(family, axes, outcome.kind, cell.case.name, cell.specs, outcome.why, flush=True)
        total = Counter()
        for counts in found.values():
            total.update({k: n for k, n in counts.get(axes, {}).items() if not k.startswith("because")})
        print(family, axes, dict(total), flush=True)
    return found


if __name__ == "__main__":
    wanted = [name for name in sys.argv[1:] if name != "--every"] or list(FAMILIES)
    for family in wanted:
        COUNTS.mkdir(exist_ok=True)
        result = count(family, "--every" in sys.argv)
        (COUNTS / f"{family}.json").write_text(json.dumps(result, indent=1) + "\n")
    write_page()
