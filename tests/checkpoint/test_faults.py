"""Disks that fill up, quotas, folders that may not be written, writers that meet: told on every rank, nothing lost."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import restore, save, save_async
from ptrainx.checkpoint.files import FileEvent, watch
from ptrainx.checkpoint.steps import found_steps
from ptrainx.errors import CheckpointError

pytestmark = pytest.mark.processes

DEADLINE = 10.0
"""Seconds within which every rank has its error."""

# What happens: (ranks that it happens to, what fails there, on which files, with which error).
FAULTS = {
    "no space on any rank": ((0, 1), "write", "", errno.ENOSPC),
    "no space on rank 0": ((0,), "write", "rank-00000", errno.ENOSPC),
    "no space on rank 1": ((1,), "write", "rank-00001", errno.ENOSPC),
    "a quota on rank 1": ((1,), "write", "rank-00001", errno.EDQUOT),
    "no space for the manifest": ((0,), "create", "manifest.json", errno.ENOSPC),
    "no space for the commit record": ((0,), "create", "commit.json", errno.ENOSPC),
    "a folder that is read-only": ((0, 1), "make_folder", "", errno.EROFS),
    "a folder that is read-only for rank 1": ((1,), "create", "", errno.EROFS),
    "a disk that fails under rank 1": ((1,), "sync", "", errno.EIO),
    "a rename that is refused": ((0,), "rename", "", errno.EACCES),
}


@contextlib.contextmanager
def short_files(size: int) -> Iterator[None]:
    """The system itself refuses files of this process that are longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def placed(value: float) -> dict[str, torch.Tensor]:
    """A tree of 128 KiB a rank."""
    mesh = px.make_mesh(data=2)
    return {"w": px.device_put(torch.full((256, 256), value), P("data"), mesh)}


def fault_of(name: str, rank: int) -> contextlib.AbstractContextManager[None]:
    ranks, kind, part, number = FAULTS[name]

    def fail(event: FileEvent) -> None:
        if rank in ranks and event.kind == kind and part in event.path:
            raise OSError(number, os.strerror(number))

    return watch(fail)


def told_by(folder: str, tree: dict[str, torch.Tensor], beside: bool) -> tuple[str, float]:
    """(what a save of step 2 raises, after how many seconds)."""
    began = time.monotonic()
    try:
        if beside:
            save_async(folder, tree, 2).result(DEADLINE)
        else:
            save(folder, tree, 2)
    except CheckpointError as error:
        return f"{error.problem} | {error.got}", time.monotonic() - began
    return "no error", time.monotonic() - began


def meet_all(folder: str) -> dict[str, list[tuple[str, float]]]:
    """Every fault, in a save and in one beside the program; after each, step 1 is as it was."""
    tree, other = placed(1.0), placed(2.0)
    rank = dist.get_rank()
    save(folder, tree, 1)
    told: dict[str, list[tuple[str, float]]] = {}
    for name in [*FAULTS, "a limit of the system on rank 1", "a limit of the system on both"]:
        for beside in (False, True):
            limited = "limit" in name and (rank == 1 or "both" in name)
            fault = fault_of(name, rank) if name in FAULTS else contextlib.nullcontext()
            with fault, short_files(1 << 16) if limited else contextlib.nullcontext():
                told.setdefault(name, []).append(told_by(folder, other, beside))
            dist.barrier()
            assert found_steps(Path(folder)) == [1], name
    assert restore(folder, tree)["w"].to_local().unique().tolist() == [1.0]
    save(folder, tree, 3)
    return told


def test_a_fault_on_any_rank_is_told_on_every_rank(pool, tmp_path):
    both = pool.run(meet_all, 2, str(tmp_path))
    for name in both[0]:
        ranks, _, _, number = FAULTS.get(name, ((0, 1) if "both" in name else (1,), "", "", errno.EFBIG))
        for rank, (text, seconds) in ((rank, one) for rank, told in enumerate(both) for one in told[name]):
            # A rank on which nothing fails, or that the other's failure reaches first, tells of the other one.
            assert any(f"rank {r} can't write" in text for r in ranks), (name, rank, text)
            assert os.strerror(number) in text, (name, rank, text)
            assert seconds < DEADLINE, (name, rank, seconds)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000000000001", "step-000000000003"]


def save_at_once(folder: str, steps: int) -> list[int]:
    """The steps that this process, a world of its own, was the one to save."""
    rank, won, lost = int(os.environ["RANK"]), [], []
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    Path(folder, f"ready{rank}").touch()
    while not Path(folder, f"ready{1 - rank}").exists():
        time.sleep(0.001)
    for step in range(steps):
        try:
            save(Path(folder, "run"), {"w": torch.full((1000,), float(rank))}, step)
        except CheckpointError as error:
            lost.append(error.problem)
        else:
            won.append(step)
    assert all("exists already" in problem for problem in lost), lost
    return won


def test_of_two_writers_on_one_folder_each_step_has_one_winner(pool, tmp_path):
    first, second = pool.run(save_at_once, 2, str(tmp_path), 20)
    assert sorted(first + second) == list(range(20))
    for rank, won in enumerate((first, second)):
        for step in won:
            found = restore(tmp_path / "run", {"w": torch.zeros(1000)}, step=step)
            assert found["w"].unique().tolist() == [float(rank)]
    assert len(list((tmp_path / "run").iterdir())) == 20
