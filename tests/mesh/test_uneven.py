"""Dims that an axis does not divide: parts as `torch.chunk` cuts them, the last ones smaller or empty.

The right answer is torch's on one device: `torch.chunk` for what a rank holds, plain tensors for what a step gives,
`torch.optim.AdamW` for what an optimizer does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import ptrainx as px
from ptrainx import P
from ptrainx.mesh.simulated import local_tensors
from tests.support.pool import Pool

MESHES = {"2": {"data": 2}, "4": {"data": 4}, "2x2": {"data": 2, "model": 2}}

# rows: uneven, fewer than ranks, one
ROWS = [7, 3, 1]


def value(*shape: int) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return torch.sin(torch.arange(n, dtype=torch.float64) * 1.7 + n).reshape(shape)


def chunks(x: torch.Tensor, n: int, dim: int = 0) -> list[torch.Tensor]:
    """`torch.chunk`, filled up with empty parts."""
    parts = list(x.chunk(n, dim))
    return parts + [x.narrow(dim, 0, 0)] * (n - len(parts))


def trained(params: dict[str, torch.Tensor], x: torch.Tensor, steps: int) -> dict[str, torch.Tensor]:
    """The parameters after some steps of torch's AdamW, on one device."""
    params = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = torch.optim.AdamW(params.values(), lr=0.1, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(params, x).backward()
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def loss_of(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    hidden = F.layer_norm(torch.tanh(x @ params["in"] + params["bias"]), (params["bias"].shape[0],))
    return (hidden @ params["out"]).softmax(-1).square().mean()


def parameters() -> dict[str, torch.Tensor]:
    return {"in": value(6, 5), "bias": value(5), "out": value(5, 3)}


def placements(axis: str) -> dict[str, dict[str, P]]:
    """How parameters are placed: state on an axis by rows, and by columns."""
    return {
        "rows": {"in": P(axis), "bias": P(axis), "out": P(axis)},
        "columns": {"in": P(None, axis), "bias": P(axis), "out": P(None, axis)},
        "replicated": {"in": P(), "bias": P(), "out": P()},
    }


def differences(mesh: px.Mesh, kind: str, rows: int, steps: int = 2) -> list[str]:
    """Trains with state on the mesh's last axis and rows of the batch on its first, and compares with one device."""
    specs = placements(mesh.axis_names[-1])[kind]
    optimizer = px.optim.adamw(0.1, weight_decay=0.1)

    @px.jit(mesh=mesh, out_specs=(specs, None))
    def step(params: Any, state: Any, x: torch.Tensor) -> Any:
        grads = px.grad(loss_of)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return px.optim.apply_updates(params, updates), state

    params = px.device_put(parameters(), specs, mesh)
    state = px.jit(optimizer.init, mesh=mesh)(params)
    batch = px.device_put(value(rows, 6), P(mesh.axis_names[0]), mesh)
    for _ in range(steps):
        params, state = step(params, state, batch)
    want, got = trained(parameters(), value(rows, 6), steps), px.device_get(params)
    found = [name for name in want if not torch.allclose(got[name], want[name], rtol=1e-9, atol=1e-12)]
    return found + [name for name in want if px.spec_of(params[name]) != specs[name]]


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("rows", ROWS)
def test_values_go_onto_a_mesh_and_come_back(axes: str, rows: int) -> None:
    mesh = px.make_mesh(MESHES[axes], simulate=True)
    x = value(rows, 5)
    for spec, dim in ((P("data"), 0), (P(None, "data"), 1)):
        placed = px.device_put(x, spec, mesh)
        parts = chunks(x, MESHES[axes]["data"], dim)
        for rank, part in local_tensors(placed).items():
            assert torch.equal(part, parts[mesh.rank_coords(rank)[0]])
        assert torch.equal(px.device_get(placed), x)
        assert torch.equal(px.device_get(px.reshard(placed, P(None, "data"))), x)


def test_only_the_last_axis_of_a_dim_cuts_unevenly() -> None:
    mesh = px.make_mesh(MESHES["2x2"], simulate=True)
    assert [p.shape[0] for p in local_tensors(px.device_put(value(6), P(("data", "model")), mesh)).values()] == [
        2,
        1,
        2,
        1,
    ]
    with pytest.raises(px.errors.SpecError, match="dim 0 of size 5 is not divisible by data=2"):
        px.device_put(value(5), P(("data", "model")), mesh)


@pytest.mark.parametrize("axes", MESHES)
def test_boundaries_of_a_step(axes: str) -> None:
    mesh = px.make_mesh(MESHES[axes], simulate=True)

    @px.jit(mesh=mesh, in_specs=(P("data"), P(None, "data")), out_specs=(P("data"), P(None, "data"), P()))
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x @ w
        return y, px.reshard(y[:3], P("data")) * 2, y.max()

    x, w = value(7, 5), value(5, 3)
    y = x @ w
    assert_close(px.device_get(step(x, w)), (y, y[:3] * 2, y.max()))


def test_draws_are_those_of_one_device() -> None:
    def draw(key: torch.Tensor) -> torch.Tensor:
        return px.random.normal(key, (7, 3))

    want = draw(px.random.key(3))
    for axes in MESHES:
        mesh = px.make_mesh(MESHES[axes], simulate=True)
        assert torch.equal(px.device_get(px.jit(draw, mesh=mesh, out_specs=P("data"))(px.random.key(3))), want)


@pytest.mark.parametrize(("axes", "kind", "rows"), [("2", "rows", 7), ("4", "columns", 3), ("2x2", "rows", 1)])
def test_training_is_that_of_one_device(axes: str, kind: str, rows: int) -> None:
    assert differences(px.make_mesh(MESHES[axes], simulate=True), kind, rows) == []


def test_the_last_batch_of_an_epoch() -> None:
    mesh = px.make_mesh(data=4, simulate=True)
    samples = value(9, 2)
    loader = px.data.Loader(samples, batch_size=4, mesh=mesh, last="keep", shuffle=False, epochs=1)
    batches = list(loader)
    assert [b.shape[0] for b in batches] == [4, 4, 1]
    assert [p.shape[0] for p in local_tensors(batches[-1]).values()] == [1, 0, 0, 0]
    assert torch.equal(torch.cat(px.device_get(batches)), samples)


def test_one_rank_at_a_time_wants_equal_parts() -> None:
    mesh = px.make_mesh(data=2, simulate=True)
    mapped = px.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(px.errors.SpecError, match=r"dim 0 of size 7 is not divisible by data=2[\s\S]*pad dim 0 to 8"):
        mapped(value(7, 2))


def on_real_ranks() -> list[str]:
    """Training, with rows on one axis and state on the other, and round trips."""
    found = []
    for axes in ("2x2", "4"):
        mesh, x = px.make_mesh(MESHES[axes]), value(3, 5)
        if axes == "2x2":
            found += differences(mesh, "rows", rows=3, steps=1)
        if not torch.equal(px.device_get(px.reshard(px.device_put(x, P("data"), mesh), P(None, "data"))), x):
            found.append(f"round trip on {mesh}")
    return found


def test_real_processes(pool: Pool) -> None:
    assert pool.run(on_real_ranks, 4) == [[]] * 4
