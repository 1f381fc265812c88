"""The pool of worker processes that other tests stand on: its results, its errors, its clean-up."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from ptrainx.core.errors import SpecError
from tests.support.pool import Outcome, Pool, WorkerDied, WorkerHung, WorkerTraceback


class Local(Exception):
    """An exception of this module; pickles by the module's name."""


class Awkward(Exception):
    """An exception that does not survive pickling."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


def environment() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names}


def sum_of_ranks(scale: float) -> torch.Tensor:
    dist.init_process_group("gloo")
    total = torch.tensor([scale * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total


def raise_on(rank: int, kind: str) -> int:
    if int(os.environ["RANK"]) == rank:
        raise {
            "spec": SpecError("no axis 'x'", got="P('x')", fix="name an axis"),
            "local": Local("mine"),
            "awkward": Awkward(1, 2),
            "exit": SystemExit(3),
        }[kind]
    return int(os.environ["RANK"])


def fail_before_collective(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        raise Local("the cause")
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int) -> int:
    if int(os.environ["RANK"]) == rank:
        time.sleep(1000)
    return os.getpid()


def die_on(rank: int) -> int:
    if int(os.environ["RANK"]) == rank:
        os._exit(7)
    return os.getpid()


def speak() -> None:
    print("said by", os.environ["RANK"])


def dirty() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def look() -> bool:
    return "LEFT_BEHIND" in os.environ or "RANK" not in os.environ or dist.is_initialized()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_rank_sees_the_launchers_variables(pool: Pool, world: int) -> None:
    seen = pool.run(environment, world)
    assert [int(env["RANK"]) for env in seen] == [int(env["LOCAL_RANK"]) for env in seen] == list(range(world))
    assert {env["WORLD_SIZE"] for env in seen} == {env["LOCAL_WORLD_SIZE"] for env in seen} == {str(world)}
    assert {(env["MASTER_ADDR"], env["OMP_NUM_THREADS"]) for env in seen} == {("127.0.0.1", "1")}


def test_worlds_begin_and_end_one_after_another(pool: Pool) -> None:
    for world, scale in ((2, 1.0), (4, 2.0), (2, 3.0)):
        expected = scale * world * (world + 1) / 2
        assert [total.item() for total in pool.run(sum_of_ranks, world, scale)] == [expected] * world
    pool.run(dirty, 2)
    assert pool.run(look, 2) == [False, False]


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [("spec", SpecError, "no axis 'x'"), ("local", Local, "mine"), ("exit", SystemExit, "3")],
)
def test_an_exception_keeps_its_type(pool: Pool, kind: str, expected: type[BaseException], text: str) -> None:
    with pytest.raises(expected, match=text) as caught:
        pool.run(raise_on, 2, 1, kind)
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert "in raise_on" in str(caught.value.__cause__)
    assert "rank 1" in str(caught.value.__cause__)


def test_an_exception_that_cannot_travel_is_told_as_text(pool: Pool) -> None:
    with pytest.raises(Exception, match="Awkward: 1 and 2"):
        pool.run(raise_on, 2, 0, "awkward")


def test_the_cause_is_raised_and_not_its_echo_on_a_lower_rank(pool: Pool) -> None:
    with pytest.raises(Local, match="the cause"):
        pool.run(fail_before_collective, 2, 1)


def test_outcomes_are_told_rank_by_rank(pool: Pool) -> None:
    first, second = pool.run_outcomes(raise_on, 2, 1, "local")
    assert first == Outcome(result=0)
    assert isinstance(second.error, Local)


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [(hang_on, WorkerHung, "rank 1 had not finished"), (die_on, WorkerDied, "rank 1 died with exit status 7")],
)
def test_a_lost_worker_is_named_and_replaced(pool: Pool, function, kind: type[Exception], text: str) -> None:
    before = pool.run(hang_on, 2, -1)
    with pytest.raises(kind, match=text) as caught:
        pool.run(function, 2, 1, timeout=1.0)
    if kind is WorkerHung:
        assert "in hang_on" in str(caught.value)
    assert not psutil.pid_exists(before[1])
    after = pool.run(hang_on, 2, -1)
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_output_reaches_the_test(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(speak, 2)
    assert capsys.readouterr().out == "said by 0\nsaid by 1\n"


def test_what_cannot_run_is_refused_at_once(pool: Pool) -> None:
    with pytest.raises(TypeError, match="module-level"):
        pool.run(lambda: None, 2)
    with pytest.raises(ValueError, match="1 to 4 ranks, not 5"):
        pool.run(speak, 5)


def test_closing_leaves_no_process() -> None:
    own = Pool(size=1)
    (pid,) = own.run(hang_on, 1, -1)
    own.close()
    assert not psutil.pid_exists(pid)
