"""Kills processes at random moments while they save: no committed step is lost, no partial one taken for a step.

Each trial forks the ranks of a world, which save step after step; one of them is killed. The others have to end with a
`CheckpointError`, and what is on the disk has to restore.

    python -m tests.checkpoint.kills 300 --ranks 4
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import Manager, restore
from ptrainx.checkpoint.steps import found_steps
from ptrainx.errors import CheckpointError
from tests.support.pool import free_port

__all__ = ["run"]

ROWS = 1 << 14


def tree(step: int) -> dict[str, torch.Tensor]:
    """What is saved as a step."""
    return {f"w{i}": torch.full((ROWS, 4), float(step)) for i in range(4)} | {"n": torch.tensor(step)}


def rank_main(folder: Path, rank: int, ranks: int, port: int, first: int, go: int) -> None:
    """One rank: saves until it is killed, or another has been."""
    place = _placing(rank, ranks, port) if ranks > 1 else tree
    manager = Manager(folder, keep=2, timeout=1.0)
    values = place(first)
    os.write(go, b"1")
    for step in range(first, first + 1000):
        manager.save(step, values)
        if rank == 0:
            (folder / "returned").write_text(str(step))
        values = place(step + 1)


def _placing(rank: int, ranks: int, port: int) -> Callable[[int], Any]:
    """Joins the world, and returns what places a step's tree on it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    mesh = px.make_mesh(data=ranks)
    specs = {**dict.fromkeys(tree(0), P("data")), "n": P()}
    return lambda step: px.device_put(tree(step), specs, mesh)


def trial(folder: Path, ranks: int, rng: random.Random) -> None:
    """One world, one kill, one look at what is left."""
    first = max(found_steps(folder), default=-1) + 1
    port, (seen, go) = free_port(), os.pipe()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 3
            try:
                rank_main(folder, rank, ranks, port, first, go)
            except CheckpointError:
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for _ in children:
        os.read(seen, 1)
    os.close(seen)
    os.close(go)
    time.sleep(rng.random() * 0.15)
    victim = rng.randrange(ranks)
    os.kill(children[victim], signal.SIGKILL)
    for rank, child in enumerate(children):
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (-9 if rank == victim else 0), f"rank {rank} ended with {status}, rank {victim} was killed"
    look(folder)


def look(folder: Path) -> None:
    """Every step is whole, and none that was returned is missing."""
    there = found_steps(folder)
    returned = folder / "returned"
    last = int(returned.read_text() or -1) if returned.exists() else -1
    assert last <= max(there, default=-1), (last, there)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in there:
            found = restore(folder, tree(0), step=step)
            assert all(found[name].equal(value) for name, value in tree(step).items()), step


def run(times: int, ranks: int, seed: int = 0) -> int:
    """So many trials in one folder; returns how many."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            trial(Path(folder), ranks, rng)
        steps = found_steps(Path(folder))
        assert steps[-1] > times // 2, steps
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("times", type=int, nargs="?", default=300)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    print(f"{run(chosen.times, chosen.ranks, chosen.seed)} kills, no step lost, none partial")
