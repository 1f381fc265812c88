"""Optimizers by their usual names, each a chain of this room's transformations."""

from __future__ import annotations

from typing import Any

import torch

from ptrainx.core.errors import HyperparameterError
from ptrainx.optim.adam_rule import scale_by_adam
from ptrainx.optim.base import GradientTransformation, Schedule, identity
from ptrainx.optim.checks import (
    LEARNING_RATE,
    NON_NEGATIVE,
    NON_NEGATIVE_OR_TENSOR,
    OPTIONAL_UNIT,
    UNIT,
    check,
)
from ptrainx.optim.combine import chain
from ptrainx.optim.lion_rule import scale_by_lion
from ptrainx.optim.momentum_rule import trace
from ptrainx.optim.rms_rule import scale_by_rms, scale_by_rss
from ptrainx.optim.scaling import add_decayed_weights, scale_by_learning_rate

__all__ = ["adagrad", "adam", "adamw", "lion", "momentum", "rmsprop", "sgd"]

LearningRate = float | torch.Tensor | Schedule


def sgd(learning_rate: LearningRate, momentum: float | None = None, nesterov: bool = False) -> GradientTransformation:
    r"""Stochastic gradient descent, with momentum if asked for.

    .. math::
        \theta_t = \theta_{t-1} - \eta_t u_t, \qquad
        u_t = g_t \quad\text{or}\quad u_t = g_t + \mu u_{t-1}

    with :math:`\eta` = `learning_rate`, :math:`\mu` = `momentum`, :math:`u_0 = 0`; with `nesterov` the step is
    :math:`g_t + \mu u_t`. Equal to `torch.optim.SGD`.

    Args:
        learning_rate: a number >= 0, a 0-d tensor, or a schedule.
        momentum: in [0, 1), or None for none (and no state).
        nesterov: look one step ahead; needs `momentum`.

    Raises:
        HyperparameterError: a setting is out of range.

    >>> w = torch.tensor([1.0, 2.0, 3.0])
    >>> optimizer = sgd(0.1)
    >>> state = optimizer.init(w)
    >>> for _ in range(5):
    ...     updates, state = optimizer.update(2 * w, state)  # the gradient of sum(w * w)
    ...     w = w + updates
    >>> print(f"loss {(w * w).sum():.4f}")
    loss 1.5032

    Source: Robbins and Monro, "A Stochastic Approximation Method", 1951; Sutskever et al., 2013 (momentum).
    """
    check("sgd", learning_rate=(learning_rate, LEARNING_RATE), momentum=(momentum, OPTIONAL_UNIT))
    if nesterov and momentum is None:
        raise HyperparameterError(
            "sgd: nesterov needs momentum", got="nesterov=True, momentum=None", fix="pass momentum=0.9, say"
        )
    accelerate = identity() if momentum is None else trace(momentum, nesterov)
    return chain(accelerate, scale_by_learning_rate(learning_rate))


def momentum(learning_rate: LearningRate, decay: float = 0.9, nesterov: bool = False) -> GradientTransformation:
    """`sgd` with momentum `decay`.

    Args:
        learning_rate: a number >= 0, a 0-d tensor, or a schedule.
        decay: weight of the past, in [0, 1).
        nesterov: look one step ahead.

    Raises:
        HyperparameterError: a setting is out of range.

    >>> w = torch.tensor([1.0, 2.0, 3.0])
    >>> optimizer = momentum(0.1, 0.5)
    >>> state = optimizer.init(w)
    >>> for _ in range(5):
    ...     updates, state = optimizer.update(2 * w, state)
    ...     w = w + updates
    >>> print(f"loss {(w * w).sum():.4f}")
    loss 0.0010
    """
    check("momentum", learning_rate=(learning_rate, LEARNING_RATE), decay=(decay, UNIT))
    return sgd(learning_rate, decay, nesterov)


def adam(learning_rate: LearningRate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    r"""Adam: :math:`\theta_t = \theta_{t-1} - \eta_t u_t` with :math:`u_t` of `scale_by_adam`.

    Equal to `torch.optim.Adam`. State: two trees like the parameters, both zero at first, and a count.

    Args:
        learning_rate: a number >= 0, a 0-d tensor, or a schedule.
        b1: decay of the mean gradient, in [0, 1).
        b2: decay of the mean square, in [0, 1).
        eps: added to the root; >= 0.

    Raises:
        HyperparameterError: a setting is out of range.

    >>> w = torch.tensor([1.0, 2.0, 3.0])
    >>> optimizer = adam(0.1)
    >>> state = optimizer.init(w)
    >>> for _ in range(5):
    ...     updates, state = optimizer.update(2 * w, state)
    ...     w = w + updates
    >>> print(f"loss {(w * w).sum():.4f}")
    loss 8.7758

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, https://arxiv.org/abs/1412.6980.
    """
    _check_adam("adam", learning_rate, b1, b2, eps)
    return chain(scale_by_adam(b1, b2, eps), scale_by_learning_rate(learning_rate))


def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | torch.Tensor = 1e-4,
    mask: Any = None,
) -> GradientTransformation:
    r"""Adam with decoupled weight decay.

    .. math::
        m_t &= b_1 m_{t-1} + (1 - b_1) g_t \\
        v_t &= b_2 v_{t-1} + (1 - b_2) g_t^2 \\
        \theta_t &= \theta_{t-1} - \eta_t \left( \frac{m_t / (1 - b_1^t)}{\sqrt{v_t / (1 - b_2^t)} + \text{eps}}
            + \lambda \theta_{t-1} \right)

    with :math:`\eta` = `learning_rate`, :math:`\lambda` = `weight_decay`, :math:`m_0 = v_0 = 0`. Equal to
    `torch.optim.AdamW` (whose default :math:`\lambda` is 0.01). Ten ops a leaf, `apply_updates` included.

    Args:
        learning_rate: a number >= 0, a 0-d tensor, or a schedule.
        b1: decay of the mean gradient, in [0, 1).
        b2: decay of the mean square, in [0, 1).
        eps: added to the root; >= 0.
        weight_decay: a number >= 0, or a 0-d tensor; the learning rate multiplies it.
        mask: which parameters decay: a pytree of bools, or a function from the parameters to one; None for all.

    Raises:
        HyperparameterError: a setting is out of range.
        InputError: `update` was called without params.

    >>> w = torch.tensor([1.0, 2.0, 3.0])
    >>> optimizer = adamw(0.1, weight_decay=0.1)
    >>> state = optimizer.init(w)
    >>> for _ in range(5):
    ...     updates, state = optimizer.update(2 * w, state, w)
    ...     w = w + updates
    >>> print(f"loss {(w * w).sum():.4f}")
    loss 7.8192

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, https://arxiv.org/abs/1711.05101.
    """
    _check_adam("adamw", learning_rate, b1, b2, eps, weight_decay)
    return chain(
        scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )


def _check_adam(where: str, learning_rate: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any = 0.0) -> None:
    check(
        where,
        learning_rate=(learning_rate, LEARNING_RATE),
        b1=(b1, UNIT),
        b2=(b2, UNIT),
        eps=(eps, NON_NEGATIVE),
        weight_decay=(weight_decay, NON_NEGATIVE_OR_TENSOR),
    )


def lion(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float | torch.Tensor = 1e-3,
    mask: Any = None,
) -> GradientTransformation:
    r"""Lion: sign updates with one state tree instead of Adam's two.

    .. math::
        \theta_t = \theta_{t-1} - \eta_t \left(\operatorname{sign}(b_1 m_{t-1} + (1 - b_1) g_t)
            + \lambda \theta_{t-1} \right), \qquad m_t = b_2 m_{t-1} + (1 - b_2) g_t

    with :math:`m_0 = 0`. Its learning rate is usually 3 to 10 times smaller than Adam's, its decay as much larger.

    Args:
        learning_rate: a number >= 0, a 0-d tensor, or a schedule.
        b1: weight of the past in the update, in [0, 1).
        b2: weight of the past in what is remembered, in [0, 1).
        weight_decay: a number >= 0, or a 0-d tensor.
        mask: which parameters decay; None for all.

    Raises:
        HyperparameterError: a setting is out of range.
        InputError: `update` was called without params.

    >>> w = torch.tensor([1.0, 2.0, 3.0])
    >>> optimizer = lion(0.1)
    >>> state = optimizer.init(w)
    >>> for _ in range(5):
    ...     updates, state = optimizer.update(2 * w, state, w)
    ...     w = w + updates
    >>> print(f"loss {(w * w).sum():.4f}")
    loss 8.7399

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, https://arxiv.org/abs/2302.06675.
    """
    check(
        "lion",
        learning_rate=(learning_rate, LEARNING_RATE),
        b1=(b1, UNIT),
        b2=(b2, UNIT),
        weight_decay=(weight_decay, NON_NEGATIVE_OR_TENSOR),
    )
    return chain(scale_by_lion(b1, b2), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))


def rmsprop(
    learning_rate: LearningRate,
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    momentum: float | None = None,
    nesterov: bool = False,
) -> GradientTransformation:
    r"""RMSProp: gradients over the root of their mean square, then momentum if asked for.

    .. math::
        v_t = d\, v_{t-1} + (1 - d) g_t^2, \qquad
        \theta_t = \theta_{t-1} - \eta_t\, g_t / \sqrt{v_t + \text{eps}}

    with d = `decay`, :math:`v_0` = `initial_scale`. Defaults are optax's; `torch.optim.RMSprop` is
    `decay=0.99, eps_in_sqrt=False`.

    Args:
        learning_rate: a number >= 0, a 0-d tensor, or a schedule.
        decay: decay of the mean square, in [0, 1).
        eps: keeps the denominator from zero; >= 0.
        initial_scale: where the mean square starts; >= 0.
        eps_in_sqrt: add `eps` under the root, else to it.
        momentum: in [0, 1), or None for none.
        nesterov: look one step ahead; needs `momentum`.

    Raises:
        HyperparameterError: a setting is out of range.

    >>> w = torch.tensor([1.0, 2.0, 3.0])
    >>> optimizer = rmsprop(0.1)
    >>> state = optimizer.init(w)
    >>> for _ in range(5):
    ...     updates, state = optimizer.update(2 * w, state)
    ...     w = w + updates
    >>> print(f"loss {(w * w).sum():.4f}")
    loss 5.1670

    Source: Hinton, "Overview of mini-batch gradient descent", lecture 6 of Neural Networks for Machine Learning, 2012.
    """
    check(
        "rmsprop",
        learning_rate=(learning_rate, LEARNING_RATE),
        decay=(decay, UNIT),
        eps=(eps, NON_NEGATIVE),
        initial_scale=(initial_scale, NON_NEGATIVE),
        momentum=(momentum, OPTIONAL_UNIT),
    )
    if nesterov and momentum is None:
        raise HyperparameterError(
            "rmsprop: nesterov needs momentum", got="nesterov=True, momentum=None", fix="pass momentum=0.9, say"
        )
    accelerate = identity() if momentum is None else trace(momentum, nesterov)
    return chain(
        scale_by_rms(decay, eps, initial_scale, eps_in_sqrt), scale_by_learning_rate(learning_rate), accelerate
    )


def adagrad(
    learning_rate: LearningRate, initial_accumulator_value: float = 0.1, eps: float = 1e-7
) -> GradientTransformation:
    r"""Adagrad: gradients over the root of the sum of all past squares.

    .. math::
        s_t = s_{t-1} + g_t^2, \qquad \theta_t = \theta_{t-1} - \eta_t\, g_t / \sqrt{s_t + \text{eps}}

    with :math:`s_0` = `initial_accumulator_value`.

    Args:
        learning_rate: a number >= 0, a 0-d tensor, or a schedule.
        initial_accumulator_value: where the sum starts; >= 0.
        eps: keeps the denominator from zero; >= 0.

    Raises:
        HyperparameterError: a setting is out of range.

    >>> w = torch.tensor([1.0, 2.0, 3.0])
    >>> optimizer = adagrad(1.0)
    >>> state = optimizer.init(w)
    >>> for _ in range(5):
    ...     updates, state = optimizer.update(2 * w, state)
    ...     w = w + updates
    >>> print(f"loss {(w * w).sum():.4f}")
    loss 0.3852

    Source: Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011,
    https://jmlr.org/papers/v12/duchi11a.html.
    """
    check(
        "adagrad",
        learning_rate=(learning_rate, LEARNING_RATE),
        initial_accumulator_value=(initial_accumulator_value, NON_NEGATIVE),
        eps=(eps, NON_NEGATIVE),
    )
    return chain(scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(learning_rate))
