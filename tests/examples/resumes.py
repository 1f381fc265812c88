"""Runs of the GPT example that are killed and resumed, held against one that is not: forks of one process.

python -m tests.examples.resumes --ranks 4 --kills 13 29 44
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path

from tests.examples.gpt import TINY, load
from tests.support.pool import free_port

__all__ = ["main"]


def rank_main(rank: int, ranks: int, port: int, arguments: list[str]) -> None:
    """One rank of a run."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    gpt = load()
    gpt.train.picture = gpt.train.sample = lambda *arguments: None  # they take longer than all the steps
    gpt.train.train(gpt.train.options([*TINY, *arguments]))


def last_step(out: Path) -> int:
    """The step of the last whole line of a run's metrics."""
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines(True) if file.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return whole[-1]["step"] if whole else 0


def run(out: Path, ranks: int, data: Path, o: argparse.Namespace, kill_at: int | None) -> bool:
    """A run, killed with signal 9 once it has done `kill_at` steps; whether it came to its end."""
    arguments = [
        "--data",
        str(data),
        "--steps",
        str(o.steps),
        "--save-every",
        str(o.save_every),
        "--resume",
        "--backend",
        o.backend,
        "--out",
        str(out),
    ]
    port, children = free_port(), []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rank_main(rank, ranks, port, arguments)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    deadline = time.monotonic() + 120
    while kill_at is not None and last_step(out) < kill_at:
        assert time.monotonic() < deadline, "the run makes no steps"
        time.sleep(0.002)
    if kill_at is not None:
        for child in children:
            os.kill(child, signal.SIGKILL)
    return {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children} == {0}


def main(o: argparse.Namespace) -> str:
    """Compares; returns what it has seen."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "text.py")
        data.write_text(Path(argparse.__file__).read_text()[:20_000])
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        assert run(whole, o.ranks, data, o, None)
        for step in o.kills:
            assert not run(killed, o.ranks, data, o, step), f"the run had ended before step {step} was killed"
        assert run(killed, o.ranks, data, o, None)
        assert (whole / "params.safetensors").read_bytes() == (killed / "params.safetensors").read_bytes()
        lines = [
            [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (whole, killed)
        ]
        losses = [[(line["step"], line["loss"]) for line in run] for run in lines]
        assert losses[0] == losses[1]
        assert [step for step, _ in losses[0]] == list(range(1, o.steps + 1))
        assert lines[0][-1]["val_loss"] == lines[1][-1]["val_loss"]
        states = [out / "checkpoints" / f"step-{o.steps:012d}" for out in (whole, killed)]
        for file in states[0].iterdir():
            assert file.read_bytes() == (states[1] / file.name).read_bytes(), file.name
    return f"{len(o.kills)} kills of {o.ranks} processes: the same bits in parameters, losses and the last checkpoint"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, nargs="*", default=[13, 29, 44], help="after so many steps")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--backend", default="graph")
    chosen = parser.parse_args()
    # What a first trace imports is imported once, before the forks.
    px = load().train.px
    mesh = px.make_mesh(data=2, simulate=True)
    px.jit(lambda x: x + 1, mesh=mesh, in_specs=px.P("data"))(px.random.normal(px.random.key(0), (2,)))
    print(main(chosen))
