"""Transformations by a factor: a constant, a learning rate, a schedule; and weight decay."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ptrainx.core import tree
from ptrainx.core.errors import HyperparameterError, InputError
from ptrainx.optim.base import EmptyState, GradientTransformation, Schedule, identity
from ptrainx.optim.checks import FINITE, LEARNING_RATE, NON_NEGATIVE_OR_TENSOR, check
from ptrainx.optim.combine import masked
from ptrainx.optim.moments import new_count

__all__ = [
    "ScaleByScheduleState",
    "add_decayed_weights",
    "scale",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "times",
]


class ScaleByScheduleState(NamedTuple):
    """How many updates a schedule has seen.

    Attributes:
        count: 0-d int64 tensor, starts at 0.
    """

    count: torch.Tensor  # type: ignore[assignment]  # the name hides tuple.count, which no one calls


def times(updates: Any, factor: float | torch.Tensor) -> Any:
    """Each leaf times a number or a 0-d tensor, in the leaf's own dtype (a 0-d leaf would else be promoted)."""
    return tree.map(lambda u: (u * factor).to(u.dtype), updates)


def scale(step_size: float | torch.Tensor) -> GradientTransformation:
    """Multiplies updates by `step_size`.

    Args:
        step_size: a finite number, or a 0-d tensor such as an input of the step.

    Raises:
        HyperparameterError: `step_size` is neither.

    >>> scale(-0.5).update(torch.tensor([2.0, 4.0]), EmptyState())[0]
    tensor([-1., -2.])
    """
    check("scale", step_size=(step_size, FINITE))

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        return times(updates, step_size), state

    return GradientTransformation(lambda params: EmptyState(), update)


def scale_by_schedule(schedule: Schedule) -> GradientTransformation:
    """Multiplies the updates of step t (from 0) by `schedule(t)`.

    Args:
        schedule: step count to factor.

    Raises:
        HyperparameterError: `schedule` is not callable, or it gives something else than a number or a 0-d tensor.
    """
    if not callable(schedule):
        raise HyperparameterError(
            "scale_by_schedule: schedule is not callable",
            got=repr(schedule),
            expected="a function count -> value",
            fix="use scale for a constant factor",
        )

    def init(params: Any) -> ScaleByScheduleState:
        return ScaleByScheduleState(new_count())

    def update(updates: Any, state: ScaleByScheduleState, params: Any = None) -> tuple[Any, ScaleByScheduleState]:
        factor = schedule(state.count)
        check("scale_by_schedule", **{"schedule(count)": (factor, FINITE)})
        return times(updates, factor), ScaleByScheduleState(state.count + 1)

    return GradientTransformation(init, update)


def scale_by_learning_rate(
    learning_rate: float | torch.Tensor | Schedule, *, flip_sign: bool = True
) -> GradientTransformation:
    """Multiplies updates by minus the learning rate: the last link of an optimizer.

    Args:
        learning_rate: a number >= 0, a 0-d tensor, or a schedule, which is asked for step t = 0 first.
        flip_sign: whether updates go *against* what came in, as they must for descent.

    Raises:
        HyperparameterError: `learning_rate` is negative, not finite, or of another type.
    """
    check("scale_by_learning_rate", learning_rate=(learning_rate, LEARNING_RATE))
    sign = -1 if flip_sign else 1
    if not callable(learning_rate):
        return scale(sign * learning_rate)

    def signed(count: Any) -> Any:
        value = learning_rate(count)
        check("scale_by_learning_rate", **{"learning_rate(count)": (value, NON_NEGATIVE_OR_TENSOR)})
        return sign * value

    return scale_by_schedule(signed)


def add_decayed_weights(weight_decay: float | torch.Tensor, mask: Any = None) -> GradientTransformation:
    """Adds `weight_decay * params` to the updates.

    After a preconditioner and before the learning rate this is decoupled weight decay (AdamW); before both it is an
    L2 penalty.

    Args:
        weight_decay: a number >= 0, or a 0-d tensor.
        mask: which parameters decay (see `masked`); None for all.

    Raises:
        HyperparameterError: `weight_decay` is negative, not finite, or of another type.
        InputError: `update` was called without params.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, https://arxiv.org/abs/1711.05101.
    """
    check("add_decayed_weights", weight_decay=(weight_decay, NON_NEGATIVE_OR_TENSOR))
    if not isinstance(weight_decay, torch.Tensor) and weight_decay == 0:
        return identity()

    def add(update: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        if isinstance(weight_decay, torch.Tensor):
            return (update + param * weight_decay).to(update.dtype)
        return torch.add(update, param, alpha=weight_decay).to(update.dtype)

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        if params is None:
            raise InputError(
                "add_decayed_weights.update: params is missing",
                got="params=None",
                expected="the parameters that the updates are for",
                fix="call optimizer.update(grads, opt_state, params)",
            )
        return tree.map(add, updates, params), state

    decay = GradientTransformation(lambda params: EmptyState(), update)
    return decay if mask is None else masked(decay, mask)
