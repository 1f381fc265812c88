"""Real collectives give what the simulator's reference says, for every operation, also with many in flight."""

import pytest
import torch

import ptrainx as px
from ptrainx.compile.channel import open_channels
from ptrainx.mesh.exchange import exchange

OPERATIONS = {
    "all_reduce sum": ("_c10d_functional::all_reduce", ("sum",)),
    "all_reduce avg": ("_c10d_functional::all_reduce", ("avg",)),
    "all_reduce max": ("_c10d_functional::all_reduce", ("max",)),
    "all_reduce min": ("_c10d_functional::all_reduce", ("min",)),
    "all_gather": ("_c10d_functional::all_gather_into_tensor", None),
    "reduce_scatter sum": ("_c10d_functional::reduce_scatter_tensor", ("sum", None)),
    "reduce_scatter avg": ("_c10d_functional::reduce_scatter_tensor", ("avg", None)),
    "reduce_scatter max": ("_c10d_functional::reduce_scatter_tensor", ("max", None)),
    "broadcast": ("_c10d_functional::broadcast", (1,)),
    "shard_dim": ("_dtensor::shard_dim_alltoall", (0, 1)),
}


def arguments(extra, world):
    return (world,) if extra is None else tuple(world if a is None else a for a in extra)


def operand(rank, step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def run_all(world):
    channel = open_channels(px.make_mesh(data=world))["data"]
    rank = px.mesh.current_world().rank
    found = {}
    for name, (op, extra) in OPERATIONS.items():
        pending = getattr(channel, op.split("::")[-1])(operand(rank), *arguments(extra, world))
        found[name] = pending.wait() if hasattr(pending, "wait") else pending
    uneven = [rank + 1] * world
    pending = channel.all_to_all_single(
        torch.arange(float(sum(uneven)))[:, None] + 100 * rank, list(range(1, world + 1)), uneven
    )
    found["all_to_all"] = pending.wait()
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_collectives_against_the_reference(pool, world):
    results = pool.run(run_all, world, world)
    for name, (op, extra) in OPERATIONS.items():
        if world == 1 and name == "broadcast":
            continue
        inputs = [operand(rank) for rank in range(world)]
        expected = exchange(op, inputs, [arguments(extra, world)] * world)
        for rank in range(world):
            torch.testing.assert_close(results[rank][name], expected[rank], msg=f"{name}, rank {rank}")
    for rank in range(world):
        rows = [torch.arange(float((r + 1) * world))[:, None] + 100 * r for r in range(world)]
        want = torch.cat([rows[r][rank * (r + 1) : (rank + 1) * (r + 1)] for r in range(world)])
        torch.testing.assert_close(results[rank]["all_to_all"], want)


def many_in_flight(world, rounds):
    channel = open_channels(px.make_mesh(data=world))["data"]
    rank = px.mesh.current_world().rank
    wrong = 0
    for step in range(rounds):
        inputs = [operand(rank, step) * (i + 1) for i in range(12)]
        gathers = [channel.all_gather_into_tensor(x, world) for x in inputs]
        sums = [channel.all_reduce(x, "sum") for x in inputs]
        scatters = [channel.reduce_scatter_tensor(x, "sum", world) for x in inputs]
        whole = [operand(r, step) for r in range(world)]
        total = sum(whole)
        for i in range(12):
            wrong += not torch.equal(gathers[i].wait(), torch.cat([w * (i + 1) for w in whole]))
            wrong += not torch.allclose(sums[i].wait(), total * (i + 1), rtol=1e-5, atol=1e-5)
            mine = total.chunk(world)[rank] * (i + 1)
            wrong += not torch.allclose(scatters[i].wait(), mine, rtol=1e-5, atol=1e-5)
    return wrong


def test_many_collectives_in_flight(pool):
    assert pool.run(many_in_flight, 2, 2, 150, timeout=120) == [0, 0]
