"""Adam's preconditioner: the mean gradient over the root of the mean square."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ptrainx.core import tree
from ptrainx.optim.base import GradientTransformation
from ptrainx.optim.checks import NON_NEGATIVE, UNIT, check
from ptrainx.optim.moments import average, average_of_squares, full_like, new_count

__all__ = ["ScaleByAdamState", "scale_by_adam"]


class ScaleByAdamState(NamedTuple):
    """Adam's running averages.

    Attributes:
        count: steps done, 0-d int64 tensor, starts at 0.
        mu: average gradient, tree like the parameters, starts at zero.
        nu: average squared gradient, tree like the parameters, starts at zero.
    """

    count: torch.Tensor  # type: ignore[assignment]  # the name hides tuple.count, which no one calls
    mu: Any
    nu: Any


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    r"""Rescales updates by Adam's rule.

    .. math::
        m_t &= b_1 m_{t-1} + (1 - b_1) g_t \\
        v_t &= b_2 v_{t-1} + (1 - b_2) g_t^2 \\
        u_t &= \frac{m_t / (1 - b_1^t)}{\sqrt{v_t / (1 - b_2^t)} + \text{eps}}

    with :math:`m_0 = v_0 = 0`. Seven ops a leaf: the two bias corrections are folded into one factor and one term,
    both computed once a step in float64 (in float32, :math:`1 - 0.999^t` would be off by 1e-5 at first). The averages
    have the parameters' dtype, for which float16 is too narrow: there an `eps` below 6e-8 is zero.

    Args:
        b1: decay of the mean, in [0, 1).
        b2: decay of the mean square, in [0, 1).
        eps: added to the root, so that a vanishing gradient gives a vanishing update; >= 0.

    Raises:
        HyperparameterError: a setting is out of range.
        InputError: `init` met a leaf that is no floating tensor.

    >>> adam = scale_by_adam()
    >>> adam.update(torch.tensor([3.0, -0.01]), adam.init(torch.zeros(2)))[0]  # the first update is the sign
    tensor([ 1.0000, -1.0000])

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, https://arxiv.org/abs/1412.6980.
    """
    check("scale_by_adam", b1=(b1, UNIT), b2=(b2, UNIT), eps=(eps, NON_NEGATIVE))

    def init(params: Any) -> ScaleByAdamState:
        return ScaleByAdamState(new_count(), full_like("scale_by_adam", params), full_like("scale_by_adam", params))

    def update(updates: Any, state: ScaleByAdamState, params: Any = None) -> tuple[Any, ScaleByAdamState]:
        count = state.count + 1
        mu = average(updates, state.mu, b1)
        nu = average_of_squares(updates, state.nu, b2)
        # m / c1 / (sqrt(v / c2) + eps)  =  m / (sqrt(v) * factor + floor)
        t = count.to(torch.float64)
        c1 = 1 - b1**t
        factor, floor = c1 / (1 - b2**t).sqrt(), c1 * eps

        def precondition(u: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return (m / (v.sqrt() * factor + floor)).to(u.dtype)

        return tree.map(precondition, updates, mu, nu), ScaleByAdamState(count, mu, nu)

    return GradientTransformation(init, update)
