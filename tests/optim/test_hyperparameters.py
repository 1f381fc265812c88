"""Bad settings are refused where they are given, all of them at once, with what to do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ptrainx import optim
from ptrainx.core.errors import HyperparameterError, InputError

VECTOR = torch.ones(2)

# call, then what the message must hold
BAD = {
    "negative": (
        lambda: optim.adamw(-1e-3),
        ["adamw: bad learning_rate", "-0.001", "did you mean learning_rate=0.001?"],
    ),
    "not finite": (lambda: optim.sgd(math.inf), ["sgd: bad learning_rate", "learning_rate=inf", "finite number >= 0"]),
    "nan": (lambda: optim.adam(math.nan), ["adam: bad learning_rate", "learning_rate=nan"]),
    "text": (lambda: optim.lion("3e-4"), ["lion: bad learning_rate", "'3e-4'"]),
    "bool": (lambda: optim.rmsprop(True), ["rmsprop: bad learning_rate", "True"]),
    "none": (lambda: optim.adagrad(None), ["adagrad: bad learning_rate", "None"]),
    "vector": (lambda: optim.adam(VECTOR), ["shape (2,), float32", "pass learning_rate as a real tensor of shape ()"]),
    "bool tensor": (lambda: optim.adam(torch.tensor(True)), ["tensor of shape (), bool"]),
    "complex tensor": (lambda: optim.scale(torch.tensor(1j)), ["scale: bad step_size", "complex64"]),
    "beta of one": (lambda: optim.adam(0.1, b2=1.0), ["adam: bad b2", "b2=1.0", "a number in [0, 1)"]),
    "beta below zero": (lambda: optim.lion(0.1, b1=-0.1), ["lion: bad b1", "did you mean b1=0.1?"]),
    "beta a tensor": (lambda: optim.adam(0.1, b1=torch.tensor(0.9)), ["pass b1 as a Python number", "static_args"]),
    "several": (
        lambda: optim.adamw(-1.0, b1=2.0, eps=-1e-8, weight_decay=math.nan),
        ["adamw: bad learning_rate, b1, eps, weight_decay", "b1=2.0", "eps=-1e-08", "weight_decay=nan"],
    ),
    "mask in place of decay": (lambda: optim.adamw(0.1, weight_decay={"w": True}), ["weight_decay={'w': True}"]),
    "momentum": (lambda: optim.momentum(0.1, 1.5), ["momentum: bad decay", "1.5"]),
    "sgd momentum": (lambda: optim.sgd(0.1, 1.0), ["sgd: bad momentum", "or None"]),
    "nesterov alone": (lambda: optim.sgd(0.1, nesterov=True), ["sgd: nesterov needs momentum", "momentum=0.9"]),
    "rmsprop nesterov": (lambda: optim.rmsprop(0.1, nesterov=True), ["rmsprop: nesterov needs momentum"]),
    "trace": (lambda: optim.trace(-0.5), ["trace: bad decay"]),
    "decay": (lambda: optim.add_decayed_weights(-0.1), ["add_decayed_weights: bad weight_decay"]),
    "rms": (lambda: optim.scale_by_rms(1.0, -1.0, math.inf), ["scale_by_rms: bad decay, eps, initial_scale"]),
    "rss": (lambda: optim.scale_by_rss(-1.0), ["scale_by_rss: bad initial_accumulator_value"]),
    "max_norm of zero": (lambda: optim.clip_by_global_norm(0.0), ["clip_by_global_norm: bad max_norm", "> 0"]),
    "max_delta": (lambda: optim.clip(-1), ["clip: bad max_delta", "did you mean max_delta=1?"]),
    "schedule": (lambda: optim.scale_by_schedule(0.1), ["scale_by_schedule: schedule is not callable", "use scale"]),
    "uncalled link": (
        lambda: optim.chain(optim.clip(1.0), optim.adam),
        ["chain: argument 1 is no gradient transformation", "call it: adam(...)"],
    ),
    "number as link": (lambda: optim.chain(0.1), ["chain: argument 0", "0.1"]),
    "masked number": (lambda: optim.masked(0.1, True), ["masked: inner is no gradient transformation"]),
    "mask of numbers": (
        lambda: optim.masked(optim.scale(1.0), {"w": 1, "b": True}),
        ["masked: leaves of the mask that are no bools", "mask['w']=1"],
    ),
    "static_args": (
        lambda: optim.inject_hyperparams(optim.adam, ["beta"]),
        ["static_args names arguments that the factory does not have", "beta", "learning_rate, b1, b2, eps"],
    ),
    "injected": (lambda: optim.inject_hyperparams(optim.adam)(-0.1), ["adam: bad learning_rate", "-0.1"]),
    "injected beta": (lambda: optim.inject_hyperparams(optim.adam)(0.1, b1=0.9).init(VECTOR), ["static_args"]),
    "constant": (lambda: optim.constant_schedule(-0.1), ["constant_schedule: bad value"]),
    "linear": (
        lambda: optim.linear_schedule(0.0, -1.0, 0, -1),
        ["linear_schedule: bad end_value, transition_steps, transition_begin", "an integer > 0", "an integer >= 0"],
    ),
    "cosine": (
        lambda: optim.cosine_decay_schedule(1.0, 10.5),
        ["bad decay_steps", "decay_steps=10.5", "an integer > 0"],
    ),
    "exponential": (lambda: optim.exponential_decay(1.0, 1, 0.0), ["exponential_decay: bad decay_rate"]),
    "piecewise": (
        lambda: optim.piecewise_constant_schedule(1.0, {10: -0.1, 0.5: 1.0}),
        ["bad boundary 0.5, scale at 10"],
    ),
    "warmup": (
        lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 100, 100),
        ["leaves no step after the warm-up", "warmup_steps=100, decay_steps=100", "did you mean decay_steps=200?"],
    ),
    "warmup peak": (lambda: optim.warmup_cosine_decay_schedule(0.0, -1.0, 1, 10), ["bad peak_value"]),
    "join: too few": (
        lambda: optim.join_schedules([optim.constant(1.0)], [5]),
        ["1 schedules, boundaries [5]", "one boundary fewer than schedules"],
    ),
    "join: none": (lambda: optim.join_schedules([], []), ["0 schedules"]),
    "join: order": (lambda: optim.join_schedules([optim.constant(1.0)] * 3, [5, 2]), ["boundaries [5, 2]"]),
    "join: a number": (lambda: optim.join_schedules([0.1, 0.2], [5]), ["callables"]),
    "join: boundary": (lambda: optim.join_schedules([optim.constant(1.0)] * 2, [-5]), ["bad boundaries[0]"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_setting_is_refused(name):
    call, fragments = BAD[name]
    with pytest.raises(HyperparameterError) as caught:
        call()
    for fragment in fragments:
        assert fragment in str(caught.value)


GOOD = {
    "int": 1,
    "zero": 0.0,
    "numpy": np.float32(0.5),
    "numpy int": np.int64(1),
    "tensor": torch.tensor(0.5),
    "int tensor": torch.tensor(1),
    "schedule": lambda count: 0.5,
    "schedule of a tensor": lambda count: 1 / (1 + count),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_learning_rate_is_taken(name):
    optimizer = optim.sgd(GOOD[name])
    updates, _ = optimizer.update(torch.ones(2), optimizer.init(torch.zeros(2)))
    value = GOOD[name](0) if callable(GOOD[name]) else GOOD[name]
    torch.testing.assert_close(updates, torch.full((2,), -float(value)))


def test_a_schedule_that_goes_negative_is_refused_when_it_does():
    optimizer = optim.sgd(lambda count: -0.1)
    with pytest.raises(
        HyperparameterError, match=r"bad learning_rate\(count\)\n  got:      learning_rate\(count\)=-0.1"
    ):
        optimizer.update(torch.ones(2), optimizer.init(torch.zeros(2)))


def test_a_schedule_of_vectors_is_refused():
    optimizer = optim.scale_by_schedule(lambda count: torch.ones(3))
    with pytest.raises(HyperparameterError, match=r"schedule\(count\)=tensor of shape \(3,\), float32"):
        optimizer.update(torch.ones(3), optimizer.init(torch.zeros(3)))


def test_missing_params_are_asked_for():
    optimizer = optim.adamw(0.1)
    with pytest.raises(InputError, match=r"call optimizer\.update\(grads, opt_state, params\)"):
        optimizer.update(torch.ones(2), optimizer.init(torch.zeros(2)))


def test_parameters_that_cannot_be_optimized_are_named_together():
    params = {"w": torch.ones(2), "ids": torch.arange(3), "blocks": [{"rate": 0.1}], "z": torch.zeros(1) * 1j}
    for optimizer in (optim.adam(0.1), optim.momentum(0.1), optim.lion(0.1), optim.rmsprop(0.1), optim.adagrad(0.1)):
        with pytest.raises(InputError) as caught:
            optimizer.init(params)
        message = str(caught.value)
        for named in (
            "params['blocks'][0]['rate']: float",
            "params['ids']: torch.int64",
            "params['z']: torch.complex64",
        ):
            assert named in message
        assert "params['w']" not in message


def test_masked_lets_such_parameters_be():
    params = {"w": torch.ones(2), "ids": torch.arange(3)}
    optimizer = optim.masked(optim.adam(0.1), {"w": True, "ids": False})
    updates, _ = optimizer.update(
        {"w": torch.ones(2), "ids": torch.zeros(3, dtype=torch.int64)}, optimizer.init(params)
    )
    torch.testing.assert_close(updates["w"], torch.full((2,), -0.1))


def test_a_mask_function_is_checked_when_it_has_answered():
    optimizer = optim.masked(optim.scale(1.0), lambda params: {"w": params["w"].ndim})
    with pytest.raises(HyperparameterError, match=r"mask\['w'\]=1"):
        optimizer.init({"w": torch.ones(2)})
