"""Hyperparameters as state: readable, replaceable between steps without retracing, driven by schedules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ptrainx.core.errors import HyperparameterError
from ptrainx.optim.base import GradientTransformation
from ptrainx.optim.moments import new_count

__all__ = ["InjectHyperparamsState", "inject_hyperparams"]

_ALWAYS_STATIC = ("mask",)


class InjectHyperparamsState(NamedTuple):
    """The state of a transformation whose hyperparameters are state.

    Attributes:
        count: updates done, 0-d int64 tensor, starts at 0.
        hyperparams: name to value, 0-d tensors (float64 where they were given as floats).
        inner_state: the state of the transformation itself.
    """

    count: torch.Tensor  # type: ignore[assignment]  # the name hides tuple.count, which no one calls
    hyperparams: dict[str, torch.Tensor]
    inner_state: Any


def inject_hyperparams(
    factory: Callable[..., GradientTransformation], static_args: Sequence[str] = ()
) -> Callable[..., GradientTransformation]:
    """Wraps an optimizer's factory so that the floats it is called with live in the optimizer's state.

    Of the arguments that a call names, floats and 0-d tensors become state; functions are schedules, evaluated at every
    update, whose latest value is kept in the state for logging. Integers, bools, defaults, an argument called `mask`
    and the `static_args` go to the factory as they are. An argument becomes a 0-d tensor for the factory, which must
    take one there (`learning_rate`, `weight_decay`, `max_norm`, `step_size` and `max_delta` do).

    Args:
        factory: a function that returns a `GradientTransformation`.
        static_args: names of arguments to leave alone.

    Returns:
        A function with the factory's arguments.

    Raises:
        HyperparameterError: `static_args` names no argument of the factory; a setting is out of range.

    >>> from ptrainx.optim import sgd
    >>> optimizer = inject_hyperparams(sgd)(learning_rate=0.5)
    >>> state = optimizer.init(torch.zeros(2))
    >>> state = state._replace(hyperparams={"learning_rate": state.hyperparams["learning_rate"] / 5})
    >>> optimizer.update(torch.ones(2), state)[0]
    tensor([-0.1000, -0.1000])
    """
    signature = inspect.signature(factory)
    unknown = set(static_args) - set(signature.parameters)
    if unknown:
        raise HyperparameterError(
            "inject_hyperparams: static_args names arguments that the factory does not have",
            got=", ".join(sorted(unknown)),
            expected=f"some of {', '.join(signature.parameters)}",
        )
    fixed = {*_ALWAYS_STATIC, *static_args}

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        given = {name: v for name, v in bound.arguments.items() if name not in fixed and _is_injectable(v)}

        def build(values: dict[str, Any]) -> GradientTransformation:
            settings = inspect.BoundArguments(signature, {**bound.arguments, **values})
            return factory(*settings.args, **settings.kwargs)

        def evaluate(count: torch.Tensor, values: dict[str, Any]) -> dict[str, torch.Tensor]:
            return {name: _tensor(given[name](count) if callable(given[name]) else v) for name, v in values.items()}

        # Settings are checked here, on the numbers themselves; tensors can't be.
        build({name: torch.zeros(()) if callable(v) else v for name, v in given.items()})

        def init(params: Any) -> InjectHyperparamsState:
            count = new_count()
            hyperparams = evaluate(count, given)
            return InjectHyperparamsState(count, hyperparams, build(hyperparams).init(params))

        def update(
            updates: Any, state: InjectHyperparamsState, params: Any = None
        ) -> tuple[Any, InjectHyperparamsState]:
            hyperparams = evaluate(state.count, state.hyperparams)
            updates, inner_state = build(hyperparams).update(updates, state.inner_state, params)
            return updates, InjectHyperparamsState(state.count + 1, hyperparams, inner_state)

        return GradientTransformation(init, update)

    return wrapped


def _is_injectable(value: Any) -> bool:
    return isinstance(value, (float, torch.Tensor)) or callable(value)


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.float64)
