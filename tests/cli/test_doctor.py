"""`ptrainx doctor`: what it finds, and what it says where something is missing."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import numpy
import pytest
import torch

from ptrainx.cli.doctor import Finding, Report, check_package, check_room, print_report
from ptrainx.cli.main import main


def test_json_holds_what_this_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for key, section in report.items() if key != "ready" for finding in section}
    assert report["ready"] is True
    assert found["python"]["value"] == platform.python_version()
    assert found["torch"]["value"] == torch.__version__
    assert found["numpy"]["value"] == numpy.__version__
    assert found["gloo"]["ok"]
    assert found["nccl"]["ok"] == torch.distributed.is_nccl_available()
    assert found["ptrainx/mesh"]["value"] == "link to ../mesh"
    assert any(name.startswith("cuda") for name in found) or not torch.cuda.is_available()


def test_the_report_reads_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sections = [line.split("  ")[0] for line in lines if line and not line.startswith(" ")]
    expected = ["versions", "devices", "backends", "compiler", "checkout", "optional packages"]
    assert sections == [*expected, "Training can run here."]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("finding", "status", "text"),
    [
        (Finding("gloo", True, "works", "set it up", needed=True), 0, "Training can run here"),
        (Finding("gloo", False, "broken", "set it up", needed=True), 1, "Training cannot run here"),
        (Finding("cuda", False, "no device", "plug one in"), 0, "plug one in"),
    ],
)
def test_only_what_is_needed_decides(finding: Finding, status: int, text: str, capsys) -> None:
    report = Report({"backends": [finding]})
    assert print_report(report) == status
    assert text in capsys.readouterr().out
    assert print_report(report, as_json=True) == status
    assert json.loads(capsys.readouterr().out)["ready"] == (status == 0)


def test_a_missing_package_is_told_with_what_installs_it() -> None:
    fix = "pip install 'ptrainx[plot]'"
    assert check_package("no-such-package", fix, needed=False) == Finding(
        "no-such-package", False, "not installed", fix, needed=False
    )


@pytest.mark.parametrize(
    ("state", "ok", "value"),
    [
        ("link", True, "link to ../mesh"),
        ("folder", True, "folder"),
        ("dangling", False, "dangling link"),
        ("text", False, "a file, not a link"),
        ("absent", False, "not there"),
    ],
)
def test_the_links_of_a_checkout_are_checked(state: str, ok: bool, value: str, tmp_path: Path) -> None:
    (tmp_path / "ptrainx").mkdir()
    room, target = tmp_path / "ptrainx/mesh", tmp_path / "mesh"
    if state == "link":
        target.mkdir()
        (target / "__init__.py").touch()
    if state in ("link", "dangling"):
        room.symlink_to("../mesh")
    if state == "folder":
        room.mkdir()
        (room / "__init__.py").touch()
    if state == "text":
        room.write_text("../mesh")
    found = check_room(room)
    assert (found.ok, found.value) == (ok, value)
    assert found.needed
    assert ok or "git config core.symlinks true" in found.fix
