"""A case of the table of operators: a function of tensors, its arguments, and how they may be placed.

Arguments are plain values that are the same everywhere, in float64 unless the case is about another dtype, so that what
differs by more than rounding is wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Case", "ints", "mask", "positive", "values"]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One operator in one form.

    Attributes:
        name: the operator, and the form where it has several.
        fn: a function of the arguments; gives a tensor or a tree of them.
        args: its arguments. Floating-point ones are differentiated, as far as the results depend on them.
        whole: indices of arguments that stay replicated, to keep the number of cells down where nothing is learnt.
        tolerance: of the comparison, relative to the largest element.
        refused: why every cell may be refused: an operator that no step can have.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    whole: tuple[int, ...] = ()
    tolerance: float = 1e-9
    refused: str = ""


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values between -1 and 1 that look random, no two alike."""
    n = math.prod(shape)
    steps = torch.arange(1, n + 1, dtype=torch.float64) * 0.754877666246692 + (seed + 1) * 0.569840290998
    return (torch.frac(steps) * 2 - 1).reshape(shape).to(dtype)


def positive(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values between 0.25 and 1.75."""
    return (values(*shape, seed=seed) * 0.75 + 1).to(dtype)


def ints(*shape: int, below: int = 8, seed: int = 0) -> torch.Tensor:
    """Integers from 0 to `below`, exclusive."""
    return ((values(*shape, seed=seed) + 1) / 2 * below).floor().clamp(0, below - 1).long()


def mask(*shape: int, seed: int = 0) -> torch.Tensor:
    """Booleans, some of each."""
    return values(*shape, seed=seed) > -0.2
