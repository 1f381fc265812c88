"""Checks of optimizer and schedule settings: values and rules go in, one `HyperparameterError` for all mistakes out.

Only what the host knows is checked: of a tensor, its shape and dtype, never its value.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ptrainx.core.errors import HyperparameterError

__all__ = [
    "COUNT",
    "FINITE",
    "LEARNING_RATE",
    "NON_NEGATIVE",
    "NON_NEGATIVE_OR_TENSOR",
    "OPTIONAL_NON_NEGATIVE",
    "OPTIONAL_UNIT",
    "POSITIVE",
    "POSITIVE_OR_TENSOR",
    "STEPS",
    "UNIT",
    "Rule",
    "check",
    "is_number",
]


@dataclass(frozen=True)
class Rule:
    """What a setting may be.

    Attributes:
        expected: the rule in words, for messages.
        in_range: whether a finite number is allowed.
        integer: only whole numbers of integer type.
        tensor: a real 0-d tensor is allowed too.
        schedule: a callable is allowed too.
        optional: None is allowed too.
    """

    expected: str
    in_range: Callable[[float], bool]
    integer: bool = False
    tensor: bool = False
    schedule: bool = False
    optional: bool = False

    def allows(self, value: Any) -> bool:
        """Whether `value` keeps the rule."""
        if isinstance(value, torch.Tensor):
            return self.tensor and value.ndim == 0 and value.dtype != torch.bool and not value.is_complex()
        if value is None:
            return self.optional
        if is_number(value):
            kind = not self.integer or isinstance(value, numbers.Integral)
            return kind and math.isfinite(value) and self.in_range(value)
        return self.schedule and callable(value)


FINITE = Rule("a finite number or a 0-d tensor", lambda x: True, tensor=True)
NON_NEGATIVE = Rule("a finite number >= 0", lambda x: x >= 0)
NON_NEGATIVE_OR_TENSOR = replace(NON_NEGATIVE, expected="a finite number >= 0 or a 0-d tensor", tensor=True)
OPTIONAL_NON_NEGATIVE = replace(NON_NEGATIVE, expected="a finite number >= 0 or None", optional=True)
POSITIVE = Rule("a finite number > 0", lambda x: x > 0)
POSITIVE_OR_TENSOR = replace(POSITIVE, expected="a finite number > 0 or a 0-d tensor", tensor=True)
UNIT = Rule("a number in [0, 1)", lambda x: 0 <= x < 1)
OPTIONAL_UNIT = replace(UNIT, expected="a number in [0, 1) or None", optional=True)
STEPS = Rule("an integer > 0", lambda x: x > 0, integer=True)
COUNT = Rule("an integer >= 0", lambda x: x >= 0, integer=True)
LEARNING_RATE = replace(
    NON_NEGATIVE_OR_TENSOR,
    expected="a finite number >= 0, a 0-d tensor, or a schedule (count -> value)",
    schedule=True,
)


def is_number(value: Any) -> bool:
    """Whether `value` is a real Python or numpy number (and no bool)."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check(where: str, **settings: tuple[Any, Rule]) -> None:
    """Raises one error that tells every setting that breaks its rule.

    Args:
        where: the function whose arguments these are.
        settings: name to (value, rule).

    Raises:
        HyperparameterError: at least one value breaks its rule.

    >>> check("sgd", learning_rate=(0.1, LEARNING_RATE))
    >>> check("sgd", learning_rate=(-0.1, LEARNING_RATE))
    Traceback (most recent call last):
    ptrainx.core.errors.HyperparameterError: sgd: bad learning_rate
      got:      learning_rate=-0.1
      expected: learning_rate: a finite number >= 0, a 0-d tensor, or a schedule (count -> value)
      fix:      did you mean learning_rate=0.1?
    """
    wrong = {name: (value, rule) for name, (value, rule) in settings.items() if not rule.allows(value)}
    if wrong:
        raise HyperparameterError(
            f"{where}: bad {', '.join(wrong)}",
            got=", ".join(f"{name}={_show(value)}" for name, (value, _) in wrong.items()),
            expected="; ".join(f"{name}: {rule.expected}" for name, (_, rule) in wrong.items()),
            fix="; ".join(_fix(name, value, rule) for name, (value, rule) in wrong.items()),
        )


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):  # its value may not be readable: a traced tensor has none
        return f"tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fix(name: str, value: Any, rule: Rule) -> str:
    if isinstance(value, torch.Tensor):
        if rule.tensor:
            return f"pass {name} as a real tensor of shape ()"
        return f"pass {name} as a Python number (under inject_hyperparams, name it in static_args)"
    if is_number(value) and value < 0 and rule.allows(-value):
        return f"did you mean {name}={-value!r}?"
    return f"pass {name} as {rule.expected}"
