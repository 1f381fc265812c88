"""The benchmark's machinery: losses are checked before times, and what can't run is told. Times are never asserted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import ptrainx as px
from tests.bench import __main__ as command
from tests.bench.compare import MISMATCH, Comparison, Ratio, Row, compare, losses_agree
from tests.bench.model import STEPS_TO_LOSS
from tests.bench.processes import ContenderFailed
from tests.bench.ptrainx_contenders import trainer
from tests.bench.report import goals
from tests.bench.roster import ROSTER, Contender, missing

RIGHT = (4.0, 3.0)


@pytest.mark.long
def test_the_small_model_gives_the_losses_that_every_framework_gives() -> None:
    # What DistributedDataParallel, FSDP2 and JAX all come to from these initial values.
    first, last = 6.98799, 1.66825
    mesh = px.make_mesh(data=2, simulate=True)
    step, state, data = trainer("small", mesh, sharded=False)
    losses = []
    for _ in range(STEPS_TO_LOSS):
        state, loss = step(state, *data)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(first, rel=1e-4)
    assert losses[-1] == pytest.approx(last, rel=1e-4)


@pytest.mark.long
@pytest.mark.processes
def test_a_minimal_run_agrees_in_losses_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new folder" / "bench.json"
    status = command.main(
        ["--sizes", "tiny", "--contenders", "ddp,ptrainx", "--steps", "1", "--rounds", "2", "--json", str(path)]
    )
    assert status == 0
    found = json.loads(path.read_text())
    tiny = found["sizes"]["tiny"]
    assert (tiny["steps"], tiny["rounds"]) == (1, 2)
    assert [row["name"] for row in tiny["contenders"]] == ["ddp", "ptrainx"]
    for row in tiny["contenders"]:
        assert row["status"] == "ok"
        assert row["losses"] == pytest.approx(tiny["reference_losses"], rel=1e-4)
        assert len(row["rounds_ms"]) == 2
        assert all(math.isfinite(ms) and ms > 0 for ms in (*row["rounds_ms"], row["step_ms"], row["cpu_ms"]))
        assert row["x_best FSDP2"] is None  # was not asked for
    assert tiny["contenders"][0]["x_best DDP"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert {"cpu", "cores", "torch"} <= found["machine"].keys()
    assert "ptrainx" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "last", "agree"),
    [
        ((4.0, 3.0), True, True),
        ((4.0003, 3.0002), True, True),
        ((4.0005, 3.0), True, False),
        ((4.0, 3.0004), True, False),
        ((4.0, 9.0), False, True),
        ((4.0, math.nan), True, False),
    ],
)
def test_losses_agree_to_one_part_in_ten_thousand(losses: tuple[float, float], last: bool, agree: bool) -> None:
    assert losses_agree(losses, RIGHT, last=last) is agree


def test_a_ratio_is_paired_by_round() -> None:
    # The machine was twice as slow in the second round: the ratio is 3 all the same.
    rows = (Row("ddp", "ok", RIGHT, 1.0, (1.0, 2.0, 1.0)), Row("ptrainx", "ok", RIGHT, 1.0, (3.0, 6.0, 3.0)))
    comparison = Comparison("tiny", RIGHT, rows)
    assert comparison.ratio("ptrainx", "ddp") == Ratio(3.0, 3.0, 3.0)
    assert comparison.ratio("ptrainx", "fsdp2") is None
    assert rows[1].ms == 3000.0


def test_goals_are_told_for_the_sizes_that_ran() -> None:
    rows = (
        Row("ddp", "ok", RIGHT, 1.0, (2.0,)),
        Row("ddp-compiled", "ok", RIGHT, 1.0, (1.0,)),
        Row("ptrainx-inductor", "ok", RIGHT, 1.0, (0.7,)),
        Row("ptrainx-scan-inductor", "ok", RIGHT, 1.0, (0.9,)),
    )
    found = goals([Comparison("small", RIGHT, rows), Comparison("deep", RIGHT, rows[:1])])
    (goal,) = found
    assert (goal["size"], goal["contender"], goal["base"]) == ("small", "replicated", "best DDP")
    assert (goal["ran"], goal["median"], goal["met"]) == (["ptrainx-inductor", "ddp-compiled"], 0.7, True)


class Canned:
    """Stands for the processes: gives what each contender is said to come to."""

    def __init__(self, results: dict[str, Any]):
        self.results = {"one device": RIGHT, **results}
        self.visits: list[str] = []
        self.ended: list[str] = []
        self.built: list[str] = []

    def call(self, group: str, timeout: float, method: str, *arguments: Any, only: int | None = None) -> list[Any]:
        if method == "build":
            self.built.append(arguments[0])
            result = self.results[arguments[0]]
            if isinstance(result, Exception):
                raise result
            return [{"start_s": 1.0, "losses": list(result)}]
        if method == "visit":
            self.visits.append(arguments[0])
            return [([2.0, 4.0, 3.0], 5.0)]
        return [None]

    def end(self, group: str) -> None:
        self.ended.append(group)


def run_canned(results: dict[str, Any]) -> tuple[Canned, dict[str, Row]]:
    canned = Canned(results)
    found = compare(canned, "tiny", list(results), steps=3, rounds=2)  # type: ignore[arg-type]
    return canned, {row.name: row for row in found.rows}


def test_contenders_take_turns_forwards_and_backwards() -> None:
    canned, rows = run_canned({"ddp": RIGHT, "fsdp2": RIGHT, "ptrainx": RIGHT})
    assert canned.visits == ["ddp", "fsdp2", "ptrainx", "ptrainx", "fsdp2", "ddp"]
    assert (rows["ddp"].rounds, rows["ddp"].cpu) == ((3.0, 3.0), (5.0, 5.0))


def test_no_time_is_told_of_wrong_losses() -> None:
    canned, rows = run_canned({"ddp": RIGHT, "ptrainx": (4.0, 3.01)})
    assert rows["ptrainx"] == Row("ptrainx", MISMATCH, (4.0, 3.01), 1.0, ())
    assert rows["ddp"].status == "ok"
    assert canned.visits == ["ddp", "ddp"]


def test_only_the_first_loss_of_ranks_that_do_not_communicate_is_compared() -> None:
    _, rows = run_canned({"compute": (4.0, 2.0)})
    assert rows["compute"].status == "ok"


def test_a_contender_that_hangs_costs_the_others_nothing() -> None:
    hung = ContenderFailed("no answer in 900 s", stuck=True)
    canned, rows = run_canned({"ddp": RIGHT, "fsdp2": hung, "ptrainx": RIGHT})
    assert rows["fsdp2"].status == "no answer in 900 s"
    assert canned.ended == ["ranks"]
    # The processes were replaced, so what was there before is built again.
    assert canned.built == ["one device", "ddp", "fsdp2", "ptrainx", "ddp"]
    assert {rows[name].status for name in ("ddp", "ptrainx")} == {"ok"}


def test_wrong_losses_fail_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Comparison("tiny", RIGHT, (Row("ddp", MISMATCH, (4.0, 3.01), 1.0),))
    monkeypatch.setattr(command, "compare", lambda *args, **options: wrong)
    assert command.main(["--sizes", "tiny", "--contenders", "ddp", "--json", str(tmp_path / "bench.json")]) == 1
    assert "MISMATCH" in capsys.readouterr().out


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(ROSTER["ddp"]) is None
    assert missing(Contender("x", "", "", needs=("no_such_module",))) == "no_such_module is not installed"
    monkeypatch.setenv("PATH", "")
    assert missing(ROSTER["ddp-compiled"]) == "there is no C++ compiler, which torch.compile needs on CPU"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sizes", "huge"], "unknown: huge; known: tiny, small, wide, deep"),
        (["--contenders", "ddp,horovod"], "unknown: horovod; known: compute, compute-compiled, ddp"),
        (["--rounds", "0"], "'0' is no number of at least 1"),
    ],
)
def test_a_wrong_option_is_told(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert says in capsys.readouterr().err
