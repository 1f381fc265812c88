r"""Loss scaling for float16, whose smallest number is 6e-8: gradients are computed of a multiple of the loss.

    scaling = DynamicLossScale()
    loss = scaling.scale(state, loss)         in the function that is differentiated
    grads = scaling.unscale(state, grads)     before they are clipped and used
    finite = all_finite(grads)                the same on every rank
    params = where(finite, updated, params)   a step that overflowed changes nothing
    state = scaling.adjust(state, finite)     halved after an overflow, doubled after a while without

The state is a pytree and all of it happens in the graph.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from ptrainx.core import tree
from ptrainx.optim.checks import POSITIVE, STEPS, Rule, check
from ptrainx.optim.scaling import times

__all__ = ["DynamicLossScale", "LossScaleState", "all_finite"]

_ABOVE_ONE = Rule("a finite number > 1", lambda x: x > 1)


class LossScaleState(NamedTuple):
    """The scale as it is now.

    Attributes:
        scale: 0-d float32 tensor.
        good_steps: finite steps since the scale changed last, or since it would have grown; 0-d int64 tensor.
    """

    scale: torch.Tensor
    good_steps: torch.Tensor


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A scale that looks for the largest value at which gradients stay finite.

    After an overflow it is divided by `factor`, though not below `min`; after `growth_interval` finite steps in a row
    it is multiplied by it, unless that would be infinite. With a factor that is a power of two, as here, scaling and
    unscaling round nothing but what is too small for the dtype.

    Args:
        initial: the first scale.
        growth_interval: finite steps until it grows.
        factor: by which it grows and shrinks.
        min: below which it does not shrink.

    Raises:
        HyperparameterError: a setting is out of range; the message names all of them.

    >>> scaling = DynamicLossScale(initial=8.0, growth_interval=2)
    >>> state = scaling.init()
    >>> for finite in (False, True, True):
    ...     state = scaling.adjust(state, torch.tensor(finite))
    ...     print(float(state.scale))
    4.0
    4.0
    8.0

    Source: Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740. The sequence of
    scales is that of `torch.amp.GradScaler` and of jmp's `DynamicLossScale`.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    factor: float = 2.0
    min: float = 1.0

    def __post_init__(self) -> None:
        low = self.min if POSITIVE.allows(self.min) else 0
        start = Rule(f"a finite number > 0 and >= min={low}", lambda x: x > 0 and x >= low)
        check(
            "DynamicLossScale",
            initial=(self.initial, start),
            growth_interval=(self.growth_interval, STEPS),
            factor=(self.factor, _ABOVE_ONE),
            min=(self.min, POSITIVE),
        )

    def init(self) -> LossScaleState:
        """The state to start from."""
        return LossScaleState(torch.tensor(float(self.initial)), torch.zeros((), dtype=torch.int64))

    def scale(self, state: LossScaleState, values: Any) -> Any:
        """Values times the scale, in their own dtypes: the loss, in the function that is differentiated.

        Scale a float32 loss (`px.Precision(output=torch.float32)` gives one): a float16 overflows at 65,504.
        """
        return times(values, state.scale)

    def unscale(self, state: LossScaleState, values: Any) -> Any:
        """Values divided by the scale: gradients, before anything looks at their size; and the loss.

        Float16 and bfloat16 leaves come out as float32, which holds what they would lose.
        """

        def one(value: torch.Tensor) -> torch.Tensor:
            return value.to(torch.promote_types(value.dtype, torch.float32)) * inverse

        inverse = 1 / state.scale
        return tree.map(one, values)

    def adjust(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """The state after a step whose gradients were finite, or were not.

        Args:
            state: as it was in the step.
            finite: 0-d bool tensor, from `all_finite`.
        """
        finite = torch.as_tensor(finite)
        steps = state.good_steps + 1
        full = steps >= self.growth_interval
        grown = state.scale * self.factor
        grown = torch.where(full & grown.isfinite(), grown, state.scale)
        shrunk = (state.scale / self.factor).clamp(min=self.min)
        return LossScaleState(
            torch.where(finite, grown, shrunk),
            torch.where(finite & ~full, steps, torch.zeros_like(steps)),
        )


def all_finite(values: Any) -> torch.Tensor:
    """Whether no element of any leaf is infinite or NaN.

    Over sharded leaves each rank counts its own and one all-reduce of a scalar a mesh axis pays for all leaves, so that
    every rank gets the same answer. Gradients whose own sums are owed are summed first: pay those before.

    Args:
        values: pytree of tensors.

    Returns:
        0-d bool tensor; of an empty tree, true.

    >>> all_finite({"a": torch.tensor([1.0, float("inf")])})
    tensor(False)
    """
    counts = [(~torch.isfinite(leaf)).sum(dtype=torch.float32) for leaf in tree.leaves(values)]
    return torch.stack(counts).sum() == 0 if counts else torch.tensor(True)
