"""Over DTensors: state is placed like the parameters, values are the single device's, only the norm communicates."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from ptrainx import optim
from ptrainx.core import tree
from ptrainx.mesh import P, device_get, device_put, make_mesh

SPECS = {"a": P("data"), "b": P(None, "model"), "c": P("data", "model"), "d": P(("data", "model")), "e": P(), "f": P()}

OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "nesterov": optim.momentum(0.1, nesterov=True),
    "adamw": optim.adamw(optim.warmup_cosine_decay_schedule(0.01, 0.1, 2, 10), weight_decay=0.1),
    "adamw, masked": optim.adamw(0.1, weight_decay=0.1, mask={"a": True, **dict.fromkeys("bcdef", False)}),
    "clipped": optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1)),
    "clipped by element": optim.chain(optim.clip(0.3), optim.sgd(0.1)),
    "lion": optim.lion(0.1),
    "rmsprop": optim.rmsprop(0.1),
    "adagrad": optim.adagrad(0.1),
    "injected": optim.inject_hyperparams(optim.adamw)(0.1, weight_decay=0.1),
}


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn((8, 4) if name != "f" else (), generator=generator) for name in SPECS}


def steps(optimizer, params):
    state = optimizer.init(params)
    for _ in range(3):
        grads = tree.map(lambda p: (2 * p).sin(), params)
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_steps_equal_the_single_device(name):
    mesh = make_mesh(data=2, model=2, simulate=True)
    placed = device_put(values(), SPECS, mesh)
    ours, state = steps(OPTIMIZERS[name], placed)
    expected, expected_state = steps(OPTIMIZERS[name], values())
    torch.testing.assert_close(device_get(ours), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        tree.leaves(device_get(state)), tree.leaves(expected_state), rtol=1e-6, atol=1e-6, check_dtype=True
    )
    for leaf, param in zip(tree.leaves(ours), tree.leaves(placed)):
        if isinstance(param, DTensor):  # a 0-d parameter is a plain tensor
            assert leaf.placements == param.placements


def test_moments_take_their_parameters_placement():
    mesh = make_mesh(data=2, model=2, simulate=True)
    placed = device_put(values(), SPECS, mesh)
    _, (adam, _, _) = steps(optim.adamw(0.1), placed)
    for moments in (adam.mu, adam.nu):
        for name in "abcde":
            assert moments[name].placements == placed[name].placements


def test_global_norm_of_unreduced_leaves():
    mesh = make_mesh(data=2, model=2, simulate=True)
    whole = values()
    placed = device_put(whole, SPECS, mesh)
    sums = {"rows": placed["a"].sum(0), "columns": placed["c"].sum(1), "plain": placed["b"]}
    assert any(p.is_partial() for p in sums["rows"].placements)
    expected = torch.cat([whole["a"].sum(0), whole["c"].sum(1), whole["b"].flatten()]).double().norm().float()
    torch.testing.assert_close(device_get(optim.global_norm(sums)), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_global_norm_of_halves_is_summed_in_float32(dtype):
    value = torch.full((1000,), 300.0, dtype=dtype)  # 300**2 is beyond float16
    norm = optim.global_norm([value, value])
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.cat([value, value]).double().norm().float(), rtol=1e-6, atol=0)


def test_global_norm_of_nothing_is_zero():
    assert optim.global_norm({"a": None}) == 0


def on_real_ranks() -> dict:
    mesh = make_mesh(data=2, model=2)
    placed = device_put(values(), SPECS, mesh)
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1))
    state = optimizer.init(placed)
    with CommDebugMode() as communication:
        updates, state = optimizer.update(placed, state, placed)
        optim.apply_updates(placed, updates)
    counts = {str(op): count for op, count in communication.get_comm_counts().items()}
    return {"counts": counts, "params": device_get(steps(optimizer, placed)[0])}


@pytest.mark.processes
def test_one_all_reduce_a_mesh_axis_pays_for_the_norm_of_all_leaves(pool):
    expected, _ = steps(optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1)), values())
    for result in pool.run(on_real_ranks, 4):
        assert result["counts"] == {"c10d_functional.all_reduce": 2}
        torch.testing.assert_close(result["params"], expected, rtol=1e-6, atol=1e-6)
