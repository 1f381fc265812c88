"""The simulator: collectives that do not match, and ranks that wait for each other, are told with every side."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.lockstep import Lockstep
from ptrainx.compile.lower import CollectiveCall
from ptrainx.core.trace_context import Origin, current_trace
from ptrainx.errors import AgreementError

REDUCE, GATHER = "_c10d_functional::all_reduce", "_c10d_functional::all_gather_into_tensor"
ALL_TO_ALL = "_c10d_functional::all_to_all_single"


def call(name: str, axis: str, *args: Any, shape: tuple = (2,), line: int = 1) -> CollectiveCall:
    return CollectiveCall(name, args, axis, Origin(f"step.py:{line}"), shape, torch.float32)


def program(*calls: CollectiveCall) -> tuple[Callable[[list], Any], list[CollectiveCall]]:
    """A rank's program: its value goes through one collective after the other."""

    def run(args: list[torch.Tensor]) -> Any:
        (value,) = args
        for i in range(len(calls)):
            value = yield i, value
        return [value]

    return run, list(calls)


def run(programs: list, shape: dict[str, int]) -> list[torch.Tensor]:
    args = [[torch.full(calls[0].shape if calls else (2,), float(r))] for r, (_, calls) in enumerate(programs)]
    return [out for (out,) in Lockstep(programs, shape).run(args)]


def test_each_group_meets_on_its_own() -> None:
    over_b, over_a = call(REDUCE, "b", "sum"), call(REDUCE, "a", "sum")
    out = run([program(over_b, over_a)] * 4, {"a": 2, "b": 2})
    assert [t.tolist() for t in out] == [[6.0, 6.0]] * 4  # 0 + 1 + 2 + 3
    out = run([program(over_b)] * 4, {"a": 2, "b": 2})
    assert [t.tolist() for t in out] == [[1.0, 1.0]] * 2 + [[5.0, 5.0]] * 2


def test_groups_may_run_different_programs() -> None:
    once, twice = program(call(REDUCE, "b", "sum")), program(call(REDUCE, "b", "sum"), call(REDUCE, "b", "max"))
    out = run([once, once, twice, twice], {"a": 2, "b": 2})
    assert [t[0].item() for t in out] == [1, 1, 5, 5]


MISMATCHES = {
    "kind": (call(REDUCE, "a", "sum", line=1), call(GATHER, "a", 2, line=2)),
    "shape": (call(REDUCE, "a", "sum", line=1), call(REDUCE, "a", "sum", shape=(3,), line=2)),
    "reduction": (call(REDUCE, "a", "sum", line=1), call(REDUCE, "a", "max", line=2)),
    "sizes": (
        call(ALL_TO_ALL, "a", [1, 1], [1, 1], line=1),
        call(ALL_TO_ALL, "a", [2, 1], [1, 2], shape=(3,), line=2),
    ),
}


@pytest.mark.parametrize("sides", MISMATCHES.values(), ids=MISMATCHES)
def test_mismatches_show_both_sides(sides: tuple) -> None:
    with pytest.raises(AgreementError, match="do not match across ranks") as caught:
        run([program(side) for side in sides], {"a": 2})
    for rank, side in enumerate(sides):
        kind = side.name.split("::")[-1]
        assert f"rank {rank}: {kind} over 'a' of float32{list(side.shape)} at step.py:{rank + 1}" in str(caught.value)


def test_ranks_that_wait_for_each_other() -> None:
    a, b = call(REDUCE, "a", "sum", line=1), call(REDUCE, "b", "sum", line=2)
    with pytest.raises(AgreementError, match="for ever") as caught:
        run([program(a, b), program(b, a), program(b, a), program(a, b)], {"a": 2, "b": 2})
    assert "rank 0 waits in all_reduce over 'a' of float32[2] at step.py:1" in str(caught.value)
    assert "rank 1 waits in all_reduce over 'b' of float32[2] at step.py:2" in str(caught.value)


def test_a_rank_that_has_finished_is_waited_for() -> None:
    with pytest.raises(AgreementError, match="for ever") as caught:
        run([program(call(REDUCE, "a", "sum")), program()], {"a": 2})
    assert "rank 0 waits in all_reduce" in str(caught.value)
    assert "rank 1 has finished" in str(caught.value)


def test_user_code_that_depends_on_the_rank() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if current_trace().rank == 0:
            x = px.reshard(x * 1, P())
        return x.sum()

    with pytest.raises(AgreementError) as caught:
        px.jit(step, mesh=px.make_mesh(data=2, simulate=True), in_specs=P("data"))(torch.ones(4))
    assert "rank 0" in str(caught.value)
    assert "rank 1" in str(caught.value)
    (note,) = caught.value.__notes__
    line = step.__code__.co_firstlineno
    source = r"\S+test_lockstep.py"
    assert re.search(
        rf"collective 0: rank 0: v\d+: f32\[4\] = all_gather.*# {source}:{line + 2} forward, asked: reshard", note
    )
    assert re.search(
        rf"rank 1: v\d+: f32\[\] = all_reduce.*# {source}:{line} forward, asked: a sum owed in the result", note
    )
    assert re.search(rf"graphs part at: rank 0: v\d+: f32\[2\] = mul.*# {source}:{line + 2}", note)
    assert re.search(rf"rank 1: v\d+: f32\[\] = sum.*# {source}:{line + 3}", note)
