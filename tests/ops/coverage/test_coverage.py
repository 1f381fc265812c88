"""The table of operators, a sample of it: every case once a run of the suite; every family in real processes."""

from __future__ import annotations

import pytest

import ptrainx as px
from tests.ops.coverage.driver import Cell, Outcome, run_cells
from tests.ops.coverage.page import FAMILIES
from tests.ops.coverage.placements import MESHES, cells_of
from tests.support.pool import Pool


def sample(family: str, mesh: str, count: int) -> list[Cell]:
    """Some placements of every case of a family: others for each case, the same in every run."""
    cells = []
    for i, case in enumerate(FAMILIES[family]):
        every = cells_of(case, mesh, limit=12)
        cells += [Cell(case, every[(5 * i + 7 * k + 1) % len(every)]) for k in range(count)]
    return [cell for cell in cells if not cell.case.refused]


def problems(cells: list[Cell], outcomes: list[Outcome]) -> list[str]:
    """The cells that are wrong."""
    return [f"{c.case.name} {c.specs}: {o.why}" for c, o in zip(cells, outcomes) if o.kind == "wrong"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_of_every_case_is_equal_or_refused(family: str) -> None:
    cells = sample(family, "2", 1)
    outcomes = run_cells(cells, px.make_mesh(MESHES["2"], simulate=True))
    assert problems(cells, outcomes) == []
    refused = [outcome for outcome in outcomes if outcome.kind == "refused"]
    assert len(refused) <= 0.05 * len(cells)


@pytest.mark.parametrize("backend", ["graph", "eager"])
def test_the_backends_agree_on_two_axes(backend: str) -> None:
    cells = [cell for family in FAMILIES for cell in sample(family, "2x2", 1)[::12]]
    outcomes = run_cells(cells, px.make_mesh(MESHES["2x2"], simulate=True), backend)
    assert problems(cells, outcomes) == []


def test_what_a_step_can_not_have_is_refused_by_name() -> None:
    mesh = px.make_mesh(MESHES["2"], simulate=True)
    cells = [Cell(case, cells_of(case, "2", 2)[-1]) for cases in FAMILIES.values() for case in cases if case.refused]
    outcomes = run_cells(cells, mesh)
    assert [outcome.kind for outcome in outcomes] == ["refused"] * len(cells)


def run_in_processes(every: int) -> list[str]:
    """A part of each family on real ranks."""
    mesh = px.make_mesh(data=2)
    found: list[str] = []
    for family in FAMILIES:
        cells = [c for c in sample(family, "2", 1)[::every] if not any(spec.unreduced for spec in c.specs)]
        found += problems(cells, run_cells(cells, mesh, "graph"))
    return found


def test_every_family_in_real_processes(pool: Pool) -> None:
    assert pool.run(run_in_processes, 2, 6) == [[], []]
