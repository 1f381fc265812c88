"""Random programs give on a mesh what they give on one device; the suite runs a few of them.

`python -m tests.random_programs` runs 2,000. What they found is a test of its own where it was mended.
"""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from torch.distributed.tensor import DTensor

import ptrainx as px
from tests.random_programs.check import Tally, check, run_seed
from tests.random_programs.programs import Program, programs
from tests.support.pool import Pool

IN_THE_SUITE = 10


@pytest.mark.parametrize("seed", [100])
def test_values_and_gradients_are_those_of_one_device(seed: int) -> None:
    tally = Tally()
    run_seed(seed, IN_THE_SUITE, tally)
    assert tally.total >= IN_THE_SUITE
    assert tally.refused.total() <= 0.1 * tally.total


@pytest.mark.parametrize("factor", [0.25, -0.25])
def test_a_norm_times_a_number_and_times_a_tensor(factor: float) -> None:
    """Found at seed 1: after the number, torch's cache took the tensor for one, too."""
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(2, 8)

    def scaled(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm = (x + 2).norm()
        return norm * factor, norm * s

    args = x, torch.tensor(0.3, dtype=torch.float64)
    px.testing.assert_mesh_invariant(scaled, args, [{"data": 4}], (px.P(None, "data"), px.P()), rtol=1e-7)


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


def on_ranks(seed: int, count: int, axes: dict[str, int], expected: list[tuple[torch.Tensor, ...]]) -> list[str]:
    """Programs of a seed on the world's processes; the text of those that depart."""
    mesh, wrong = px.make_mesh(axes), []
    for program, want in zip((p for p in drawn(seed, count) if p.mesh == axes), expected):
        try:
            got = px.device_get(px.jit(program, mesh=mesh, in_specs=program.specs)(*program.args()))
        except px.errors.PtrainxError:
            continue
        for a, b in zip(got, want):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-7, atol=1e-9 * (1 + float(b.abs().max()))):
                wrong.append(str(program))
    return wrong


@pytest.mark.long
def test_real_processes(pool: Pool) -> None:
    axes = {"data": 2}
    expected = [program(*program.args()) for program in drawn(200, 30) if program.mesh == axes]
    assert len(expected) >= 3
    assert pool.run(on_ranks, 2, 200, 30, axes, expected) == [[], []]


def test_a_program_that_departs_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a function that gives another value on a mesh is found."""
    (program, *_) = drawn(300, 1)
    monkeypatch.setattr(Program, "__call__", lambda self, x, *rest: x * (3 if isinstance(x, DTensor) else 2))
    with pytest.raises(px.testing.InvarianceError):
        check(program, Tally())
