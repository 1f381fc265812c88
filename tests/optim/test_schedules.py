"""Schedules equal optax's at every count, as numbers, as 0-d tensors and elementwise."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
import torch

from ptrainx import optim

COUNTS = [*range(40), 99, 100, 101, 1000, 10**6]

CASES = {
    "constant": lambda o: o.constant_schedule(0.3),
    "linear": lambda o: o.linear_schedule(0.1, 1.0, 10),
    "linear, late": lambda o: o.linear_schedule(1.0, 0.2, 7, 5),
    "cosine": lambda o: o.cosine_decay_schedule(0.5, 30),
    "cosine, floor and exponent": lambda o: o.cosine_decay_schedule(0.5, 30, 0.1, 2.0),
    "warmup": lambda o: o.warmup_cosine_decay_schedule(0.0, 1.0, 10, 100),
    "warmup, floor": lambda o: o.warmup_cosine_decay_schedule(0.1, 1.0, 10, 100, 0.05, 1.5),
    "no warmup": lambda o: o.warmup_cosine_decay_schedule(0.1, 1.0, 0, 30, 0.05),
    "peak of zero": lambda o: o.warmup_cosine_decay_schedule(0.0, 0.0, 3, 30),
    "exponential": lambda o: o.exponential_decay(1.0, 10, 0.5),
    "exponential, stairs": lambda o: o.exponential_decay(1.0, 10, 0.5, staircase=True),
    "exponential, late and bounded": lambda o: o.exponential_decay(1.0, 3, 0.9, 5, end_value=0.3),
    "exponential growth": lambda o: o.exponential_decay(0.01, 5, 1.1, end_value=0.02),
    "piecewise": lambda o: o.piecewise_constant_schedule(0.7, {20: 0.5, 5: 0.1, 100: 0.0}),
    "piecewise of one": lambda o: o.piecewise_constant_schedule(0.7),
    "joined": lambda o: o.join_schedules(
        [o.constant_schedule(0.1), o.linear_schedule(0.1, 1.0, 5), o.exponential_decay(1.0, 5, 0.8)], [4, 12]
    ),
    "joined functions of the user's": lambda o: o.join_schedules([lambda c: 0.5, lambda c: 2.0**-3 * (1.0 + c)], [10]),
}


@pytest.mark.parametrize("name", CASES)
def test_schedule_equals_optax(name):
    with jax.enable_x64(True):
        theirs = CASES[name](optax)
        expected = np.array([float(theirs(jax.numpy.asarray(count, jax.numpy.float64))) for count in COUNTS])
    ours = CASES[name](optim)
    as_numbers = [ours(count) for count in COUNTS]
    as_scalars = [ours(torch.tensor(count)) for count in COUNTS]
    at_once = ours(torch.tensor(COUNTS))
    assert {type(value) for value in as_numbers} == {float}
    assert {(value.dtype, value.shape) for value in as_scalars} == {(torch.float64, ())}
    assert (at_once.dtype, at_once.shape) == (torch.float64, (len(COUNTS),))
    for found in (as_numbers, torch.stack(as_scalars), at_once):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_short_names_are_the_same_functions():
    assert optim.constant is optim.constant_schedule
    assert optim.cosine_decay is optim.cosine_decay_schedule
    assert optim.warmup_cosine_decay is optim.warmup_cosine_decay_schedule
