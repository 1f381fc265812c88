"""Schedules: functions from step count to a value, usually the learning rate.

A schedule takes an int and gives a float, or takes an integer tensor (0-d inside a step, of any shape for a plot) and
gives a float64 tensor of its shape. A 0-d float64 tensor does not promote the tensors that it multiplies. Any function
of the count is a schedule; in one of your own, `count / 10` of an integer tensor is float32 unless you convert first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ptrainx.core.errors import HyperparameterError
from ptrainx.optim.base import Schedule
from ptrainx.optim.checks import COUNT, NON_NEGATIVE, OPTIONAL_NON_NEGATIVE, POSITIVE, STEPS, check

__all__ = [
    "constant",
    "constant_schedule",
    "cosine_decay",
    "cosine_decay_schedule",
    "exponential_decay",
    "join_schedules",
    "linear_schedule",
    "piecewise_constant_schedule",
    "warmup_cosine_decay",
    "warmup_cosine_decay_schedule",
]


def constant_schedule(value: float) -> Schedule:
    """The same value at every step.

    >>> constant_schedule(0.1)(1000)
    0.1
    """
    check("constant_schedule", value=(value, NON_NEGATIVE))
    return lambda count: _like(_real(count), value)


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """From `init_value` to `end_value` in a straight line.

    Args:
        init_value: value up to step `transition_begin`.
        end_value: value from step `transition_begin + transition_steps` on.
        transition_steps: length of the line, in steps.
        transition_begin: where it starts.

    Raises:
        HyperparameterError: an argument is out of range.

    >>> [linear_schedule(0.0, 1.0, 4)(count) for count in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """
    check(
        "linear_schedule",
        init_value=(init_value, NON_NEGATIVE),
        end_value=(end_value, NON_NEGATIVE),
        transition_steps=(transition_steps, STEPS),
        transition_begin=(transition_begin, COUNT),
    )

    def schedule(count: Any) -> Any:
        left = 1 - _bound(_real(count) - transition_begin, 0, transition_steps) / transition_steps
        return (init_value - end_value) * left + end_value

    return schedule


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    r"""Half a cosine wave from `init_value` down to `alpha * init_value`.

    .. math::
        \text{init\_value} \left((1 - \alpha) \left[\tfrac12 (1 + \cos(\pi t / T))\right]^{p} + \alpha\right),
        \qquad t \le T

    Args:
        init_value: value at step 0.
        decay_steps: T, in steps; constant afterwards.
        alpha: last value as a fraction of the first.
        exponent: p, > 0.

    Raises:
        HyperparameterError: an argument is out of range.

    >>> [round(cosine_decay_schedule(1.0, 100)(count), 3) for count in (0, 50, 100)]
    [1.0, 0.5, 0.0]

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017,
    https://arxiv.org/abs/1608.03983.
    """
    check(
        "cosine_decay_schedule",
        init_value=(init_value, NON_NEGATIVE),
        decay_steps=(decay_steps, STEPS),
        alpha=(alpha, NON_NEGATIVE),
        exponent=(exponent, POSITIVE),
    )

    def schedule(count: Any) -> Any:
        wave = 0.5 * (1 + _cos(math.pi * _bound(_real(count), 0, decay_steps) / decay_steps))
        return init_value * ((1 - alpha) * wave**exponent + alpha)

    return schedule


def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    r"""`init_value` times `decay_rate` for each `transition_steps` steps, continuously or in a staircase.

    .. math::
        \text{init\_value} \cdot \text{decay\_rate}^{\,(t - \text{transition\_begin}) / \text{transition\_steps}}

    Args:
        init_value: value up to step `transition_begin`.
        transition_steps: steps until one more factor is in.
        decay_rate: the factor, > 0.
        transition_begin: where the decay starts.
        staircase: round the exponent down.
        end_value: bound that the value does not cross (from below if `decay_rate < 1`, else from above), or None.

    Raises:
        HyperparameterError: an argument is out of range.

    >>> [exponential_decay(1.0, 10, 0.5)(count) for count in (0, 10, 20)]
    [1.0, 0.5, 0.25]
    """
    check(
        "exponential_decay",
        init_value=(init_value, NON_NEGATIVE),
        transition_steps=(transition_steps, STEPS),
        decay_rate=(decay_rate, POSITIVE),
        transition_begin=(transition_begin, COUNT),
        end_value=(end_value, OPTIONAL_NON_NEGATIVE),
    )

    def schedule(count: Any) -> Any:
        steps = _bound(_real(count) - transition_begin, 0)
        value = init_value * _power(decay_rate, steps // transition_steps if staircase else steps / transition_steps)
        if end_value is None:
            return value
        return _bound(value, end_value) if decay_rate < 1 else _bound(value, None, end_value)

    return schedule


def piecewise_constant_schedule(
    init_value: float, boundaries_and_scales: Mapping[int, float] | None = None
) -> Schedule:
    """`init_value`, multiplied by each scale from its boundary on.

    Args:
        init_value: value before the first boundary.
        boundaries_and_scales: step to factor, >= 0.

    Raises:
        HyperparameterError: an argument is out of range.

    >>> [piecewise_constant_schedule(1.0, {100: 0.1})(count) for count in (99, 100)]
    [1.0, 0.1]
    """
    scales = dict(boundaries_and_scales or {})
    check(
        "piecewise_constant_schedule",
        init_value=(init_value, NON_NEGATIVE),
        **{f"boundary {step!r}": (step, COUNT) for step in scales},
        **{f"scale at {step!r}": (factor, NON_NEGATIVE) for step, factor in scales.items()},
    )

    def schedule(count: Any) -> Any:
        count = _real(count)
        reached, value = init_value, _like(count, init_value)
        for boundary, factor in sorted(scales.items()):
            reached = reached * factor
            value = _where(count < boundary, value, _like(count, reached))
        return value

    return schedule


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after another; each counts from the boundary where it takes over.

    Args:
        schedules: at least one.
        boundaries: first step of each schedule but the first, increasing.

    Raises:
        HyperparameterError: a schedule is not callable, or the boundaries do not fit.

    >>> joined = join_schedules([linear_schedule(0.0, 1.0, 10), constant_schedule(0.5)], [10])
    >>> [joined(count) for count in (0, 5, 10)]
    [0.0, 0.5, 0.5]
    """
    schedules, boundaries = list(schedules), list(boundaries)
    check("join_schedules", **{f"boundaries[{i}]": (step, COUNT) for i, step in enumerate(boundaries)})
    in_order = boundaries == sorted(boundaries)
    if not schedules or len(boundaries) != len(schedules) - 1 or not in_order or not all(map(callable, schedules)):
        raise HyperparameterError(
            "join_schedules: the boundaries do not separate the schedules",
            got=f"{len(schedules)} schedules, boundaries {boundaries}",
            expected="callables, and one boundary fewer than schedules, in increasing order",
            fix="give the step at which each schedule but the first takes over",
        )

    def schedule(count: Any) -> Any:
        value = schedules[0](count)
        for boundary, following in zip(boundaries, schedules[1:]):
            # A schedule is asked before its time too (the choice is made on the device): never below its step 0.
            value = _where(count < boundary, value, following(_bound(count - boundary, 0)), like=count)
        return value

    return schedule


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """A line up from `init_value` to `peak_value`, then half a cosine wave down to `end_value`.

    Args:
        init_value: value at step 0.
        peak_value: value at step `warmup_steps`.
        warmup_steps: length of the line; 0 starts at the peak.
        decay_steps: length of line and wave *together*; constant afterwards.
        end_value: last value.
        exponent: see `cosine_decay_schedule`.

    Raises:
        HyperparameterError: an argument is out of range, or no step is left for the wave.

    >>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=10, decay_steps=110)
    >>> [round(schedule(count), 3) for count in (0, 5, 10, 60, 110)]
    [0.0, 0.5, 1.0, 0.5, 0.0]

    Source: Loshchilov and Hutter, 2017, https://arxiv.org/abs/1608.03983; for the warm-up Goyal et al., "Accurate,
    Large Minibatch SGD", 2017, https://arxiv.org/abs/1706.02677.
    """
    check(
        "warmup_cosine_decay_schedule",
        init_value=(init_value, NON_NEGATIVE),
        peak_value=(peak_value, NON_NEGATIVE),
        warmup_steps=(warmup_steps, COUNT),
        decay_steps=(decay_steps, STEPS),
        end_value=(end_value, NON_NEGATIVE),
        exponent=(exponent, POSITIVE),
    )
    if decay_steps <= warmup_steps:
        raise HyperparameterError(
            "warmup_cosine_decay_schedule: decay_steps leaves no step after the warm-up",
            got=f"warmup_steps={warmup_steps}, decay_steps={decay_steps}",
            expected="decay_steps > warmup_steps (it counts both)",
            fix=f"did you mean decay_steps={warmup_steps + decay_steps}?",
        )
    wave = cosine_decay_schedule(
        peak_value, decay_steps - warmup_steps, alpha=end_value / peak_value if peak_value else 0.0, exponent=exponent
    )
    if warmup_steps == 0:
        return wave
    return join_schedules([linear_schedule(init_value, peak_value, warmup_steps), wave], [warmup_steps])


constant = constant_schedule
cosine_decay = cosine_decay_schedule
warmup_cosine_decay = warmup_cosine_decay_schedule


# The few functions below are the same for numbers and tensors, so that each formula above is written once.


def _real(count: Any) -> Any:
    return count.to(torch.float64) if isinstance(count, torch.Tensor) else float(count)


def _like(count: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor) or not isinstance(count, torch.Tensor):
        return value
    return torch.full_like(count, value, dtype=torch.float64)


def _bound(x: Any, low: float | None, high: float | None = None) -> Any:
    if isinstance(x, torch.Tensor):
        return x.clamp(low, high)
    x = x if low is None else max(x, low)
    return x if high is None else min(x, high)


def _cos(x: Any) -> Any:
    return torch.cos(x) if isinstance(x, torch.Tensor) else math.cos(x)


def _power(base: float, exponent: Any) -> Any:
    try:
        return base**exponent
    except OverflowError:  # Python raises where tensors give infinity
        return math.inf


def _where(condition: Any, yes: Any, no: Any, like: Any = None) -> Any:
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, _like(like, yes), _like(like, no))
    return yes if condition else no
