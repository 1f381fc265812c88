"""Same program, any mesh: a table of programs on simulated meshes, with both backends, and on real ranks."""

from __future__ import annotations

import pytest

import ptrainx as px
from tests.compile.programs import MESHES, PROGRAMS, assert_close
from tests.support.pool import Pool

REAL = (
    "mlp gathered",
    "attention heads",
    "cross entropy",
    "training step",
    "training step, params sharded",
    "in place inside",
    "owed sums of two axes",
    "reductions",
    "shapes",
    "embedding",
    "dtypes",
    "zero size",
    "scalars",
)


def check(name: str, mesh: px.Mesh, backend: str) -> None:
    row = PROGRAMS[name]
    step = px.jit(row.fn, mesh=mesh, in_specs=row.in_specs, out_specs=row.out_specs, backend=backend)
    want = row.fn(*row.args)
    assert_close(step(*row.args), want)
    assert_close(step(*row.args), want)  # from the cache


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_graph_on_a_simulated_mesh(name: str, axes: dict[str, int]) -> None:
    check(name, px.make_mesh(axes, simulate=True), "graph")


@pytest.mark.parametrize("axes", MESHES[-1:], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_eager_on_a_simulated_mesh(name: str, axes: dict[str, int]) -> None:
    check(name, px.make_mesh(axes, simulate=True), "eager")


@pytest.mark.parametrize("backend", ["graph", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_device(name: str, backend: str) -> None:
    check(name, px.make_mesh(data=1, model=1), backend)


def run_all(axes: dict[str, int], backend: str) -> list[str]:
    mesh = px.make_mesh(axes)
    for name in REAL:
        check(name, mesh, backend)
    return list(REAL)


@pytest.mark.parametrize(
    ("axes", "backend"),
    [
        pytest.param({"data": 1, "model": 2}, "graph", marks=pytest.mark.long),
        ({"data": 2, "model": 2}, "graph"),
        ({"data": 2, "model": 1}, "eager"),
    ],
    ids=str,
)
def test_real_ranks(pool: Pool, axes: dict[str, int], backend: str) -> None:
    ranks = axes["data"] * axes["model"]
    assert pool.run(run_all, ranks, axes, backend) == [list(REAL)] * ranks
