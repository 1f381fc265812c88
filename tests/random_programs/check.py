"""Runs random programs on one device and on a mesh; counts those that are equal and those that are refused."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

import ptrainx as px
from tests.random_programs.programs import Program, programs

__all__ = ["Tally", "check", "run_seed"]


@dataclasses.dataclass
class Tally:
    """What programs came to.

    Attributes:
        equal: how many gave, values and gradients, what one device gives.
        refused: how often each refusal was given.
        examples: for each refusal, the first program that met it.
        operators: how often each operator was part of a program.
    """

    equal: int = 0
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    operators: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def total(self) -> int:
        return self.equal + self.refused.total()


def check(program: Program, tally: Tally) -> None:
    """Compares a program on its mesh with one device.

    Raises:
        AssertionError: another value or gradient, or a refusal that does not say what to do.
    """
    tally.operators.update({instruction.operator.name for instruction in program.instructions})
    try:
        px.testing.assert_mesh_invariant(
            program, program.args(), [program.mesh], program.specs, rtol=1e-7, atol=1e-9, gradients=True
        )
    except px.errors.PtrainxError as error:
        if not error.fix:
            raise AssertionError(f"a refusal that does not say what to do: {error}") from error
        reason = f"{type(error).__name__}: {error.problem}"
        tally.refused[reason] += 1
        tally.examples.setdefault(reason, f"{program}\n{error}")
    else:
        tally.equal += 1


def run_seed(seed: int, count: int, tally: Tally, shrink: bool = False) -> None:
    """Draws `count` programs from a seed and checks them.

    Args:
        seed: of the draws.
        count: programs.
        tally: is added to.
        shrink: whether a program that departs is made as small as it gets, which takes minutes.

    Raises:
        AssertionError: a program that departs; its text is in the message's notes.
    """
    started = time.monotonic()
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(programs())
    def run(program: Any) -> None:
        try:
            check(program, tally)
        except Exception as error:
            error.add_note(str(program))
            raise

    run()
    print(f"seed {seed}: {tally.total} programs, {tally.equal} equal, {time.monotonic() - started:.0f} s", flush=True)
