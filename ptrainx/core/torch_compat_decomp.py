"""Private torch names about decompositions: operators written out as smaller ones, for DTensor to run so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._decomp import get_decompositions
from torch.distributed.tensor import DTensor

__all__ = ["run_as", "run_decomposed"]


def run_decomposed(operator: Any) -> None:
    """Makes DTensor run an operator as torch's decomposition of it, each part by its own rule."""
    decomposition = get_decompositions([operator])[operator]
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._custom_op_handlers[operator] = lambda _, args, kwargs: decomposition(*args, **(kwargs or {}))


def run_as(operator: Any, form: Callable[..., Any]) -> None:
    """Makes DTensor run an operator as a function of global values, whose operators go by their own rules."""
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._custom_op_handlers[operator] = lambda _, args, kwargs: form(*args, **(kwargs or {}))
