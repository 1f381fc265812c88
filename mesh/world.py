"""Joining and leaving the world of processes that the environment describes.

The world is torch's default process group. A *world's epoch* counts the worlds that this process has been in; whatever
is kept for a world carries its epoch, so that nothing of an old world is used in the next.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ptrainx.core import torch_compat_world
from ptrainx.core.errors import MeshError

__all__ = ["World", "current_world", "initialize", "shutdown"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class World:
    """The processes that run this program: how many, which one this is, and the epoch of their joining."""

    size: int
    rank: int
    epoch: int


@dataclasses.dataclass
class _Meeting:
    """Where this process meets the others, kept from world to world.

    A new store at the old port could be reached before its server has been replaced; the old store, with a new prefix
    for each world, is met by all.
    """

    address: tuple[str, ...] = ()
    store: Any = None
    joined: int = 0


@dataclasses.dataclass
class _Seen:
    """The default process group last seen (weakly), and how many there have been."""

    group: Any = None
    epoch: int = 0


_meeting = _Meeting()
_seen = _Seen()


def initialize(*, backend: str | None = None, timeout: float | None = None) -> World:
    """Joins the world that the environment describes; does nothing if this process is in one.

    Reads what torchrun and `ptrainx run` set (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`); without them the
    world is this process alone. `make_mesh` calls this. After `shutdown` a process can join again, if all do.

    Args:
        backend: a torch.distributed backend; default gloo for CPU tensors and NCCL for CUDA ones.
        timeout: seconds after which a collective gives up; torch's default if None.

    Returns:
        the world.

    Raises:
        MeshError: the environment is incomplete, or the world can't be joined.
    """
    if not dist.is_initialized():
        _join(backend, timeout)
    return current_world()


def _join(backend: str | None, timeout: float | None) -> None:
    cuda = torch.cuda.is_available()
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    if "WORLD_SIZE" not in os.environ and "RANK" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
        return
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise MeshError(
            "the environment describes a world of processes only in part",
            got=f"{', '.join(missing)} not set",
            expected=f"all of {', '.join(_NEEDED)}",
            fix="start the program with `ptrainx run -n N script.py` or torchrun, or unset them all to run alone",
        )
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < size:
        raise MeshError(
            f"RANK={rank} is no rank of a world of WORLD_SIZE={size}",
            expected=f"a rank from 0 to {size - 1}",
            fix="start the program with `ptrainx run -n N script.py` or torchrun",
        )
    if cuda:
        torch.cuda.set_device(_number("LOCAL_RANK", "0") % torch.cuda.device_count())
    try:
        store = _meet(rank, size, limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (ValueError, RuntimeError) as error:
        raise MeshError(
            f"could not join the world: {error}",
            got=", ".join(f"{name}={os.environ[name]}" for name in _NEEDED),
            fix="check that all processes started and that MASTER_ADDR:MASTER_PORT is reachable from each",
        ) from error


def _meet(rank: int, size: int, limit: datetime.timedelta | None) -> Any:
    """A store that the processes of this world share, with no key of an earlier world in it."""
    address = tuple(os.environ[name] for name in _NEEDED)
    if _meeting.address != address:
        options = {} if limit is None else {"timeout": limit}
        _meeting.store, _, _ = next(rendezvous("env://", rank, size, **options))
        _meeting.address, _meeting.joined = address, 0
    _meeting.joined += 1
    return PrefixStore(f"ptrainx/{_meeting.joined}", _meeting.store)


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise MeshError(
            f"the environment variable {name} is no number",
            got=repr(text),
            fix=f"set {name}, or unset RANK and WORLD_SIZE to run alone",
        ) from None


def current_world() -> World:
    """The world this process is in; a world of one if it has joined none (epoch 0: nothing has been joined)."""
    if not dist.is_initialized():
        alone = "WORLD_SIZE" not in os.environ
        return World(1, 0, 0) if alone else World(_number("WORLD_SIZE"), _number("RANK", "0"), 0)
    # Worlds also begin and end without us (init_device_mesh, destroy_process_group), so the group itself is asked.
    group = dist.group.WORLD
    if _seen.group is None or _seen.group() is not group:
        if _seen.epoch:
            torch_compat_world.clear_dtensor_caches()
        _seen.group, _seen.epoch = weakref.ref(group), _seen.epoch + 1
    return World(dist.get_world_size(), dist.get_rank(), _seen.epoch)


def shutdown() -> None:
    """Leaves the world; does nothing if this process is in none. Meshes of that world can't be used afterwards."""
    if dist.is_initialized():
        current_world()
        torch_compat_world.clear_dtensor_caches()
        dist.destroy_process_group()
        gc.collect()
