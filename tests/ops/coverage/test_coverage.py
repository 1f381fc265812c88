"""A sample of the table of operators: every twelfth case on each run; `python -m tests.ops.coverage` runs all of it."""

from __future__ import annotations

import json

import pytest

import ptrainx as px
from tests.ops.coverage.driver import Cell, Outcome, run_cells
from tests.ops.coverage.page import FAMILIES, PAGE, counts_file, page_text
from tests.ops.coverage.placements import MESHES, cells_of
from tests.support.pool import Pool


def sample(mesh: str, every: int, first: int) -> list[Cell]:
    """One placement of every so-manieth case of all families: another one for each case, the same in every run."""
    cells = []
    for family in FAMILIES.values():
        for i, case in list(enumerate(family))[first::every]:
            specs = cells_of(case, mesh, limit=12)
            cells.append(Cell(case, specs[(5 * i + 1) % len(specs)]))
    return [cell for cell in cells if not cell.case.refused]


def problems(cells: list[Cell], outcomes: list[Outcome]) -> list[str]:
    """The cells that are wrong."""
    return [f"{c.case.name} {c.specs}: {o.why}" for c, o in zip(cells, outcomes) if o.kind == "wrong"]


def test_a_sample_is_equal_or_refused() -> None:
    cells = sample("2", every=12, first=0)
    outcomes = run_cells(cells, px.make_mesh(MESHES["2"], simulate=True))
    assert problems(cells, outcomes) == []
    assert sum(outcome.kind == "refused" for outcome in outcomes) <= 0.05 * len(cells)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["graph", "eager"])
def test_the_backends_agree_on_two_axes(backend: str) -> None:
    cells = sample("2x2", every=36, first=1)
    assert problems(cells, run_cells(cells, px.make_mesh(MESHES["2x2"], simulate=True), backend)) == []


def test_what_a_step_can_not_have_is_refused_by_name() -> None:
    mesh = px.make_mesh(MESHES["2"], simulate=True)
    cells = [Cell(case, cells_of(case, "2", 2)[-1]) for cases in FAMILIES.values() for case in cases if case.refused]
    outcomes = run_cells(cells, mesh)
    assert [outcome.kind for outcome in outcomes] == ["refused"] * len(cells)


def run_in_processes() -> list[str]:
    """A part of each family on real ranks."""
    cells = [c for c in sample("2", every=20, first=2) if not any(spec.unreduced for spec in c.specs)]
    return problems(cells, run_cells(cells, px.make_mesh(data=2), "graph"))


def test_every_family_in_real_processes(pool: Pool) -> None:
    assert pool.run(run_in_processes, 2) == [[], []]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_counts_every_case_and_none_is_wrong(family: str) -> None:
    for axes in MESHES:
        file = counts_file(family, axes)
        if file.exists():
            cases = json.loads(file.read_text())["cases"]
            assert list(cases) == [case.name for case in FAMILIES[family]], "python -m tests.ops.coverage --new"
            assert [name for name, kinds in cases.items() if "wrong" in kinds or not kinds] == []
    assert PAGE.read_text() == page_text(), "python -m tests.ops.coverage --page"
