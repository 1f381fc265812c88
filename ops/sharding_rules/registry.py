"""`register_sharding`: which placements an operator may be given, and what placements its results have then.

DTensor asks for it while a step is traced; whatever placements the operands have, it brings them to the row that costs
least. Our own rules, by family of operators in this folder, are registered in the same way.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import Replicate

from ptrainx.core.errors import InputError, SpecError
from ptrainx.core.torch_compat_rules import set_rule

__all__ = ["ENTRY_POINTS", "register_sharding", "registered_by_packages", "rules_version"]

ENTRY_POINTS = "ptrainx.sharding_rules"
"""Entry points of installed packages: functions without arguments that register rules, called before a first trace."""

Row = tuple[Any, Any]
_registered = 0


def register_sharding(*operators: Any) -> Callable[[Callable[..., Sequence[Row]]], Callable[..., Sequence[Row]]]:
    """Registers a function as the sharding rule of operators; a decorator. It replaces what torch or ptrainx knows.

    A rule speaks of one mesh axis; over several axes every combination of its rows is allowed. A row says: the ranks
    along the axis may run the operator on their local parts of operands at these placements, and their results are then
    the parts of the global result at those placements. That everything may be replicated need not be said.

    Args:
        *operators: overloads, such as `torch.ops.mylib.scale_rows.default`. An operator that has a gradient needs a
            rule for the operator of its backward, too; one without is run on gathered operands.

    Returns:
        a decorator of the rule: a function that takes the operator's arguments, a `px.ShapeDtypeStruct` for each
        tensor, and returns rows `(outputs, inputs)`. `outputs` is a placement, or a list of one for each result;
        `inputs` a list of one for each argument, None for one that is no tensor; what is left out at the end counts as
        None. Placements are `Shard(dim)`, `Replicate()` and `Partial()` of `torch.distributed.tensor`.

    Raises:
        InputError: something that is no operator's overload.
        SpecError: when the rule is used: a row with more placements than the operator has arguments or results.

    >>> import torch
    >>> from torch.distributed.tensor import Partial, Shard
    >>> @register_sharding(torch.ops.aten.cumsum.default)
    ... def cumsum(x, dim, **kwargs):
    ...     split = [(Shard(i), [Shard(i)]) for i in range(x.ndim) if i != dim % x.ndim]
    ...     return [*split, (Partial(), [Partial()])]
    """
    for operator in operators:
        if not hasattr(operator, "_schema"):
            raise InputError(
                "register_sharding takes overloads of operators",
                got=repr(operator),
                expected="torch.ops.<library>.<operator>.<overload>",
                fix="add the overload: torch.ops.mylib.scale_rows.default",
            )

    def register(rule: Callable[..., Sequence[Row]]) -> Callable[..., Sequence[Row]]:
        global _registered
        for operator in operators:
            set_rule(operator, _checked(operator, rule))
        _registered += 1
        return rule

    return register


def rules_version() -> int:
    """Grows with every registration: what was worked out by older rules counts no more."""
    return _registered


def registered_by_packages() -> None:
    """Calls the functions that installed packages name as entry points `ptrainx.sharding_rules`."""
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        entry.load()()


def _checked(operator: Any, rule: Callable[..., Sequence[Row]]) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """The rule with its rows in full: one placement a result and an argument that is given."""
    results = len(operator._schema.returns)

    def rows(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        given = [*args, *kwargs.values()]
        whole = [Replicate() if _is_tensor(value) else None for value in given]
        found = [([Replicate()] * results, whole)]
        for outputs, inputs in rule(*args, **kwargs):
            outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
            inputs = [*inputs, *[None] * (len(given) - len(inputs))]
            placed = [value is not None for value in inputs]
            if len(outputs) != results or placed != [_is_tensor(value) for value in given]:
                raise SpecError(
                    f"the sharding rule of {operator} has a row that does not fit the operator",
                    got=f"{outputs} from {inputs}",
                    expected=f"{results} placements of results, from one for each tensor of {given}",
                    fix="give each tensor argument a placement, and None to what is no tensor",
                )
            if any(value not in (None, Replicate()) for value in inputs[len(args) :]):
                raise SpecError(
                    f"the sharding rule of {operator} splits an operand that is passed by keyword",
                    got=f"{outputs} from {inputs}",
                    fix="give tensors that are passed by keyword Replicate(), or make them positional",
                )
            found.append((outputs, inputs))
        return found

    return rows


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")
