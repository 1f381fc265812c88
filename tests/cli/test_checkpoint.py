"""`ptrainx checkpoint`: what it prints, and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import Manager
from ptrainx.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three steps of a small state on four simulated devices."""
    monkeypatch.setenv("COLUMNS", "100")
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    manager = Manager(tmp_path / "run", keep=None)
    for step in (10, 20, 30):
        w = px.device_put(torch.arange(16.0).reshape(4, 4) + (step == 30), P("data", "model"), mesh)
        tree = {"params": {"w": w, "tied": w, "b": torch.zeros(1000)}, "epoch": step // 10, "name": "a run"}
        manager.save(step, tree, metric=step / 100)
    return tmp_path / "run"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    status = main(["checkpoint", *map(str, arguments)])
    return status, [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_ls(folder, capsys):
    (folder / "step-000000000020" / "rank-00001.safetensors").unlink()
    status, lines = run(capsys, "ls", folder)
    assert status == 0
    assert lines[0].split() == ["step", "saved", "size", "leaves", "ranks", "metric", "state"]
    assert re.fullmatch(r" *10  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d +\d.*B +5 +4 +0\.1 +whole", lines[1])
    assert lines[2].endswith("damaged")
    assert re.fullmatch(r"step 20: .*rank-00001.safetensors can't be read: No such file or directory", lines[4])
    status, lines = run(capsys, "ls", folder, "--json")
    records = json.loads("\n".join(lines))
    assert [record["step"] for record in records] == [10, 20, 30]
    assert [record["problem"] is None for record in records] == [True, False, True]
    assert records[0]["leaves"] == 5


def test_show(folder, capsys):
    status, lines = run(capsys, "show", folder, "--step", 20)
    assert status == 0
    assert [line.split("  ")[0] for line in lines[1:6]] == [
        "['epoch']", "['name']", "['params']['b']", "['params']['tied']", "['params']['w']",
    ]  # fmt: skip
    assert "int 2" in lines[1]
    assert "str 'a run'" in lines[2]
    assert re.search(r"f32\[1000\] +4 kB", lines[3])
    assert re.search(r"f32\[4,4\] +P\('data', 'model'\) on data=2, model=2 +64 B", lines[4])
    assert lines[5].endswith("tied to ['params']['tied']")
    assert lines[6] == "step 20: 5 leaves, 4.06 kB, written by 4 ranks"
    _, lines = run(capsys, "show", folder / "step-000000000010", "--json")
    assert json.loads("\n".join(lines))[4]["tied"] == "['params']['tied']"


def test_verify(folder, capsys):
    assert run(capsys, "verify", folder) == (0, [f"step {step}: as it was written" for step in (10, 20, 30)])
    file = folder / "step-000000000020" / "rank-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    data[-1] ^= 1
    file.write_bytes(data)
    status, lines = run(capsys, "verify", folder)
    assert status == 1
    assert lines[1] == "step 20: 2 damaged"
    assert "header" in lines[2]
    assert "a block is not as it was written" in lines[3]
    assert run(capsys, "verify", folder, "--step", 30) == (0, ["step 30: as it was written"])


def test_diff(folder, capsys):
    first, second, third = (folder / f"step-{step:012d}" for step in (10, 20, 30))
    assert run(capsys, "diff", second, second) == (0, ["the same bits in 5 leaves"])
    status, lines = run(capsys, "diff", first, second)
    assert status == 1
    assert re.fullmatch(r"\['epoch'\] +int 1 and 2", lines[1])
    status, lines = run(capsys, "diff", second, third)
    assert lines[-1] == "3 leaves differ"
    assert "16 of 16 elements differ, by 1 at most" in lines[3]
    other = Manager(folder.parent / "other")
    other.save(1, {"params": {"w": torch.zeros(2), "tied": torch.arange(16.0).reshape(4, 4), "c": 1}, "epoch": 1})
    status, lines = run(capsys, "diff", first, folder.parent / "other")
    told = dict(re.split(r" {2,}", line) for line in lines[1:-1])
    assert told == {
        "['name']": "only in the first",
        "['params']['b']": "only in the first",
        "['params']['w']": "f32[4,4] and f32[2]",
        "['params']['c']": "only in the second",
    }


def test_prune(folder, capsys):
    assert run(capsys, "prune", folder, "--keep", 1, "--best", 1, "--dry-run")[1][0] == "step 20: would go"
    assert Manager(folder).all_steps() == [10, 20, 30]
    status, lines = run(capsys, "prune", folder, "--keep", 1, "--best", 1)
    assert (status, lines[0]) == (0, "step 20: removed")
    assert re.fullmatch(r"2 steps stay, .*B freed", lines[1])
    assert Manager(folder).all_steps() == [10, 30]
    assert main(["checkpoint", "prune", str(folder), "--keep", "0"]) == 2


@pytest.mark.parametrize("action", ["ls", "show", "verify"])
def test_nothing_there_is_told(tmp_path, capsys, action):
    assert main(["checkpoint", action, str(tmp_path)]) == 1
    assert "there is no checkpoint in" in capsys.readouterr().err
