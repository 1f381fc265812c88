"""Parameters in bfloat16: updates too small for them, by master copies or by stochastic rounding."""

from __future__ import annotations

import math

import pytest
import torch

import ptrainx as px
from ptrainx import P, optim
from ptrainx.errors import HyperparameterError, InputError
from tests.compile.programs import values

KEY = px.random.key(5)
START = {"w": (values(8, 4) + 1).bfloat16(), "b": values(4, seed=1)}
SPECS = {"w": P("data"), "b": P()}


def gradients(params, step):
    return px.tree.map(lambda p: torch.sin(p.float() * (step + 1)).to(p.dtype), params)


def test_master_copies_are_what_torch_computes_in_float32():
    master = px.tree.map(lambda p: torch.nn.Parameter(p.float()), START)
    theirs = torch.optim.SGD(master.values(), lr=1e-3, momentum=0.9)
    ours = optim.with_master(optim.sgd(1e-3, momentum=0.9))
    params, state = START, ours.init(START)
    for step in range(20):
        grads = gradients(params, step)
        for name, leaf in master.items():
            leaf.grad = grads[name].float()
        theirs.step()
        updates, state = ours.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        for name, leaf in master.items():
            torch.testing.assert_close(state.master[name], leaf.detach(), rtol=1e-6, atol=1e-7)
            assert params[name].dtype == START[name].dtype
            assert torch.equal(params[name], state.master[name].to(params[name].dtype))


def run(steps, sharded, key=None):
    """A jitted run over two devices, or one without any."""
    optimizer = optim.with_master(optim.adam(1e-3)) if key is None else optim.adam(1e-4)

    def step(params, state, count):
        updates, state = optimizer.update(gradients(params, count), state, params)
        return optim.apply_updates(params, updates, key=key and px.random.fold_in(KEY, count)), state

    state_specs = px.match_rules([(r"(^|/)w$", P("data")), (r".*", P())], px.eval_shape(optimizer.init, START))
    if sharded:
        specs = (SPECS, state_specs)
        step = px.jit(step, mesh=px.make_mesh(data=2, simulate=True), in_specs=(*specs, P()), out_specs=specs)
    params, state = START, optimizer.init(START)
    for count in range(steps):
        params, state = step(params, state, torch.tensor(count))
    return px.device_get(params)


@pytest.mark.parametrize("key", [None, True], ids=["master", "stochastic"])
def test_sharded_parameters_have_the_bits_of_one_device(key):
    ours, expected = run(3, True, key), run(3, False, key)
    assert torch.equal(ours["w"], expected["w"])
    torch.testing.assert_close(ours["b"], expected["b"])


def test_small_updates_count_on_average_where_the_nearest_loses_them():
    steps, size, update = 200, 4096, 2.0**-12  # the spacing above 1 is 2**-7
    params = nearest = torch.ones(size, dtype=torch.bfloat16)
    for step in range(steps):
        params = optim.apply_updates(params, torch.full((size,), update), key=px.random.fold_in(KEY, step))
        nearest = optim.apply_updates(nearest, torch.full((size,), update))
    assert (nearest == 1).all()
    deviation = math.sqrt(steps * update * (2**-7 - update) / size)
    assert abs(params.double().mean().item() - (1 + steps * update)) < 5 * deviation


def test_leaves_are_rounded_by_bits_of_their_own_and_others_to_the_nearest():
    params = {"a": torch.ones(512).bfloat16(), "b": torch.ones(512).bfloat16(), "c": torch.ones(3), "d": None}
    updates = {"a": torch.full((512,), 2.0**-8), "b": torch.full((512,), 2.0**-8), "c": torch.ones(3), "d": None}
    out = optim.apply_updates(params, updates, key=KEY)
    assert not torch.equal(out["a"], out["b"])
    assert torch.equal(out["c"], torch.full((3,), 2.0))
    assert torch.equal(optim.apply_updates(params, {**updates, "a": None}, key=KEY)["b"], out["b"])


def test_mistakes():
    with pytest.raises(HyperparameterError, match=r"with_master: dtype[\s\S]*torch.bfloat16[\s\S]*float32"):
        optim.with_master(optim.sgd(0.1), torch.bfloat16)
    with pytest.raises(HyperparameterError, match="with_master: inner is no gradient transformation"):
        optim.with_master(optim.sgd)
    optimizer = optim.with_master(optim.sgd(0.1))
    with pytest.raises(InputError, match=r"with_master\.update: params is missing"):
        optimizer.update(START, optimizer.init(START))
    with pytest.raises(InputError, match="key is not a random key"):
        optim.apply_updates(START, START, key=3)


def test_parameters_are_gathered_in_bfloat16_where_their_master_copies_lie_in_parts():
    optimizer, specs = optim.with_master(optim.adam(1e-3)), {"w": P(), "b": P()}
    state = optimizer.init(START)
    state_specs = px.match_rules([(r"(^|/)w$", P("data")), (r".*", P())], state)

    def step(params, state, x):
        grads = px.grad(lambda p: ((x @ p["w"].float()).sum(1) * p["b"].sum()).sum(), reduce=False)(params)
        grads = px.reshard(grads, {"w": P("data"), "b": P()})
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    mesh, args = px.make_mesh(data=2, simulate=True), (START, state, values(4, 8))
    step = px.jit(step, mesh=mesh, in_specs=(specs, state_specs, P("data")), out_specs=(specs, state_specs))
    gathers = [row.bytes for row in step.comms(*args) if row.kind == "all_gather"]
    assert gathers == [START["w"].numel() // 2 * 2]
    params, state = step(*args)
    assert torch.equal(px.device_get(params)["w"], px.device_get(state).master["w"].bfloat16())
