"""`reductions="ordered"`: the same bits on every mesh that divides the logical shards, and sums in the tree that the
page on determinism draws. Without it: the same bits for one seed, mesh and channel.
"""

import itertools
import os
import re

import pytest
import torch

import ptrainx as px
from ptrainx import P
from tests.compile.models import mlp, scanned
from tests.compile.programs import MESHES, PROGRAMS, X, assert_close, values

SHARDS = {"data": 4, "model": 2}
ordered = {"reductions": "ordered"}


def same_bits(a, b):
    """Whether trees hold the same bits: 0.0 and -0.0 are two things, one NaN is itself."""

    def raw(leaf):
        return torch.as_tensor(leaf).contiguous().reshape(-1).view(torch.uint8)

    return all(torch.equal(raw(x), raw(y)) for x, y in zip(px.tree.leaves(a), px.tree.leaves(b), strict=True))


# Sums.


def tree_sum(parts):
    """The order of additions that is promised: halves first."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    if len(parts) % 2:
        return tree_sum(parts[:-1]) + parts[-1]
    return tree_sum(parts[:half]) + tree_sum(parts[half:])


@pytest.mark.parametrize(("devices", "shards"), [(1, 8), (2, 8), (4, 8), (8, 8), (1, 6), (2, 6), (3, 6)])
def test_a_sum_is_the_tree_over_logical_shards(devices, shards):
    """Every partial result is one kernel's over one shard, and they are added in a tree, whoever holds them."""
    rows = values(48, 40).mul(1e3).add(values(48, 40, seed=5))
    weights = values(48, 24, seed=2)
    mesh = px.make_mesh(data=devices, simulate=True)

    @px.jit(mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")), **ordered, logical_shards=shards)
    def sums(x, w):
        return x.sum(0), (x.T @ w)[:24]

    columns, product = px.device_get(sums(rows, weights))
    pieces = list(zip(rows.chunk(shards), weights.chunk(shards)))
    assert torch.equal(columns, tree_sum([x.sum(0) for x, _ in pieces]))
    assert torch.equal(product, tree_sum([x.T @ w for x, w in pieces])[:24])


# Programs.

ROWS = ("attention heads", "norms", "dtypes")


@pytest.mark.parametrize("name", ROWS)
def test_programs_have_the_same_bits_on_every_mesh(name):
    row = PROGRAMS[name]
    found = []
    for axes in (MESHES[0], MESHES[3]):
        mesh = px.make_mesh(axes, simulate=True)
        options = {"in_specs": row.in_specs, "out_specs": row.out_specs, "logical_shards": SHARDS}
        step = px.jit(row.fn, mesh=mesh, **options, **ordered)
        out = step(*row.args)
        assert_close(out, row.fn(*row.args))
        found.append(px.device_get(out))
    assert all(same_bits(found[0], other) for other in found[1:])


def trainer(model, mesh, weights, shards=None, dropout=0.1):
    """A step with dropout, clipping and momentum, its first state placed, and its batch."""
    optimizer = px.optim.chain(px.optim.clip_by_global_norm(0.5), px.optim.sgd(0.1, momentum=0.9))
    state = px.TrainState(0, model.params, optimizer.init(model.params), px.random.key(3))
    specs = px.match_rules([*weights, (r".*", P())], state)
    options = {} if shards is None else {"reductions": "ordered", "logical_shards": shards}

    def step(state, x, y):
        key = px.random.fold_in(state.key, state.step)
        noisy = px.random.dropout(key, x, dropout) if x.is_floating_point() else x
        loss, grads = px.value_and_grad(model.loss)(state.params, noisy, y)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = px.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss

    data = (P("data"),) * len(model.batch)
    jitted = px.jit(step, mesh=mesh, in_specs=(specs, *data), out_specs=(specs, P()), donate_argnums=0, **options)
    return jitted, lambda: px.device_put(state, specs, mesh), model.batch


def repeat(step, state, batch):
    """Losses of twenty steps, and the state behind them."""
    losses = []
    for _ in range(20):
        state, loss = step(state, *batch)
        losses.append(loss.item())
    return losses, px.device_get(state)


def losses_and_state(model, mesh, weights, shards):
    step, start, batch = trainer(model, mesh, weights, shards)
    return repeat(step, start(), batch)


WIDE = mlp((16, 32, 16), B=8)
# Name -> model, where its weights lie, mesh axes, logical shards.
TRAINED = {
    "a loop over layers, gathered in it": (
        scanned(2, D=8, B=8),
        [(r"blocks/(up|down)$", P(None, "data")), (r"first$", P("data"))],
        lambda world: {"data": world},
        {"data": 4},
    ),
    "weights over both axes": (
        WIDE,
        [(r"0/w$", P("model")), (r"1/w$", P("data", "model"))],
        lambda world: {"data": max(world // 2, 1), "model": min(world, 2)},
        {"data": 2, "model": 2},
    ),
}


# Real processes.


def ordered_runs(world, **options):
    """Losses of twenty steps, and the state behind them, of each row; on four devices of one."""
    rows = list(TRAINED.items())[world // 4 :]
    return {
        name: losses_and_state(model, px.make_mesh(axes(world), **options), weights, shards)
        for name, (model, weights, axes, shards) in rows
    }


def on_ranks(world):
    """What a rank has of the ordered runs, and whether three fast runs from one start have the same bits."""
    step, start, batch = trainer(WIDE, px.make_mesh(data=world), [(r"1/w$", P("data"))])
    lowered, repeated = step.lower(start(), *batch), []
    for shared_memory in "10":
        os.environ["PTRAINX_SHARED_MEMORY"] = shared_memory
        try:
            compiled = lowered.compile()
            runs = [repeat(compiled, start(), batch) for _ in range(3)]
        finally:
            del os.environ["PTRAINX_SHARED_MEMORY"]
        repeated.append(all(same_bits(a, b) for a, b in itertools.pairwise(runs)))
    return ordered_runs(world), repeated


@pytest.fixture(scope="module")
def on_one_device():
    """The right answer: the ordered runs on meshes of one device."""
    return ordered_runs(1, simulate=True)


@pytest.mark.parametrize("world", [2, 4])
def test_real_processes(pool, world, on_one_device):
    for found, repeated in pool.run(on_ranks, world, world, timeout=120):
        assert repeated == [True, True], "through shared memory, and through gloo"
        for name, (losses, state) in found.items():
            assert len(set(losses)) == 20
            assert losses == on_one_device[name][0], name
            assert same_bits(state, on_one_device[name][1]), name


# What is inside.


def test_a_replicated_value_is_computed_once():
    """The optimizer's update of a replicated parameter is the same for all logical shards of a device."""
    mesh = px.make_mesh(data=2, simulate=True)
    options = {"mesh": mesh, "in_specs": (P(), P("data")), **ordered}
    step = px.jit(lambda w, x: w - w.sqrt() * (x @ w).relu().sum(0), **options)
    text = step.lower(values(8, 8).abs(), X).as_text()
    assert text.count(" sqrt(") == 1
    assert text.count(" relu(") == 4, "one for each logical shard of the device"


def test_meshes_and_calls_inside():
    """A mesh that is named inside is the step's own, cut finer; a shard_map sees logical shards."""
    mesh = px.make_mesh(data=2, simulate=True)
    inner = px.jit(lambda x: x * 2, mesh=mesh, in_specs=P("data"))
    shard = px.shard_map(
        lambda x: x - px.psum(x.sum(0), "data") * px.axis_size("data") + px.axis_index("data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    step = px.jit(lambda x: shard(inner(x)), mesh=mesh, in_specs=P("data"), reductions="ordered", logical_shards=4)
    want = X * 2 - (X * 2).sum(0) * 4 + torch.arange(4).repeat_interleave(2)[:, None]
    assert_close(step(X), want)


# Refusals.


def two(**sizes):
    return px.make_mesh(sizes or {"data": 2}, simulate=True)


REFUSED = {
    "no such reductions": (lambda: px.jit(torch.sin, reductions="exact"), px.errors.InputError, "'fast', 'ordered'"),
    "shards of nothing": (lambda: px.jit(torch.sin, logical_shards=8), px.errors.InputError, 'reductions="ordered"'),
    "no number": (lambda: px.jit(torch.sin, **ordered, logical_shards=0), px.errors.InputError, "logical_shards=0"),
    "inductor": (lambda: px.jit(torch.sin, **ordered, backend="inductor"), px.errors.BackendError, "graph"),
    "too many devices": (
        lambda: px.jit(torch.sin, mesh=two(data=3), **ordered, logical_shards=4)(X),
        px.errors.MeshError,
        "logical_shards={'data': 12}",
    ),
    "an axis too many": (
        lambda: px.jit(torch.sin, mesh=two(), **ordered, logical_shards={"data": 4, "model": 2})(X),
        px.errors.MeshError,
        "may have size 1",
    ),
    "rows that do not divide": (
        lambda: px.jit(torch.sin, mesh=two(), in_specs=P("data"), **ordered, logical_shards=6)(X),
        px.errors.SpecError,
        "argument",
    ),
    "no neighbours": (
        lambda: px.jit(
            torch.sin, mesh=two(data=2, model=2), in_specs=P(("data", "model")), **ordered, logical_shards=SHARDS
        )(X),
        px.errors.SpecError,
        "'data': 2",
    ),
    "a sum that stays owed": (
        lambda: px.jit(lambda x: x.sum(0), mesh=two(), in_specs=P("data"), out_specs=P(unreduced=("data",)), **ordered)(
            X
        ),
        px.errors.SpecError,
        "addends would depend",
    ),
    "inside a fast step": (
        lambda: px.jit(px.jit(torch.sin, mesh=two(), **ordered), mesh=two())(X),
        px.errors.TraceError,
        'reductions="ordered" too',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, told = REFUSED[name]
    with pytest.raises(error, match=re.escape(told)):
        call()
