"""Full-precision copies of low-precision parameters, as part of the optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ptrainx.core import tree
from ptrainx.core.errors import HyperparameterError, InputError
from ptrainx.optim.base import GradientTransformation
from ptrainx.optim.combine import require_transform

__all__ = ["MasterState", "with_master"]


class MasterState(NamedTuple):
    """The state of `with_master`.

    Attributes:
        master: the parameters in full precision, tree like the parameters.
        inner_state: the inner optimizer's, over that tree.
    """

    master: Any
    inner_state: Any


def with_master(inner: GradientTransformation, dtype: torch.dtype = torch.float32) -> GradientTransformation:
    """Runs an optimizer on full-precision copies of parameters that are stored in bfloat16 or float16.

    Updates are the difference between the copies, rounded, and the parameters: after `apply_updates` a parameter is its
    copy, rounded to the nearest. The copies and the inner state have the parameters' placements, or others, as the
    specs of the state say: with them on `"data"` it is ZeRO-1 whose parameters are gathered in bfloat16.

    Where parameters can be stored in float32, `px.Precision` needs no such copies: the parameters are the master
    values, and their casts live in the step alone.

    Args:
        inner: the optimizer. It sees gradients and parameters in `dtype`.
        dtype: of the copies, float32 or float64.

    Raises:
        HyperparameterError: `inner` is no transformation, or `dtype` is another one.
        InputError: `update` was called without params.

    >>> from ptrainx.optim import apply_updates, sgd
    >>> params, optimizer = torch.tensor([1.0], dtype=torch.bfloat16), with_master(sgd(1.0))
    >>> state = optimizer.init(params)
    >>> for _ in range(2):  # half of the distance to the next bfloat16 below 1, twice
    ...     updates, state = optimizer.update(torch.tensor([2.0**-9], dtype=torch.bfloat16), state, params)
    ...     params = apply_updates(params, updates)
    >>> params
    tensor([0.9961], dtype=torch.bfloat16)

    Source: Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740.
    """
    require_transform("with_master: inner", inner)
    if dtype not in (torch.float32, torch.float64):
        raise HyperparameterError(
            "with_master: dtype is no full precision",
            got=str(dtype),
            expected="torch.float32 or torch.float64",
            fix="leave it out for float32",
        )

    def init(params: Any) -> MasterState:
        # A copy even where the dtype is that already: a state that shares memory could not be donated.
        master = tree.map(lambda param: param.to(dtype, copy=True), params)
        return MasterState(master, inner.init(master))

    def update(updates: Any, state: MasterState, params: Any = None) -> tuple[Any, MasterState]:
        if params is None:
            raise InputError(
                "with_master.update: params is missing",
                got="params=None",
                expected="the parameters that the updates are for",
                fix="call optimizer.update(grads, opt_state, params)",
            )
        wide = tree.map(lambda u: u.to(dtype), updates)
        steps, inner_state = inner.update(wide, state.inner_state, state.master)
        master = tree.map(lambda value, step: value + step, state.master, steps)
        change = tree.map(lambda value, param: value.to(param.dtype).to(dtype) - param.to(dtype), master, params)
        return change, MasterState(master, inner_state)

    return GradientTransformation(init, update)
