"""Momentum: a decaying sum of past updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ptrainx.core import tree
from ptrainx.optim.base import GradientTransformation
from ptrainx.optim.checks import UNIT, check
from ptrainx.optim.moments import full_like

__all__ = ["TraceState", "trace"]


class TraceState(NamedTuple):
    """The decaying sum.

    Attributes:
        trace: tree like the parameters, starts at zero.
    """

    trace: Any


def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    r"""Replaces updates by their decaying sum.

    .. math::
        m_t = g_t + \text{decay} \cdot m_{t-1}, \qquad
        u_t = m_t \quad\text{or, with nesterov,}\quad u_t = g_t + \text{decay} \cdot m_t

    with :math:`m_0 = 0`. One op a leaf, two with `nesterov`.

    Args:
        decay: weight of the past, in [0, 1).
        nesterov: look one step ahead.

    Raises:
        HyperparameterError: `decay` is outside [0, 1).
        InputError: `init` met a leaf that is no floating tensor.

    >>> t = trace(0.5)
    >>> state = t.init(torch.zeros(1))
    >>> for _ in range(3):
    ...     updates, state = t.update(torch.ones(1), state)
    >>> updates
    tensor([1.7500])

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.
    """
    check("trace", decay=(decay, UNIT))

    def ahead(update: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        return torch.add(update.to(past.dtype), past, alpha=decay)

    def init(params: Any) -> TraceState:
        return TraceState(full_like("trace", params))

    def update(updates: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        new = tree.map(ahead, updates, state.trace)
        out = tree.map(ahead, updates, new) if nesterov else new
        return tree.map(lambda o, u: o.to(u.dtype), out, updates), TraceState(new)

    return GradientTransformation(init, update)
