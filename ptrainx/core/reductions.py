"""In which dtype gradients are summed over mesh axes, where a function asks for one (`px.Precision`).

The policy's wrapper opens a `Reduction` while its function runs. `reshard`, whose gradient pays sums in the middle of a
backward, looks for it when it is called; `grad`, which pays the others at the end, is told of all that were opened.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator

import torch

__all__ = ["Reduction", "current_reduction", "reduce_in", "reductions_asked_for", "widest"]


@dataclasses.dataclass
class Reduction:
    """How gradients are summed in a function.

    Attributes:
        dtype: of the sums on the wire.
        casts: a value in the function's compute dtype, by its id, and the value that it was cast from: a sum that is
            paid in a wide dtype need not pass through the narrow one on its way back.
    """

    dtype: torch.dtype
    casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def remember(self, cast: torch.Tensor, original: torch.Tensor) -> None:
        """Tells what a value was cast from."""
        self.casts[id(cast)] = (cast, original)

    def original(self, value: torch.Tensor) -> torch.Tensor:
        """What a value was cast from, or the value."""
        return self.casts.get(id(value), (value, value))[1]


_current: contextvars.ContextVar[Reduction | None] = contextvars.ContextVar("ptrainx_reduction", default=None)
_asked: contextvars.ContextVar[tuple[set[torch.dtype], ...]] = contextvars.ContextVar("ptrainx_asked", default=())


def current_reduction() -> Reduction | None:
    """The innermost open one."""
    return _current.get()


@contextlib.contextmanager
def reduce_in(dtype: torch.dtype) -> Iterator[Reduction]:
    """Inside, gradients are to be summed in this dtype."""
    for asked in _asked.get():
        asked.add(dtype)
    token = _current.set(Reduction(dtype))
    try:
        yield _current.get()  # type: ignore[misc]
    finally:
        _current.reset(token)


@contextlib.contextmanager
def reductions_asked_for() -> Iterator[set[torch.dtype]]:
    """A set that collects the dtypes that are asked for inside."""
    asked: set[torch.dtype] = set()
    token = _asked.set((*_asked.get(), asked))
    try:
        yield asked
    finally:
        _asked.reset(token)


def widest(dtypes: set[torch.dtype]) -> torch.dtype | None:
    """A dtype that holds all of these; None of none."""
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None
