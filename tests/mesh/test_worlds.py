"""Real worlds: placing and fetching on gloo, worlds that end and begin again, simulated meshes beside them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import InputError, MeshError
from ptrainx.mesh import (
    Mesh,
    P,
    block_until_ready,
    current_world,
    device_get,
    device_put,
    from_process_local,
    initialize,
    make_mesh,
    shutdown,
    spec_of,
)
from ptrainx.mesh.placement import local_block
from ptrainx.mesh.transfer import reshard_value, same_mesh

SPECS = [
    P(),
    P("data"),
    P("model"),
    P(None, "model"),
    P("data", "model"),
    P("model", "data"),
    P(("data", "model")),
    P(unreduced="data"),
    P("model", unreduced="data"),
]


def a_value(dtype=torch.float32) -> torch.Tensor:
    return torch.arange(64).reshape(8, 8).to(dtype)


# Run in each process of a pool; what they assert, they assert on every rank.


def places_and_fetches(axes):
    mesh = make_mesh(axes)
    assert mesh.rank == dist.get_rank()
    assert mesh.coords == mesh.rank_coords(mesh.rank)
    moves = 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = a_value(dtype)
        for spec in SPECS if dtype is torch.float32 else SPECS[4:]:
            placed = device_put(x, spec, mesh)
            owes = any(dict(zip(mesh.axis_names, mesh.coords))[axis] for axis in spec.unreduced)
            block = x[local_block(spec, mesh, x.shape, mesh.rank)]
            assert placed.to_local().equal(torch.zeros_like(block) if owes else block)
            assert spec_of(placed) == spec
            if dtype is torch.bool and spec.unreduced:
                continue  # gloo has no sum of booleans
            assert device_get(placed).equal(x), (spec, dtype)
            for target in SPECS[1::3] if dtype is torch.float32 else ():
                moved = device_put(placed, target)
                assert not isinstance(moved._local_tensor, tc.AsyncCollectiveTensor)
                assert device_get(moved).equal(x), (spec, target)
                moves += 1
    return moves


@pytest.mark.processes
@pytest.mark.parametrize(
    ("axes", "world"),
    [({"data": 2, "model": 1}, 2), ({"data": -1, "model": 2}, 2), ({"data": 2, "model": 2}, 4)],
    ids=str,
)
def test_device_put_and_get_on_gloo(pool, axes, world):
    assert pool.run(places_and_fetches, world, axes) == [len(SPECS) * 3] * world


def takes_its_own_rows():
    mesh = make_mesh(data=-1)
    rank, n = mesh.rank, mesh.size
    rows = {
        "x": np.arange(6.0).reshape(2, 3) + 10 * rank,
        "y": torch.full((1,), rank),
        "k": 7,
        "s": torch.ones(2) * rank,
    }
    batch = from_process_local(rows, {"x": P("data"), "y": P("data"), "k": None, "s": P(unreduced="data")}, mesh)
    rows["x"][:] = 0
    assert type(batch["k"]) is torch.Tensor
    assert batch["x"].shape == (2 * n, 3)
    right = np.concatenate([np.arange(6.0).reshape(2, 3) + 10 * r for r in range(n)])
    np.testing.assert_array_equal(device_get(batch["x"]).numpy(), right)
    assert device_get(batch["y"]).tolist() == list(range(n))
    assert device_get(batch["s"]).tolist() == [sum(range(n))] * 2
    columns = from_process_local(torch.full((2, 1), rank), P(None, "data"), mesh)
    assert device_get(columns).tolist() == [list(range(n))] * 2
    block_until_ready(batch)
    return True


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
def test_from_process_local_on_gloo(pool, world):
    assert all(pool.run(takes_its_own_rows, world))


def brings_uneven_rows():
    os.environ["PTRAINX_CHECK_INPUTS"] = "1"
    try:
        mesh = make_mesh(data=-1)
        with pytest.raises(
            InputError, match=r"\['x'\]: the ranks' parts differ\n  got: +f32\[1\] on rank 0, f32\[2\] on"
        ):
            from_process_local(
                {"n": 1, "x": torch.zeros(1 + mesh.rank)}, P("data") and {"n": None, "x": P("data")}, mesh
            )
        return from_process_local(torch.zeros(3), P("data"), mesh).shape == (6,)
    finally:
        del os.environ["PTRAINX_CHECK_INPUTS"]


@pytest.mark.processes
def test_uneven_parts_are_told_when_checked(pool):
    assert all(pool.run(brings_uneven_rows, 2))


def asks_for_too_much():
    with pytest.raises(MeshError) as caught:
        make_mesh(data=4, model=2)
    return str(caught.value)


def asks_for_too_little():
    with pytest.raises(MeshError) as caught:
        make_mesh(data=1)
    return str(caught.value)


@pytest.mark.processes
def test_a_mesh_of_another_size_than_the_world(pool):
    larger = pool.run(asks_for_too_much, 2)[1]
    assert "data=4, model=2 needs 8 devices, this world has 2 processes" in larger
    assert "`ptrainx run -n 8" in larger
    assert "simulate=True" in larger
    smaller = pool.run(asks_for_too_little, 2)[0]
    assert "data=1 needs 1 device, this world has 2 processes" in smaller
    assert "`ptrainx run -n 1" in smaller


def adopts_a_device_mesh():
    initialize()
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    x = a_value()
    value = distribute_tensor(x, whole, [Shard(0), Shard(1)])
    moved = device_put(value, P("model"))
    assert spec_of(moved) == P("model")
    assert device_get(moved).equal(x)
    ours = make_mesh(data=2, model=2)
    assert same_mesh(value, ours)
    assert Mesh.from_device_mesh(whole) == ours
    # A slice: two of the four processes, each pair with its own.
    part = Mesh.from_device_mesh(whole["model"])
    assert part.shape == {"model": 2}
    assert part.coords == (dist.get_rank() % 2,)
    row = device_put(x + part.rank * 0, P("model"), part)
    assert row.to_local().equal(x[4 * part.rank : 4 * part.rank + 4])
    assert device_get(row).equal(x)
    return True


@pytest.mark.processes
def test_a_device_mesh_of_torch_and_its_slices(pool):
    assert all(pool.run(adopts_a_device_mesh, 4))


def says_that_it_has_ended(call):
    try:
        call()
    except MeshError as error:
        return "belongs to a world that has ended" in str(error)
    return False


def leaves_and_joins_again():
    x = a_value()
    epochs = []
    old = None
    for axes in ({"data": 2}, {"data": 2}, {"model": 2}, {"data": 1, "model": 2}):
        mesh = make_mesh(axes)
        axis = mesh.axis_names[-1]
        value = device_put(x, P(axis), mesh)
        # Operations fill DTensor's caches, which a later world with the same ranks must not meet.
        assert device_get(value @ value.t()).equal(x @ x.t())
        assert device_get(value.sum(0)).equal(x.sum(0))
        assert device_get(reshard_value(value, P(None, axis), mesh)).equal(x)
        if old is not None:
            old_mesh, old_value = old
            assert old_mesh != mesh
            assert not same_mesh(old_value, mesh)
            refused = [
                lambda m=old_mesh: m.check_alive(),
                lambda v=old_value: device_get(v),
                lambda v=old_value: device_put(v, P()),
                lambda v=old_value, m=mesh: device_put(v, P(), m),
                lambda m=old_mesh: device_put(x, P(), m),
                lambda m=old_mesh: from_process_local(x, P(), m),
                lambda v=old_value, w=value: device_put([w, v], P()),
                lambda v=old_value, m=mesh: reshard_value(v, P(), m),
                lambda v=old_value: Mesh.from_device_mesh(v.device_mesh).check_alive(),
            ]
            for i, call in enumerate(refused):
                assert says_that_it_has_ended(call), i
        old = mesh, value
        epochs.append(mesh.epoch)
        shutdown()
        assert not dist.is_initialized()
        with pytest.raises(MeshError, match="belongs to a world that has ended"):
            device_get(value)
    return np.diff(epochs).tolist()


@pytest.mark.processes
def test_a_world_ends_and_begins_again_in_one_process(pool):
    assert pool.run(leaves_and_joins_again, 2) == [[1, 1, 1]] * 2


def test_a_world_of_one_ends_and_begins_again():
    x = a_value()
    shutdown()
    mesh = make_mesh(data=1)
    value = device_put(x, P("data"), mesh)
    dist.destroy_process_group()  # not by us
    for call in (lambda: device_get(value), mesh.check_alive, lambda: device_put(x, P(), mesh)):
        with pytest.raises(MeshError, match="belongs to a world that has ended"):
            call()
    again = make_mesh(data=1)
    assert again != mesh
    assert again.epoch == mesh.epoch + 1
    assert not same_mesh(value, again)
    with pytest.raises(MeshError, match="belongs to a world that has ended"):
        device_get(value)
    assert device_get(device_put(x, P("data"), again)).equal(x)
    assert initialize() == current_world() == initialize()
    shutdown()
    shutdown()


def test_a_user_made_value_of_an_ended_world_is_refused():
    initialize()
    value = distribute_tensor(a_value(), init_device_mesh("cpu", (1,), mesh_dim_names=("data",)))
    shutdown()
    initialize()
    for call in (lambda: device_get(value), lambda: Mesh.from_device_mesh(value.device_mesh)):
        with pytest.raises(MeshError, match="belongs to a world that has ended"):
            call()
    shutdown()


def works_on(simulated, seed=0):
    """Eager operations on a simulated mesh, held against one device."""
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    w = device_put(x, P("data", "model"), simulated).requires_grad_()
    loss = torch.tanh(w @ w.t()).mean() + w.sum()
    loss.backward()
    plain = x.clone().requires_grad_()
    right = torch.tanh(plain @ plain.t()).mean() + plain.sum()
    right.backward()
    torch.testing.assert_close(loss.item(), right.item())
    torch.testing.assert_close(device_get(w.grad), plain.grad)
    assert device_get(w.redistribute()).equal(x)
    assert torch.equal(w, w.detach().clone())
    assert f"{w.sum():.3f}" == f"{x.sum():.3f}"
    return w


def test_a_simulated_mesh_outlives_a_world():
    mesh = make_mesh(data=2, model=4, simulate=True)
    value = works_on(mesh)
    x = value.detach().full_tensor()
    for _ in range(2):
        make_mesh(data=1)
        works_on(mesh)
        dist.destroy_process_group()
        assert device_get(value.detach()).equal(x)
        assert device_get(value.sum(0)).allclose(x.sum(0))
        works_on(mesh)


def simulates_beside_a_real_world():
    """Each rank simulates another mesh, at another pace, between real collectives; nobody waits for anybody."""
    real = make_mesh(data=-1)
    rank = real.rank
    ours = make_mesh(data=2, model=4, simulate=True) if rank == 0 else make_mesh(data=4, model=2, simulate=True)
    shared = torch.arange(8.0).reshape(4, 2)
    value = device_put(shared, P("data"), real)
    groups = set(dist.distributed_c10d._world.pg_names.values())
    for round_ in range(3):
        for _ in range(1 + rank):
            works_on(ours, rank)
        assert device_get(value + round_).equal(shared + round_)
        assert (value * 2).sum().full_tensor() == 56
    assert set(dist.distributed_c10d._world.pg_names.values()) == groups
    assert isinstance(value, DTensor)
    with pytest.raises(MeshError, match="different meshes"):
        device_put(shared, P(), ours) + value
    dist.destroy_process_group()
    works_on(ours, rank)
    return True


@pytest.mark.processes
def test_a_simulated_mesh_inside_a_real_world(pool):
    assert all(pool.run(simulates_beside_a_real_world, 2))


def simulates_alone_while_the_others_wait():
    real = make_mesh(data=-1)
    if real.rank == 0:  # a collective of the real world in here would hang
        works_on(make_mesh(data=2, model=2, simulate=True))
    return device_get(device_put(torch.arange(4.0), P("data"), real)).tolist()


@pytest.mark.processes
def test_only_one_rank_simulates(pool):
    assert pool.run(simulates_alone_while_the_others_wait, 2) == [[0, 1, 2, 3]] * 2
