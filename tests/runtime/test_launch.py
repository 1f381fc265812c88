"""`px.launch`: results by rank, the first error, no process left; from a module, a script, standard input, a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from ptrainx.core.errors import InputError, MeshError, WorkerError
from ptrainx.runtime import RankFailedError, launch
from tests.support.pool import Pool


def sum_of_ranks(scale: float, *, offset: float) -> tuple[int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor(scale * (dist.get_rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(os.environ["RANK"]), total.item() + offset


def fail_on(rank: int, folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    if int(os.environ["RANK"]) != rank:
        time.sleep(1000)
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    raise ValueError("the cause")


def unpicklable() -> object:
    return lambda: None


def launch_closure(scale: float) -> list[tuple[int, float]]:
    """Called in a worker of the pool, whose own threads and gradients a fork must survive."""
    torch.set_num_threads(2)
    weight = torch.ones(512, 512, requires_grad=True)
    (weight @ weight).sum().backward()

    def work() -> tuple[int, float]:
        inner = torch.ones(512, 512, requires_grad=True)
        (inner @ inner).sum().backward()
        return int(os.environ["RANK"]), scale * inner.grad[0, 0].item()

    return launch(work, 2)


def launch_closure_in_world() -> None:
    dist.init_process_group("gloo")
    launch(lambda: None, 2)


def test_results_come_by_rank() -> None:
    assert launch(sum_of_ranks, 2, 2.0, offset=0.5) == [(0, 6.5), (1, 6.5)]
    assert launch(pow, 1, 3, 2) == [9]


def test_environment_and_signals_are_as_before() -> None:
    before = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    launch(os.getcwd, 1)
    assert before == (dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)])


def test_the_first_error_names_its_rank_and_stops_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerError, match="rank 1 failed") as caught:
        launch(fail_on, 2, 1, str(tmp_path))
    assert isinstance(caught.value, RankFailedError)
    assert caught.value.rank == 1
    assert "in fail_on" in str(caught.value)
    assert str(caught.value).endswith("ValueError: the cause")
    assert not [pid for pid in (int(path.read_text()) for path in tmp_path.iterdir()) if psutil.pid_exists(pid)]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: launch(sum_of_ranks, 0), InputError, "n=0"),
        (lambda: launch(unpicklable, 1), WorkerError, "rank 0 failed"),
    ],
    ids=["no process", "a result that does not pickle"],
)
def test_bad_input_is_a_typed_error(call, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_a_closure_runs_after_threads_and_gradients_here(pool: Pool) -> None:
    # d/dW sum(W @ W) at W = ones(n, n) is 2 n everywhere.
    assert pool.run(launch_closure, 1, 3.0) == [[(0, 3072.0), (1, 3072.0)]]


def test_a_closure_is_refused_once_this_process_has_a_world(pool: Pool) -> None:
    with pytest.raises(MeshError, match=r"rank 0 of 1[\s\S]*px\.shutdown"):
        pool.run(launch_closure_in_world, 1)


PROGRAM = """
    import os
    from ptrainx.runtime import RankFailedError, launch

    factor = 10

    class Pair:
        def __init__(self, rank):
            self.rank = rank

    def work(offset):
        if offset < 0 and os.environ["RANK"] == "1":
            raise ValueError("negative")
        return Pair(factor * int(os.environ["RANK"]) + offset)

    print([pair.rank for pair in launch(work, 2, 5)])
    try:
        launch(work, 2, -1)
    except RankFailedError as error:
        print(error.rank, str(error).splitlines()[-1])
"""


@pytest.mark.parametrize("form", ["script", "standard input"])
def test_functions_and_classes_of_main_need_no_guard(form: str, tmp_path: Path) -> None:
    program = textwrap.dedent(PROGRAM)
    script = tmp_path / "program.py"
    script.write_text(program)
    command, text = ([str(script)], None) if form == "script" else (["-"], program)
    done = subprocess.run([sys.executable, *command], input=text, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("[5, 15]\n1 ValueError: negative\n", "")
