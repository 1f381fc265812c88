"""What an optimizer is: a pair of pure functions over pytrees, and the one addition that applies its result.

Enters: gradients, state, parameters. Leaves: updates (to be *added* to the parameters) and the next state. The other
files of this room are transformations of this one shape; `combine` strings them together, `alias` names the usual ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ptrainx.core import tree
from ptrainx.ops.random import fold_in, stochastic_round

__all__ = ["EmptyState", "GradientTransformation", "Schedule", "apply_updates", "identity"]

Schedule = Callable[[Any], Any]
"""Step count (an int, or an integer tensor) to value (a number, or a tensor of the count's shape)."""


class GradientTransformation(NamedTuple):
    """A gradient transformation: `init` makes the state, `update` maps updates and state to new ones.

    Both are pure: they write to none of their arguments and read no tensor on the host, so a jitted step may hold them.
    Updates keep the dtype and the placement that they came in with; state keeps the dtype that `init` gave it.

    Attributes:
        init: `params -> state`.
        update: `(updates, state, params=None) -> (updates, state)`; the first updates of a chain are the gradients.

    >>> halve = GradientTransformation(lambda params: EmptyState(), lambda u, state, params=None: (u / 2, state))
    >>> halve.update(torch.tensor([2.0, 4.0]), halve.init(None))
    (tensor([1., 2.]), EmptyState())

    Source: the interface of optax (DeepMind JAX Ecosystem, 2020).
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class EmptyState(NamedTuple):
    """The state of a transformation that remembers nothing."""


def identity() -> GradientTransformation:
    """Leaves updates as they are; a neutral element for `chain` and a placeholder where nothing is to be done."""

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        return updates, state

    return GradientTransformation(lambda params: EmptyState(), update)


def apply_updates(params: Any, updates: Any, *, key: torch.Tensor | None = None) -> Any:
    """`params + updates`, leaf by leaf, in the parameters' dtypes.

    The sum is taken in the wider of the two dtypes and rounded once: to the nearest, or for bfloat16 parameters with a
    key at random (`px.random.stochastic_round`). An update of less than half the spacing of bfloat16, 1/256 to 1/128 of
    the parameter, is lost to the nearest; at random it counts on average, and no master copy is needed.

    Args:
        params: pytree of tensors.
        updates: pytree of the same structure; None in place of a leaf leaves that parameter as it is.
        key: int32[2], a new one for each step; leaf i is rounded by `fold_in(key, i)`, the same on every mesh.

    Returns:
        The new parameters.

    Raises:
        TreeError: the two structures differ.
        InputError: `key` is no random key.

    >>> apply_updates({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, -0.5])})
    {'w': tensor([1.5000, 1.5000])}

    Source: stochastic rounding of bfloat16 weights: Zamirai, Zhang, Aberger, De Sa, "Revisiting BFloat16 Training",
    2020, https://arxiv.org/abs/2010.06192.
    """
    numbers = itertools.count()

    def add(param: torch.Tensor, update: torch.Tensor | None) -> torch.Tensor:
        number = next(numbers)
        if update is None:
            return param
        if key is None or param.dtype != torch.bfloat16:
            return (param + update).to(param.dtype)
        total = param.to(torch.float32) + update
        return stochastic_round(fold_in(key, number), total, param.dtype)

    return tree.map(add, params, updates)
