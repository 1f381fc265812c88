"""Trajectories equal optax's: the same gradients go to both."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
import torch

from ptrainx import optim
from ptrainx.core import tree
from tests.optim.problem import STEPS, gradient, start


def in_float(schedule):
    """optax counts in int32, which its schedules divide in float32 even where float64 is enabled."""
    return lambda count: schedule(count.astype(float))


PAIRS = {
    "sgd": (optim.sgd(0.1), lambda: optax.sgd(0.1)),
    "nesterov": (optim.sgd(0.05, 0.9, True), lambda: optax.sgd(0.05, 0.9, True)),
    "adam": (optim.adam(0.05), lambda: optax.adam(0.05)),
    "adamw": (optim.adamw(0.05), lambda: optax.adamw(0.05)),
    "adamw, scheduled": (
        optim.adamw(optim.warmup_cosine_decay_schedule(0.0, 0.1, 5, 20), b1=0.8, weight_decay=0.1),
        lambda: optax.adamw(in_float(optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 20)), b1=0.8, weight_decay=0.1),
    ),
    "lion": (optim.lion(0.01, weight_decay=0.1), lambda: optax.lion(0.01, weight_decay=0.1)),
    "rmsprop": (optim.rmsprop(0.01), lambda: optax.rmsprop(0.01)),
    "rmsprop, nesterov": (
        optim.rmsprop(0.01, 0.8, 1e-4, 1.0, True, 0.5, True),
        lambda: optax.rmsprop(0.01, 0.8, 1e-4, 1.0, True, momentum=0.5, nesterov=True),
    ),
    "adagrad": (optim.adagrad(0.1), lambda: optax.adagrad(0.1)),
    "adagrad from zero": (optim.adagrad(0.1, 0.0, 0.0), lambda: optax.adagrad(0.1, 0.0, 0.0)),
    "clipped by norm": (
        optim.chain(optim.clip_by_global_norm(0.3), optim.adamw(0.05)),
        lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.05)),
    ),
    "clipped by element": (
        optim.chain(optim.clip(0.02), optim.trace(0.5), optim.scale(-0.3)),
        lambda: optax.chain(optax.clip(0.02), optax.trace(0.5), optax.scale(-0.3)),
    ),
    "ascent": (
        optim.scale_by_learning_rate(0.01, flip_sign=False),
        lambda: optax.scale_by_learning_rate(0.01, flip_sign=False),
    ),
    "masked": (
        optim.chain(optim.masked(optim.scale(0.1), {"layers": True, "gain": False, "unused": None}), optim.sgd(0.1)),
        lambda: optax.chain(
            optax.masked(optax.scale(0.1), {"layers": True, "gain": False, "unused": None}), optax.sgd(0.1)
        ),
    ),
}

# optax corrects Adam's bias in the parameters' precision: 1 - 0.999**t has 1e-5 of rounding in float32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_trajectory_equals_optax(name, dtype):
    ours, make_theirs = PAIRS[name]
    with jax.enable_x64(dtype == torch.float64):
        theirs = make_theirs()
        params = start(dtype)
        twin = to_numpy(params)
        state, twin_state = ours.init(params), theirs.init(twin)
        for _ in range(STEPS):
            grads = gradient(params)
            updates, state = ours.update(grads, state, params)
            params = optim.apply_updates(params, updates)
            twin_updates, twin_state = theirs.update(to_numpy(grads), twin_state, twin)
            twin = optax.apply_updates(twin, twin_updates)
            for mine, other in zip(tree.leaves(params), jax.tree.leaves(twin)):
                np.testing.assert_allclose(mine, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def to_numpy(values):
    return tree.map(lambda v: jax.numpy.asarray(v.detach().numpy()), values)
