"""Random programs give on a mesh what they give on one device; the suite runs a few of them.

`python -m tests.random_programs` runs 2,000, of which those that once failed are kept here as tests of their own.
"""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import given, settings

import ptrainx as px
from tests.random_programs.check import Tally, check, run_seed
from tests.random_programs.programs import Program, programs
from tests.support.pool import Pool

IN_THE_SUITE = 25


@pytest.mark.parametrize("seed", [100])
def test_values_and_gradients_are_those_of_one_device(seed: int) -> None:
    tally = Tally()
    run_seed(seed, IN_THE_SUITE, tally)
    assert tally.total >= IN_THE_SUITE
    assert tally.refused.total() <= 0.1 * tally.total


def drawn(seed: int, count: int) -> list[Program]:
    """Programs drawn from a seed."""
    found: list[Program] = []

    @hypothesis.seed(seed)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @given(programs())
    def draw(program: Program) -> None:
        found.append(program)

    draw()
    return found


def on_ranks(seed: int, count: int) -> list[str]:
    """Programs of a seed on the world's processes; the text of those that depart."""
    wrong = []
    for program in drawn(seed, count):
        axes = {"data": 2} if torch.distributed.get_world_size() == 2 else {"data": 2, "model": 2}
        if program.mesh != axes:
            continue
        step = px.jit(program, mesh=px.make_mesh(axes), in_specs=program.specs)
        try:
            got = px.device_get(step(*program.args()))
        except px.errors.PtrainxError:
            continue
        for a, b in zip(got, program(*program.args())):
            if not torch.allclose(a, px.device_get(b), rtol=1e-7, atol=1e-9 * max(1.0, float(b.abs().max()))):
                wrong.append(str(program))
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_processes(pool: Pool, ranks: int) -> None:
    assert pool.run(on_ranks, ranks, 200, 30) == [[]] * ranks


def test_a_program_that_departs_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: an operator that gives another value on a mesh is found."""
    (program, *_) = drawn(300, 1)
    other = [1.0]
    monkeypatch.setattr(Program, "__call__", lambda self, x, *rest: x * other.pop() if other else x * 2)
    with pytest.raises(px.testing.InvarianceError):
        check(program, Tally())
