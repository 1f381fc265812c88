"""A jitted init whose result is sharded never holds more than its own shards: measured by the allocator's events."""

import torch
from torch.profiler import ProfilerActivity, profile

import ptrainx as px
from ptrainx import P

SCRATCH = 6 * 2**20  # what a draw may hold besides its result


def init(key):
    keys = px.random.split(key, 4)
    return [px.random.normal(keys[i], (1024, 2048)) * 0.02 for i in range(4)]


def peak_and_own(specs):
    step = px.jit(init, mesh=px.make_mesh(data=2), out_specs=specs)
    key = px.random.key(0)
    step(key)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        result = step(key)
    now = peak = 0
    for event in sorted(events.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, sum(t.to_local().nbytes for t in result), [t.to_local().clone() for t in result]


def test_a_sharded_init_holds_its_own_shards(pool):
    results = pool.run(peak_and_own, 2, P("data"))
    whole = init(px.random.key(0))
    for rank, (peak, own, shards) in enumerate(results):
        assert own == sum(t.nbytes for t in whole) // 2
        assert own <= peak <= own + SCRATCH
        for shard, value in zip(shards, whole):
            assert torch.equal(shard, value.chunk(2)[rank])
