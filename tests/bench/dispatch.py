"""What a call of a jitted step costs the host, beside the operators that it runs.

`python -m tests.bench.dispatch` prints a table: steps of 1 to 1,000 leaves that add one to each leaf, against the same
additions called one by one. The difference is what finding the compiled program, taking the leaves apart and putting
the results together cost. The goal is 50 us and 3 us a leaf.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import ptrainx as px

__all__ = ["Row", "measure"]

LEAVES = (1, 10, 100, 1000)
FIXED_US, LEAF_US = 50.0, 3.0


class Row(NamedTuple):
    """Microseconds a call: of the step, of its operators alone, what is between, and what that may be."""

    leaves: int
    donated: bool
    step: float
    operators: float
    overhead: float
    goal: float


def measure(leaves: int, donated: bool, rounds: int = 20) -> Row:
    """One row; the least of rounds in turn, in CPU time of this thread, which other processes disturb least."""
    mesh = px.make_mesh(data=1)
    state = px.device_put({f"w{i}": torch.ones(4) for i in range(leaves)}, px.P(), mesh)
    step = px.jit(lambda s: px.tree.map(lambda w: w + 1, s), mesh=mesh, donate_argnums=0 if donated else ())
    plain = [torch.ones(4) for _ in range(leaves)]
    held = [step(state)]

    def call() -> None:
        held[0] = step(held[0])

    def operators() -> None:
        with torch.no_grad():
            if donated:
                for w in plain:
                    w.add_(1)
            else:
                _ = [w + 1 for w in plain]

    repeats = max(5, 1000 // leaves)
    pairs = [(_per_call(call, repeats), _per_call(operators, repeats)) for _ in range(rounds)]
    step_us, operators_us = (min(column) for column in zip(*pairs))
    return Row(leaves, donated, step_us, operators_us, step_us - operators_us, FIXED_US + LEAF_US * leaves)


def _per_call(fn: Callable[[], Any], repeats: int) -> float:
    started = time.thread_time()
    for _ in range(repeats):
        fn()
    return (time.thread_time() - started) / repeats * 1e6


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print(f"{'leaves':>7} {'donated':>8} {'step us':>9} {'operators':>10} {'overhead':>9} {'goal':>7}")
    for leaves in LEAVES:
        for donated in (False, True):
            row = measure(leaves, donated)
            print(
                f"{row.leaves:>7} {'yes' if row.donated else 'no':>8} {row.step:>9.1f} {row.operators:>10.1f} "
                f"{row.overhead:>9.1f} {row.goal:>7.0f}"
            )


if __name__ == "__main__":
    main()
