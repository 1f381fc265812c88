"""Collectives through shared memory: every kind, size and dtype against their meaning, on 2 and 4 processes."""

from __future__ import annotations

import glob
import itertools
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx.compile.channel import Channel, open_channels
from ptrainx.compile.shared_memory import SharedMemoryGroup
from ptrainx.compile.shared_segment import CHUNK, SLOTS
from ptrainx.errors import AgreementError
from tests.support.pool import Pool

pytestmark = pytest.mark.processes

# Elements a rank: within a chunk, at its edge, several chunks, more than a rank's slots hold.
SIZES = (1, 1000, CHUNK // 4, CHUNK // 4 + 4, (SLOTS + 2) * CHUNK // 4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def given(rank: int, size: int, dtype: torch.dtype, n: int) -> torch.Tensor:
    """What a rank gives: small integers, which every dtype adds exactly; n divides the length."""
    return ((torch.arange(n * -(-size // n)) * (rank + 2)) % 17).to(dtype)


def channel(world: int) -> Any:
    found = open_channels(px.make_mesh(data=world))["data"]
    assert isinstance(found.group, SharedMemoryGroup)
    return found


def every_kind(world: int) -> None:
    own = channel(world)
    me = own.group.rank()
    for dtype in DTYPES:
        for size in SIZES:
            all_ = [given(rank, size, dtype, world) for rank in range(world)]
            x, stacked = all_[me].clone(), torch.stack(all_)
            block = len(x) // world
            mine = slice(me * block, (me + 1) * block)
            for op, total in (("sum", stacked.sum(0)), ("max", stacked.amax(0)), ("min", stacked.amin(0))):
                assert torch.equal(own.all_reduce(x, op).wait(), total.to(dtype))
                assert torch.equal(own.reduce_scatter_tensor(x, op, world).wait(), total.to(dtype)[mine])
            assert torch.equal(own.all_gather_into_tensor(x, world).wait(), torch.cat(all_))
            swapped = own.all_to_all_single(x, [block] * world, [block] * world).wait()
            assert torch.equal(swapped, torch.cat([part[mine] for part in all_]))
            assert torch.equal(own.broadcast(x, world - 1).wait(), all_[world - 1])
            assert torch.equal(x, all_[me])  # what was given is as it was
    assert own.group._segment is not None
    average = own.all_reduce(torch.full((3,), float(me)), "avg").wait()
    torch.testing.assert_close(average, torch.full((3,), (world - 1) / 2))


# Elements of a rank's part of each piece: one slot, several slots, a piece that fits into none.
PIECES = ((3,), (4, 1, 30), (CHUNK // 16, 5, CHUNK // 16, 7, CHUNK // 16), (2, CHUNK, 3))


def pieces(world: int) -> None:
    """Each in its own memory or all joined; through shared memory and through gloo."""
    own = channel(world)
    me = own.group.rank()
    plain = Channel(own.group.group, own.ranks)
    for sizes, dtype, route in itertools.product(PIECES, DTYPES, (own, plain)):
        parts = [[given(rank + i, s, dtype, 1) for i, s in enumerate(sizes)] for rank in range(world)]
        wholes = [
            [given(rank + i, world * size, dtype, world) for i, size in enumerate(sizes)] for rank in range(world)
        ]
        gathered = torch.cat([torch.cat(of_a_piece) for of_a_piece in zip(*parts)])
        sums = [torch.stack(of_a_piece).sum(0).to(dtype) for of_a_piece in zip(*wholes)]
        scattered = torch.cat([total.chunk(world)[me] for total in sums])
        for joined in (False, True):
            x, y = (torch.cat(all_[me]) if joined else list(all_[me]) for all_ in (parts, wholes))
            assert torch.equal(route.all_gather_pieces(x, list(sizes), world).wait(), gathered)
            assert torch.equal(route.reduce_scatter_pieces(y, "sum", list(sizes), world).wait(), scattered)
            if dtype.is_floating_point:
                mean = route.reduce_scatter_pieces(y, "avg", list(sizes), world).wait()
                torch.testing.assert_close(mean, scattered / world)


def many_at_once(world: int) -> None:
    """Far more than the slots hold, waited for from the last to the first."""
    own = channel(world)
    me = own.group.rank()
    sizes = [3, CHUNK, 10, 2 * CHUNK, 7] * 3
    pending = [own.all_gather_into_tensor(torch.full((size,), float(me + i)), world) for i, size in enumerate(sizes)]
    for i in reversed(range(len(sizes))):
        want = torch.cat([torch.full((sizes[i],), float(rank + i)) for rank in range(world)])
        assert torch.equal(pending[i].wait(), want)


def uneven(world: int) -> None:
    """What does not fit the scheme goes through gloo, in between."""
    own = channel(world)
    me = own.group.rank()
    # Rank 0 sends one row to itself and two to rank 1; rank 1 sends three to rank 0.
    sends, takes = ([1, 2], [1, 3]) if me == 0 else ([3, 0], [2, 0])
    out = own.all_to_all_single(torch.arange(3.0) + 10 * me, takes, sends).wait()
    assert out.tolist() == ([0.0, 10.0, 11.0, 12.0] if me == 0 else [1.0, 2.0])
    assert own.all_reduce(torch.ones(2), "sum").wait().tolist() == [2.0, 2.0]


def test_every_kind_gives_what_it_means(pool: Pool) -> None:
    pool.run(every_kind, 2, 2)


def test_pieces_come_out_together(pool: Pool) -> None:
    pool.run(pieces, 2, 2)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_more_at_once_than_the_slots_hold(pool: Pool, world: int) -> None:
    pool.run(many_at_once, world, world)


def test_what_does_not_fit_goes_through_the_process_group(pool: Pool) -> None:
    pool.run(uneven, 2, 2)


def test_nothing_is_left_in_the_file_system(pool: Pool) -> None:
    pool.run(many_at_once, 2, 2)
    assert not glob.glob("/dev/shm/ptrainx-*")


SCRIPT = """
import os, sys, torch
import ptrainx as px
from ptrainx.compile.channel import Channel, open_channels
mesh = px.make_mesh(data=2)
own = open_channels(mesh)["data"]
own.all_reduce(torch.ones(1), "sum").wait()
if mesh.rank == 1:
    {how}
try:
    own.all_reduce(torch.ones(1), "sum").wait()
except px.errors.WorkerError as error:
    print(error, flush=True)
    os._exit(3)
"""


def both_ranks(how: str, **environment: str) -> tuple[str, int]:
    """What rank 0 prints, and its exit status."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        **environment,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT.format(how=how))],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=120)
        return said, ranks[0].returncode
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_a_rank_that_has_died_is_named() -> None:
    said, status = both_ranks("os._exit(1)")
    assert status == 3, said
    assert "rank 1 has ended while others wait for it" in said


def test_a_rank_that_is_stuck_is_named() -> None:
    said, status = both_ranks("import time; time.sleep(600)", PTRAINX_COLLECTIVE_TIMEOUT="1")
    assert status == 3, said
    assert "rank 1 did not come to a collective" in said
    assert "PTRAINX_COLLECTIVE_TIMEOUT" in said


def different_collectives(world: int) -> None:
    own = channel(world)
    own.all_reduce(torch.ones(1), "sum").wait()
    if own.group.rank() == 0:
        own.all_reduce(torch.ones(8), "sum").wait()
    else:
        own.all_gather_into_tensor(torch.ones(4), world).wait()


def test_ranks_in_different_collectives_are_told(pool: Pool) -> None:
    with pytest.raises(AgreementError, match="rank 0: all_reduce of 32 bytes; rank 1: all_gather of 16 bytes"):
        pool.run(different_collectives, 2, 2)


def through_gloo(world: int) -> str:
    os.environ["PTRAINX_SHARED_MEMORY"] = "0"
    try:
        own = open_channels(px.make_mesh(data=world))["data"]
        assert own.all_reduce(torch.ones(1), "sum").wait().item() == world
        return type(own.group).__name__
    finally:
        del os.environ["PTRAINX_SHARED_MEMORY"]


def test_it_can_be_turned_off(pool: Pool) -> None:
    assert pool.run(through_gloo, 2, 2) == ["ProcessGroup", "ProcessGroup"]
