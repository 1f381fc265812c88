"""Lion's rule: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

from ptrainx.core import tree
from ptrainx.optim.base import GradientTransformation
from ptrainx.optim.checks import UNIT, check
from ptrainx.optim.moments import average, full_like

__all__ = ["ScaleByLionState", "scale_by_lion"]


class ScaleByLionState(NamedTuple):
    """Lion's running average.

    Attributes:
        mu: average gradient, tree like the parameters, starts at zero.
    """

    mu: Any


def scale_by_lion(b1: float = 0.9, b2: float = 0.99) -> GradientTransformation:
    r"""Replaces updates by the sign of an average that looks at the present with one rate and remembers with another.

    .. math::
        u_t = \operatorname{sign}(b_1 m_{t-1} + (1 - b_1) g_t), \qquad m_t = b_2 m_{t-1} + (1 - b_2) g_t

    with :math:`m_0 = 0`. Three ops a leaf.

    Args:
        b1: weight of the past in the update, in [0, 1).
        b2: weight of the past in what is remembered, in [0, 1).

    Raises:
        HyperparameterError: a setting is out of range.
        InputError: `init` met a leaf that is no floating tensor.

    >>> import torch
    >>> lion = scale_by_lion()
    >>> lion.update(torch.tensor([3.0, -0.01]), lion.init(torch.zeros(2)))[0]
    tensor([ 1., -1.])

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, https://arxiv.org/abs/2302.06675.
    """
    check("scale_by_lion", b1=(b1, UNIT), b2=(b2, UNIT))

    def init(params: Any) -> ScaleByLionState:
        return ScaleByLionState(full_like("scale_by_lion", params))

    def update(updates: Any, state: ScaleByLionState, params: Any = None) -> tuple[Any, ScaleByLionState]:
        present = average(updates, state.mu, b1)
        signs = tree.map(lambda p, u: p.sign().to(u.dtype), present, updates)
        return signs, ScaleByLionState(average(updates, state.mu, b2))

    return GradientTransformation(init, update)
