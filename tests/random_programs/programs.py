"""Programs drawn at random: what is computed from what, from arguments that lie anywhere on a mesh.

A program is a list of instructions. Each has an operator of the table in `operators.py`, the numbers of the values
that it reads, and its settings. Values are float64, so that what differs by more than rounding is wrong. Only what fits
the shapes at hand is drawn; they are found by running the program on small plain tensors.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import strategies as st

from ptrainx import P
from tests.random_programs.operators import OPERATORS, Operator
from tests.random_programs.placements import specs

__all__ = ["MESHES", "Instruction", "Program", "programs"]

MESHES: list[dict[str, int]] = [
    {"data": 2},
    {"data": 4},
    {"data": 2, "model": 2},
    {"data": 3},
    {"data": 2, "model": 2, "seq": 2},
]
SIZES = (1, 2, 3, 4, 5, 6, 8)
ATTEMPTS = 8
LARGEST = 600
"""Elements of a value: an operator whose result would be larger is not drawn."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operator on values that are there: `operands` are numbers of values, `settings` its other arguments."""

    operator: Operator
    operands: tuple[int, ...]
    settings: tuple[Any, ...]

    def __str__(self) -> str:
        read = [f"v{i}" for i in self.operands]
        return f"{self.operator.name}({', '.join([*read, *map(repr, self.settings)])})"


@dataclasses.dataclass(frozen=True)
class Program:
    """What is run: a function of its arguments.

    Attributes:
        shapes: of the arguments.
        specs: where they lie on the mesh.
        mesh: sizes of its axes.
        instructions: 5 to 20 of them; value `len(shapes) + i` is the result of instruction i.
        results: numbers of the values that it returns.
    """

    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    mesh: dict[str, int]
    instructions: tuple[Instruction, ...]
    results: tuple[int, ...]

    def __call__(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(args)
        for instruction in self.instructions:
            values.append(instruction.operator.run(*(values[i] for i in instruction.operands), *instruction.settings))
        return tuple(values[i] for i in self.results)

    def args(self) -> tuple[torch.Tensor, ...]:
        """Its arguments: no two elements alike."""
        found = []
        for i, shape in enumerate(self.shapes):
            steps = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64) * 0.754877666246692 + (i + 1) * 0.5698402
            found.append((torch.frac(steps) * 2 - 1).reshape(shape))
        return tuple(found)

    def __str__(self) -> str:
        lines = [f"mesh {self.mesh}"]
        lines += [f"v{i} = argument {list(s)} at {p}" for i, (s, p) in enumerate(zip(self.shapes, self.specs))]
        lines += [f"v{len(self.shapes) + i} = {instruction}" for i, instruction in enumerate(self.instructions)]
        return "\n".join([*lines, f"return {', '.join(f'v{i}' for i in self.results)}"])

    __repr__ = __str__


@st.composite
def programs(draw: Any) -> Program:
    """A program of 5 to 20 operators with placements of its arguments."""
    mesh = draw(st.sampled_from(MESHES))
    shapes = tuple(draw(st.lists(_shapes(), min_size=1, max_size=3)))
    where = tuple(draw(specs(shape, mesh, owed=True)) for shape in shapes)
    values = [torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).reshape(shape) for shape in shapes]
    instructions: list[Instruction] = []
    for _ in range(draw(st.integers(5, 20))):
        instruction = _instruction(draw, values, mesh)
        result = instruction.operator.run(*(values[i] for i in instruction.operands), *instruction.settings)
        if result.numel() <= LARGEST:
            instructions.append(instruction)
            values.append(result)
    last = len(values) - 1
    results = sorted({last, draw(st.integers(len(shapes), last))}) if instructions else [0]
    return Program(shapes, where, mesh, tuple(instructions), tuple(results))


def _shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.sampled_from(SIZES), min_size=1, max_size=3).map(tuple).filter(lambda s: math.prod(s) <= 200)


def _instruction(draw: Any, values: list[torch.Tensor], mesh: dict[str, int]) -> Instruction:
    """An operator that fits some of the values, the latest most likely."""
    for _ in range(ATTEMPTS):
        operator = draw(st.sampled_from(OPERATORS))
        first = len(values) - 1 - draw(st.integers(0, min(2, len(values) - 1)))
        fitting = [i for i, v in enumerate(values) if operator.fits(values[first], v)]
        if operator.operands > 1 and not fitting:
            continue
        settings = operator.settings(draw, values[first], mesh)
        if settings is not None:
            others = [draw(st.sampled_from(fitting)) for _ in range(operator.operands - 1)]
            return Instruction(operator, (first, *others), settings)
    return Instruction(OPERATORS[0], (len(values) - 1,), ())
