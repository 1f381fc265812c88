"""A sum that is owed, and a number or a 0-d value: one after the other in one program, in either order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ptrainx as px
from ptrainx import P
from tests.compile.programs import assert_close, values

X = values(8)


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.sum() * 1
    y += 0.1
    return y.sub_(0.25)


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a number added": lambda x: x.sum() + 0.1,
    "a value added": lambda x: x.sum() + x.sum().tanh(),
    "a number taken away": lambda x: x.sum() - 0.1,
    "from a number": lambda x: 1 - x.sum(),
    "a value taken away": lambda x: x.sum() - x.sum().tanh(),
    "times a number": lambda x: x.sum() * 3,
    "times a value": lambda x: x.sum() * x.sum().tanh(),
    "by a number": lambda x: x.sum() / 3,
    "by a value": lambda x: x.sum() / x.square().sum(),
    "in place": written,
    "the largest": lambda x: torch.add(x.amax(), 1) * torch.add(x.amax(), x.sum().tanh()),
}


@pytest.mark.parametrize("backend", ["graph", "eager"])
@pytest.mark.parametrize("turned", [False, True])
def test_each_gives_its_own(backend: str, turned: bool) -> None:
    calls = [*CALLS.values()]
    every = lambda x: [call(x) for call in (reversed(calls) if turned else calls)]  # noqa: E731
    mesh = px.make_mesh(data=2, simulate=True)  # a new mesh: nothing is known of calls on it
    assert_close(px.jit(every, mesh=mesh, in_specs=P("data"), backend=backend)(X), every(X))


def test_a_factor_keeps_the_sum_owed() -> None:
    step = px.jit(lambda x: x.sum() * 0.5 / 3, mesh=px.make_mesh(data=2, simulate=True), in_specs=P("data"))
    assert "a sum owed in the result" in str(step.comms(X))
    assert "1 collectives" in str(step.comms(X))
