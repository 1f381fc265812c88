"""Stochastic rounding: to a neighbour, without bias, the same bits on every mesh."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.errors import InputError
from tests.compile.programs import values

KEY = px.random.key(7)
SAMPLES = 1 << 16


def bits(x):
    return x.view(torch.int16)


def by_numpy(x: torch.Tensor) -> np.ndarray:
    """The upper halves of the sums of each number's bits and sixteen of the key's random bits."""
    noise = px.random.bits(KEY, x.shape).numpy().view(np.uint32) & 0xFFFF
    return ((x.numpy().view(np.uint32) + noise) >> 16).astype(np.uint16).view(np.int16)


def test_the_rule_over_all_sizes_of_numbers():
    x = values(64, 64) * 2.0 ** (torch.arange(64) * 4 - 140)  # subnormal ones to nearly the largest
    assert np.array_equal(bits(px.random.stochastic_round(KEY, x)).numpy(), by_numpy(x))


@pytest.mark.parametrize("sixteenths", [0, 1, 5, 8, 15])
@pytest.mark.parametrize("start", [1.0, -3.0, 1e-30])
def test_it_goes_up_with_the_probability_of_the_fraction(start, sixteenths):
    low = torch.tensor(start).bfloat16()
    high = (low.view(torch.int16) + 1).view(torch.bfloat16)
    step = (high.float() - low.float()) / 16
    x = (low.float() + sixteenths * step).expand(SAMPLES)
    rounded = px.random.stochastic_round(KEY, x)
    assert set(rounded.unique().tolist()) <= {low.item(), high.item()}
    share, wanted = (rounded == high).double().mean().item(), sixteenths / 16
    assert abs(share - wanted) <= 5 * math.sqrt(wanted * (1 - wanted) / SAMPLES)


def test_what_bfloat16_holds_stays():
    x = torch.tensor([0.0, -0.0, 1.5, -(2.0**100), float("inf"), -float("inf"), 1e-40]).bfloat16()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(bits(px.random.stochastic_round(KEY, x.to(dtype))), bits(x))
    assert px.random.stochastic_round(KEY, torch.tensor([float("nan")] * 64)).isnan().all()


@pytest.mark.parametrize(
    ("axes", "spec", "backend"),
    [
        ({"data": 2}, P("data"), "graph"),
        ({"data": 4}, P(None, "data"), "graph"),
        ({"data": 2, "model": 2}, P("model", "data"), "graph"),
        ({"data": 2}, P(None, "data"), "inductor"),
        ({"data": 2}, P("data"), "eager"),
    ],
    ids=str,
)
def test_the_same_bits_on_every_mesh_without_communication(axes, spec, backend):
    mesh, x = px.make_mesh(axes, simulate=True), values(8, 12) * 3
    step = px.jit(px.random.stochastic_round, mesh=mesh, in_specs=(P(), spec), backend=backend)
    rounded = step(KEY, x)
    assert np.array_equal(bits(px.device_get(rounded)).numpy(), by_numpy(x))
    assert px.spec_of(rounded) == px.spec_of(px.device_put(x, spec, mesh))
    if backend == "graph":
        assert step.comms(KEY, x).total_bytes == 0


def test_owed_sums_are_paid_first():
    mesh, x, w = px.make_mesh(data=2, simulate=True), values(4, 8), values(8, 4)
    specs = (P(None, "data"), P("data"))
    step = px.jit(lambda x, w: px.random.stochastic_round(KEY, x @ w), mesh=mesh, in_specs=specs)
    whole = sum((a.double() @ b.double()).float() for a, b in zip(x.chunk(2, 1), w.chunk(2)))
    near = px.device_get(step(x, w)).float()
    assert ((near - whole).abs() <= whole.abs() * 2**-7 + 1e-6).all()


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: px.random.stochastic_round(0, torch.ones(2)), ("key is not a random key", "px.random.key(0)")),
        (lambda: px.random.stochastic_round(KEY, torch.arange(2)), ("not a tensor of floats", "i64[2]")),
        (lambda: px.random.stochastic_round(KEY, torch.ones(2), torch.float16), ("torch.float16", "x.to(dtype)")),
    ],
)
def test_mistakes(call, parts):
    with pytest.raises(InputError) as caught:
        call()
    assert all(part in str(caught.value) for part in parts)
