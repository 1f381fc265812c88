"""`ptrainx run`: output untouched, exit statuses, the first error once, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from ptrainx.cli.main import main

PTRAINX = [sys.executable, "-m", "ptrainx.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

DESCRIBE = """
    import json, os, sys
    print(json.dumps({"name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0],
                      "main": sys.modules["__main__"].__name__, "threads": os.environ.get("OMP_NUM_THREADS")}))
"""
COUNT = """
    import os
    for i in range(300):
        print(os.environ["RANK"], i, "é\\t|", end="|\\n")
"""
RAW = """
    import sys
    print("10%", end="\\r")
    sys.stdout.flush()
    sys.stdout.buffer.write(bytes(range(256)) + b"\\x1b[1mno newline at the end")
"""
END = """
    import os, signal, sys, time
    if os.environ["RANK"] == "0":
        time.sleep(1000)
    how = sys.argv[1]
    if how == "raise":
        raise ValueError("boom")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "_exit":
        os._exit(7)
    sys.exit(int(how) if how.isdigit() else how)
"""
LOST_PEER = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.all_reduce(total)
"""
SUM = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} sum {total.item()}\\n", end="")
    dist.destroy_process_group()
"""
WAIT = """
    import os, time
    print(os.getpid(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
    time.sleep(1000)
"""


def write(folder: Path, program: str, name: str = "program.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(program))
    return str(path)


def start_waiting(folder: Path) -> tuple[subprocess.Popen[str], list[list[str]]]:
    """Starts a run of two processes that wait; returns it with each one's process id, address and port."""
    process = subprocess.Popen(
        [*PTRAINX, "run", "-n", "2", write(folder, WAIT)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return process, [process.stdout.readline().split() for _ in range(2)]


def wait_until_gone(pids: list[int]) -> list[int]:
    """Those of `pids` that still run after ten seconds."""
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_lines_arrive_whole_and_in_each_ranks_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", write(tmp_path, COUNT)]) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    for rank in ("0", "1"):
        assert [line for line in lines if line.startswith(rank)] == [f"{rank} {i} é\t||" for i in range(300)]
    assert len(lines) == 600
    assert err == ""


def test_output_is_that_of_the_program_byte_for_byte(tmp_path: Path) -> None:
    script = write(tmp_path, RAW)
    plain = subprocess.run([sys.executable, script], capture_output=True, check=True).stdout
    run = subprocess.run([*PTRAINX, "run", "-n", "1", script], capture_output=True, check=True)
    assert (run.stdout, run.stderr) == (plain, b"")


@pytest.mark.parametrize("form", ["script", "module", "folder"])
def test_a_program_sees_what_python_shows_it(form: str, tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = {"script": "program.py", "module": "package/part.py", "folder": "folder/__main__.py"}[form]
    write(tmp_path, DESCRIBE, name)
    target = {"script": ["program.py"], "module": ["-m", "package.part"], "folder": ["folder"]}[form]
    arguments = [*target, "a", "--steps", "3", "-n", "--", "--help"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    plain = subprocess.run([sys.executable, *arguments], capture_output=True, check=True, text=True).stdout
    assert main(["run", "-n", "2", *arguments]) == 0
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == [json.loads(plain)] * 2


def test_cores_are_shared_unless_the_environment_says_otherwise(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    main(["run", "-n", "1", write(tmp_path, DESCRIBE)])
    out, err = capfd.readouterr()
    assert int(json.loads(out)["threads"]) == len(psutil.Process().cpu_affinity())
    assert err == ""
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    ("how", "status", "shown"),
    [
        ("raise", 1, "ValueError: boom"),
        ("3", 3, "rank 1 failed: exit status 3"),
        ("no data", 1, "rank 1 failed: no data"),
        ("_exit", 7, "rank 1 failed: exit status 7"),
        ("kill", 137, "rank 1 failed: killed by signal 9 (SIGKILL)"),
    ],
)
def test_the_exit_status_and_the_error_are_those_of_the_rank_that_failed(
    how: str, status: int, shown: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-n", "2", write(tmp_path, END), how]) == status
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("rank 1 failed:")
    assert err.count(shown) == err.count("rank 1") == 1
    assert err.count("Traceback") == (how == "raise")
    assert "rank 0" not in err
    assert "ptrainx/runtime" not in err


def test_a_lost_peer_is_not_shown_beside_the_cause(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, LOST_PEER)
    assert main(["run", "-n", "2", script]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[:3] == [
        "rank 1 failed:",
        "Traceback (most recent call last):",
        f'  File "{script}", line 7, in <module>',
    ]
    assert lines[-1] == "ValueError: the cause"
    assert len(lines) <= 6


@pytest.mark.long
def test_the_same_script_runs_under_torchrun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, SUM)
    assert main(["run", "-n", "2", script]) == 0
    done = subprocess.run([*TORCHRUN, "2", script], capture_output=True, text=True, timeout=100)
    expected = ["rank 0 of 2 sum 3", "rank 1 of 2 sum 3"]
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(done.stdout.splitlines()) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_to_the_run_ends_every_process_silently(number: signal.Signals, tmp_path: Path) -> None:
    process, workers = start_waiting(tmp_path)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert wait_until_gone([int(pid) for pid, _, _ in workers]) == []
    assert err == ""


@pytest.mark.long
def test_two_runs_at_once_keep_apart(tmp_path: Path) -> None:
    runs = [start_waiting(tmp_path / name) for name in ("one", "two")]
    meetings = [{(address, port) for _, address, port in workers} for _, workers in runs]
    assert [len(places) for places in meetings] == [1, 1]
    assert meetings[0] != meetings[1]
    assert {address for places in meetings for address, _ in places} == {"127.0.0.1"}
    for process, _ in runs:
        process.send_signal(signal.SIGINT)
    for process, _ in runs:
        process.communicate(timeout=30)
        assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "0", "program.py"], "at least one process"),
        (["-n", "-2", "program.py"], "-n -2"),
        (["-n", "2", "absent.py"], "no such script: absent.py"),
        (["-n", "2", "folder"], "without a __main__.py"),
        (["-n", "2", "-m", "absent.part"], "no module named absent"),
        (["-n", "2", "--nnodes", "2:1", "program.py"], "options do not fit"),
        (["-n", "two", "program.py"], "invalid int value: 'two'"),
        (["-n", "2"], "required: SCRIPT"),
        (["--no-such-option", "program.py"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_arguments_exit_with_status_2(
    arguments: list[str], text: str, tmp_path: Path, capfd, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "print('ran')")
    (tmp_path / "folder").mkdir()
    try:
        status = main(["run", *arguments])
    except SystemExit as error:
        status = error.code
    out, err = capfd.readouterr()
    assert status == 2
    assert text in err
    assert out == ""


def test_a_missing_script_tells_of_its_neighbours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "", "train.py")
    assert main(["run", "-n", "2", str(tmp_path / "trian.py")]) == 2
    assert "scripts there: train.py" in capfd.readouterr().err


def test_a_rendezvous_of_nodes_is_handed_to_torch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tests.support.pool import free_port

    options = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    assert main(["run", "-n", "2", *options, "--rdzv-id", "7", "--local-addr", "127.0.0.1", write(tmp_path, SUM)]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 of 2 sum 3", "rank 1 of 2 sum 3"]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in ((["--version"], "ptrainx 0."), (["--help"], "doctor"), (["run", "--help"], "-m MODULE")):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert text in capsys.readouterr().out


def test_the_command_line_loads_no_launcher_before_it_runs_one() -> None:
    program = "import sys, ptrainx.cli.main; print('torch.distributed.run' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
