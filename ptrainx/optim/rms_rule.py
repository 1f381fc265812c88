"""Preconditioners by past squares alone: their running average (RMSProp), their sum (Adagrad)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ptrainx.core import tree
from ptrainx.optim.base import GradientTransformation
from ptrainx.optim.checks import NON_NEGATIVE, UNIT, check
from ptrainx.optim.moments import average_of_squares, full_like

__all__ = ["ScaleByRmsState", "ScaleByRssState", "scale_by_rms", "scale_by_rss"]


class ScaleByRmsState(NamedTuple):
    """RMSProp's running average.

    Attributes:
        nu: average squared gradient, tree like the parameters, starts at `initial_scale`.
    """

    nu: Any


class ScaleByRssState(NamedTuple):
    """Adagrad's sum.

    Attributes:
        sum_of_squares: tree like the parameters, starts at `initial_accumulator_value`.
    """

    sum_of_squares: Any


def scale_by_rms(
    decay: float = 0.9, eps: float = 1e-8, initial_scale: float = 0.0, eps_in_sqrt: bool = True
) -> GradientTransformation:
    r"""Divides updates by the root of their mean square.

    .. math::
        v_t = \text{decay} \cdot v_{t-1} + (1 - \text{decay}) g_t^2, \qquad
        u_t = g_t / \sqrt{v_t + \text{eps}} \quad\text{or}\quad g_t / (\sqrt{v_t} + \text{eps})

    with :math:`v_0` = `initial_scale`. Five ops a leaf.

    Args:
        decay: decay of the mean square, in [0, 1).
        eps: keeps the denominator from zero; >= 0.
        initial_scale: where the mean square starts; >= 0.
        eps_in_sqrt: the first form (optax's default), else the second (`torch.optim.RMSprop`'s).

    Raises:
        HyperparameterError: a setting is out of range.
        InputError: `init` met a leaf that is no floating tensor.

    Source: Hinton, "Overview of mini-batch gradient descent", lecture 6 of Neural Networks for Machine Learning, 2012.
    """
    check(
        "scale_by_rms",
        decay=(decay, UNIT),
        eps=(eps, NON_NEGATIVE),
        initial_scale=(initial_scale, NON_NEGATIVE),
    )

    def init(params: Any) -> ScaleByRmsState:
        return ScaleByRmsState(full_like("scale_by_rms", params, initial_scale))

    def precondition(update: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        root = (v + eps).sqrt() if eps_in_sqrt else v.sqrt() + eps
        return (update / root).to(update.dtype)

    def update(updates: Any, state: ScaleByRmsState, params: Any = None) -> tuple[Any, ScaleByRmsState]:
        nu = average_of_squares(updates, state.nu, decay)
        return tree.map(precondition, updates, nu), ScaleByRmsState(nu)

    return GradientTransformation(init, update)


def scale_by_rss(initial_accumulator_value: float = 0.1, eps: float = 1e-7) -> GradientTransformation:
    r"""Divides updates by the root of the sum of all their squares so far.

    .. math::
        s_t = s_{t-1} + g_t^2, \qquad u_t = g_t / \sqrt{s_t + \text{eps}}, \text{ and 0 where } s_t = 0

    with :math:`s_0` = `initial_accumulator_value`. Four ops a leaf.

    Args:
        initial_accumulator_value: where the sum starts; >= 0.
        eps: keeps the denominator from zero; >= 0.

    Raises:
        HyperparameterError: a setting is out of range.
        InputError: `init` met a leaf that is no floating tensor.

    Source: Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011,
    https://jmlr.org/papers/v12/duchi11a.html.
    """
    check(
        "scale_by_rss",
        initial_accumulator_value=(initial_accumulator_value, NON_NEGATIVE),
        eps=(eps, NON_NEGATIVE),
    )

    def init(params: Any) -> ScaleByRssState:
        return ScaleByRssState(full_like("scale_by_rss", params, initial_accumulator_value))

    def add_square(update: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        update = update.to(total.dtype)
        return torch.addcmul(total, update, update)

    def precondition(update: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        scaled = update / (total + eps).sqrt()
        # Where the sum is 0, so is the update; only without eps does that give 0 / 0.
        return (scaled if eps > 0 else torch.where(total > 0, scaled, 0.0)).to(update.dtype)

    def update(updates: Any, state: ScaleByRssState, params: Any = None) -> tuple[Any, ScaleByRssState]:
        total = tree.map(add_square, updates, state.sum_of_squares)
        return tree.map(precondition, updates, total), ScaleByRssState(total)

    return GradientTransformation(init, update)
