"""Real ranks agree on a graph before it first runs: who differs, failed or never came is told on every rank."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.errors import AgreementError, InputError, SpecError
from tests.compile.programs import assert_close, values
from tests.support.pool import Pool

X = values(4, 4)


def rank() -> int:
    return int(os.environ["RANK"])


def differing(backend: str = "graph") -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if rank() == 0:
            x = px.reshard(x, P())
        return x.sum()

    px.jit(step, mesh=px.make_mesh(data=2), in_specs=P("data"), backend=backend)(X)


def raising() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if rank() == 1:
            raise KeyError("missing on rank 1")
        return x.sum()

    px.jit(step, mesh=px.make_mesh(data=2), in_specs=P("data"))(X)


def refused_on_one() -> None:
    axis = "data" if rank() == 0 else "batch"
    px.jit(lambda x: x.sum(), mesh=px.make_mesh(data=2), in_specs=P(axis))(X)


def absent() -> float:
    os.environ["PTRAINX_AGREEMENT_TIMEOUT"] = "2"
    mesh = px.make_mesh(data=2)
    started = time.monotonic()
    if rank() == 1:
        time.sleep(4)
        return 0.0
    with pytest.raises(AgreementError, match=r"(?s)rank 1 never came.*waited 2 s"):
        px.jit(lambda x: x.sum(), mesh=mesh, in_specs=P("data"))(X)
    return time.monotonic() - started


def other_functions() -> None:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    def second(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    px.jit(first if rank() == 0 else second, mesh=px.make_mesh(data=2), in_specs=P("data"))(X)


def other_inputs(backend: str, every_call: bool) -> None:
    step = px.jit(lambda t: t["x"] * t["n"], mesh=px.make_mesh(data=2), in_specs=P("data"), backend=backend)
    if every_call:
        os.environ["PTRAINX_CHECK_INPUTS"] = "1"
        for _ in range(3):
            step({"x": X, "n": 1})
    step({"x": X, "n": rank()})


def unchecked_later() -> list[float]:
    step = px.jit(lambda n: n * 2, mesh=px.make_mesh(data=2))
    step(1)
    return [float(step(rank()))]


def recovers() -> list[Any]:
    """After a refused program the next one runs."""
    mesh = px.make_mesh(data=2)
    step = px.jit(lambda x, n: x.sum() * n, mesh=mesh, in_specs=(P("data"), P()))
    for attempt in (lambda: step(X, rank()), differing, raising):
        with pytest.raises((AgreementError, InputError, KeyError)):
            attempt()
    assert_close(step(X, 3), X.sum() * 3)
    lowered = step.lower(X, 2)
    assert_close(lowered.compile()(X, 2), X.sum() * 2)
    return [float(step(X, 1))]


def a_step_that_differs_late() -> None:
    """Both ranks pay the first sum; only rank 0 gathers before the second."""

    def loss(params: dict, x: torch.Tensor) -> torch.Tensor:
        x = px.reshard((x @ params["w"]).sum(0), P())
        if rank() == 0:
            x = px.reshard(px.reshard(x * 1, P("data")) * 2, P())
        return px.reshard((x @ params["v"]).exp(), P()).sum()

    params = {"w": X, "v": X * 2}
    specs = ({"w": P(), "v": P("data")}, P("data"))
    px.jit(px.grad(loss), mesh=px.make_mesh(data=2), in_specs=specs)(params, X)


def test_the_first_difference_shows_the_lines_of_both_graphs(pool: Pool) -> None:
    """What agrees last, where the graphs part, and each side's collective: operator, line, phase, layer, reason."""
    first = a_step_that_differs_late.__code__.co_firstlineno
    told = set()
    for outcome in pool.run_outcomes(a_step_that_differs_late, 2):
        assert type(outcome.error) is AgreementError, outcome.error
        text = str(outcome.error)
        told.add(text)
        note = r"[^\n]*# \S*test_agreement.py"
        assert re.search(
            rf"collective 1: rank 0: v\d+: f32\[4\] = all_gather{note}:{first + 6} forward w, asked: reshard", text
        )
        assert re.search(rf"rank 1: v\d+: f32\[4\] = all_reduce{note}:{first + 7} forward v, ", text)
        assert re.search(rf"the last that agrees: v\d+: f32\[4\] = all_reduce{note}:{first + 4} forward w, asked", text)
        assert re.search(
            rf"the graphs part at: rank 0: v\d+: f32\[\d+\] = (mul|slice|split){note}:{first + 6} forward w", text
        )
    assert len(told) == 1


LINE = r"test_agreement.py:\d+"
CASES = {
    "graphs": (
        differing,
        (),
        AgreementError,
        rf"(?s)differ in their collectives(?=.*rank 0: [^\n]*{LINE})(?=.*rank 1: [^\n]*{LINE})",
    ),
    "functions": (other_functions, (), AgreementError, "different functions.*\n.*first.*second|second.*first"),
    "inputs": (other_inputs, ("graph", False), InputError, r"argument t\['n'\] is a plain value that differs between"),
    "inputs, eager": (other_inputs, ("eager", False), InputError, r"argument t\['n'\]"),
    "inputs, later": (other_inputs, ("graph", True), InputError, r"argument t\['n'\]"),
    "inputs, later, eager": (other_inputs, ("eager", True), InputError, r"argument t\['n'\]"),
}


@pytest.mark.parametrize(("fn", "args", "kind", "text"), CASES.values(), ids=CASES)
def test_what_differs_is_told_on_every_rank(pool: Pool, fn: Any, args: tuple, kind: type, text: str) -> None:
    for outcome in pool.run_outcomes(fn, 2, *args):
        assert type(outcome.error) is kind, outcome.error
        with pytest.raises(kind, match=text):
            raise outcome.error


@pytest.mark.parametrize(
    ("fn", "kind", "said"),
    [(raising, KeyError, "KeyError: 'missing on rank 1'"), (refused_on_one, SpecError, "names axis 'batch'")],
    ids=["while tracing", "before tracing"],
)
def test_a_rank_that_fails_is_quoted(pool: Pool, fn: Any, kind: type, said: str) -> None:
    first, second = pool.run_outcomes(fn, 2)
    assert type(second.error) is kind
    assert isinstance(first.error, AgreementError)
    assert "rank 1 failed before the run" in str(first.error)
    assert said in str(first.error)


def test_a_rank_that_never_comes_is_named_in_time(pool: Pool) -> None:
    waited, _ = pool.run(absent, 2)
    assert waited >= 2


def test_later_inputs_are_taken_as_they_are(pool: Pool) -> None:
    assert pool.run(unchecked_later, 2) == [[0.0], [2.0]]


def test_ranks_go_on_after_a_refusal(pool: Pool) -> None:
    first, second = pool.run(recovers, 2)
    assert first == second


def mixed_worlds() -> list[float]:
    """Simulated meshes inside a real job, and the real one in between."""
    real, small, large = px.make_mesh(data=2), *(px.make_mesh(data=n, simulate=True) for n in (2, 4))
    steps = [px.jit(lambda x: (x @ x).sum(0), mesh=on, in_specs=P("data")) for on in (real, small, large)]
    for _ in range(2):
        for step in steps:
            assert_close(step(X), (X @ X).sum(0))
    kept = px.device_put(X, P("data"), small)
    assert_close(steps[1](kept), (X @ X).sum(0))
    px.shutdown()
    assert_close(steps[1](kept), (X @ X).sum(0))
    with pytest.raises(px.errors.MeshError, match="world that has ended"):
        steps[0](X)
    again = px.make_mesh(data=2)
    assert_close(px.jit(lambda x: (x @ x).sum(0), mesh=again, in_specs=P("data"))(X), (X @ X).sum(0))
    ambient = px.jit(lambda x: x.sum(0))
    with again:
        assert_close(ambient(X), X.sum(0))
    return [float(px.jit(lambda x: x.sum(), mesh=again, in_specs=P("data"))(X))]


def test_worlds_real_and_simulated_side_by_side(pool: Pool) -> None:
    for total in pool.run(mixed_worlds, 2, timeout=120):
        assert total[0] == pytest.approx(float(X.sum()))


def test_simulated_meshes_of_different_size_in_turn() -> None:
    steps = {n: px.jit(lambda x: x @ x, mesh=px.make_mesh(data=n, simulate=True), in_specs=P("data")) for n in (2, 4)}
    kept = {n: step(X) for n, step in steps.items()}
    for n in (2, 4, 2):
        assert_close(steps[n](X), X @ X)
        assert_close(steps[n](kept[n]), (X @ X) @ (X @ X))
        assert_close(kept[n] + 1, X @ X + 1)
