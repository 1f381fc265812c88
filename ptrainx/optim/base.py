"""What an optimizer is: a pair of pure functions over pytrees, and the one addition that applies its result.

Enters: gradients, state, parameters. Leaves: updates (to be *added* to the parameters) and the next state. The other
files of this room are transformations of this one shape; `combine` strings them together, `alias` names the usual ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ptrainx.core import tree

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


def apply_updates(params: Any, updates: Any) -> Any:
    """`params + updates`, leaf by leaf, in the parameters' dtypes.

    The sum is taken in the wider of the two dtypes and rounded once.

    Args:
        params: pytree of tensors.
        updates: pytree of the same structure; None in place of a leaf leaves that parameter as it is.

    Returns:
        The new parameters.

    Raises:
        TreeError: the two structures differ.

    >>> apply_updates({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, -0.5])})
    {'w': tensor([1.5000, 1.5000])}
    """

    def add(param: torch.Tensor, update: torch.Tensor | None) -> torch.Tensor:
        return param if update is None else (param + update).to(param.dtype)

    return tree.map(add, params, updates)
