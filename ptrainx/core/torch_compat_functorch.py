"""Private torch names about `torch.func` and autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import maybe_current_level
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.function import BackwardCFunction

__all__ = ["custom_functions", "in_functorch", "reads_data"]


def in_functorch() -> bool:
    """Whether `torch.vmap`, `torch.func.jvp` or another of torch's function transforms is running."""
    return maybe_current_level() is not None


def reads_data(error: BaseException) -> bool:
    """Whether fake tensors have raised this because they have no data."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def custom_functions(results: Sequence[torch.Tensor]) -> list[str]:
    """The names of the `torch.autograd.Function`s that results come from."""
    stack: list[Any] = [result.grad_fn for result in results]
    seen: set[Any] = set()
    found: dict[str, None] = {}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            found[type(node).__name__.removesuffix("Backward")] = None
        stack.extend(before for before, _ in node.next_functions)
    return list(found)
