"""Joining and leaving the world of processes that the environment describes.

The world is torch's default process group. A *world's epoch* counts how often this process has joined one; whatever
is cached for a world carries its epoch, so that nothing of an old world is used in the next.
"""

from __future__ import annotations

import dataclasses
import datetime
import os

import torch
import torch.distributed as dist

from ptrainx.core.errors import MeshError

__all__ = ["World", "current_world", "initialize", "shutdown"]

_epoch = 0


@dataclasses.dataclass(frozen=True)
class World:
    """The processes that run this program: how many, which one this is, and the epoch of their joining."""

    size: int
    rank: int
    epoch: int


def initialize(*, backend: str | None = None, timeout: float | None = None) -> World:
    """Joins the world that the environment describes; does nothing if this process is in one.

    Reads what torchrun and `ptrainx run` set (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`); without them the
    world is this process alone. `make_mesh` calls this.

    Args:
        backend: a torch.distributed backend; default gloo for CPU tensors and NCCL for CUDA ones.
        timeout: seconds after which a collective gives up; torch's default if None.

    Returns:
        the world.

    Raises:
        MeshError: the environment is incomplete, or the world can't be joined.
    """
    global _epoch
    if not dist.is_initialized():
        _join(backend, timeout)
        _epoch += 1
    return World(dist.get_world_size(), dist.get_rank(), _epoch)


def _join(backend: str | None, timeout: float | None) -> None:
    cuda = torch.cuda.is_available()
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
    limit = {} if timeout is None else {"timeout": datetime.timedelta(seconds=timeout)}
    if "WORLD_SIZE" not in os.environ and "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **limit)
        return
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise MeshError(
            "the environment describes a world of processes only in part",
            got=f"{', '.join(missing)} not set",
            expected=f"all of {', '.join(needed)}",
            fix="start the program with `ptrainx run -n N script.py` or torchrun, or unset them all to run alone",
        )
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group(backend, **limit)
    except (ValueError, RuntimeError) as error:
        raise MeshError(
            f"could not join the world: {error}",
            got=", ".join(f"{name}={os.environ[name]}" for name in needed),
            fix="check that all processes started and that MASTER_ADDR:MASTER_PORT is reachable from each",
        ) from error


def current_world() -> World:
    """The world this process is in; a world of one if it has joined none (epoch 0: nothing has been joined)."""
    if not dist.is_initialized():
        return World(int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")), 0)
    return World(dist.get_world_size(), dist.get_rank(), _epoch)


def shutdown() -> None:
    """Leaves the world; does nothing if this process is in none. Meshes of that world can't be used afterwards."""
    if dist.is_initialized():
        dist.destroy_process_group()
