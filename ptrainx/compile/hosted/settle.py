"""What else a program's bits hang on: where its operands begin in memory, and how many threads compute.

Kernels may take another path for an operand that does not begin at a multiple of a cache line, and sum in parts, one
for each thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

__all__ = ["one_thread", "settled", "settled_generator"]

LINE = 64
"""Bytes; what torch allocates on the CPU begins at a multiple of it."""

Locals = list[torch.Tensor]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, an operator runs on one thread."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def settled(step: Callable[[Locals], Locals]) -> Callable[[Locals], Locals]:
    """A rank's function, whose bits no longer depend on either."""

    def run(args: Locals) -> Locals:
        args[:] = [_aligned(arg) for arg in args]
        with one_thread():
            return step(args)

    return run


def settled_generator(step: Callable[[Locals], Any]) -> Callable[[Locals], Generator[Any, Any, Locals]]:
    """The same for a function in lockstep form, which has to be run inside `one_thread`."""

    def run(args: Locals) -> Generator[Any, Any, Locals]:
        args[:] = [_aligned(arg) for arg in args]
        return (yield from step(args))

    return run


def _aligned(value: torch.Tensor) -> torch.Tensor:
    return value if value.data_ptr() % LINE == 0 else value.clone(memory_format=torch.contiguous_format)
