"""Patterns as lists of elementary axes with sizes. einops itself judges whether a pattern is right.

In `"b (h d) -> b h d"` the second dim on the left is made of two elementary axes, `h` and `d`. Next stage: `regroup`,
which finds out which of them a mesh axis splits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import einops
import torch
from einops import EinopsError
from einops.parsing import AnonymousAxis, ParsedExpression

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import InputError
from ptrainx.core.trace_context import user_source

__all__ = ["Groups", "Pattern", "flat", "parse", "parse_einsum", "singles"]

Groups = tuple[tuple[str, ...], ...]
"""The elementary axes of each dim, major to minor."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern for values of one shape.

    Attributes:
        left: the operand's dims.
        right: the result's dims.
        sizes: of each elementary axis, as (name, size) pairs.
    """

    left: Groups
    right: Groups
    sizes: tuple[tuple[str, int], ...]


def flat(groups: Groups) -> tuple[str, ...]:
    """All elementary axes, in order."""
    return tuple(name for group in groups for name in group)


def singles(names: Sequence[str]) -> Groups:
    """One dim for each elementary axis."""
    return tuple((name,) for name in names)


@functools.lru_cache(maxsize=4096)
def parse(function: str, pattern: str, shape: tuple[int, ...], given: tuple[tuple[str, int], ...]) -> Pattern:
    """What a pattern says of a value.

    Args:
        function: "rearrange", "reduce" or "repeat".
        pattern: two sides with `->` between them.
        shape: of the value.
        given: sizes of elementary axes that the caller tells.

    Raises:
        InputError: einops does not accept the pattern for this shape.
    """
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "rearrange": lambda x: einops.rearrange(x, pattern, **dict(given)),
        "reduce": lambda x: einops.reduce(x, pattern, "max", **dict(given)),
        "repeat": lambda x: einops.repeat(x, pattern, **dict(given)),
    }
    _judge(function, pattern, [shape], lambda values: calls[function](values[0]))
    sides = pattern.split("->")
    expressions = [ParsedExpression(side) for side in sides]
    dims = len(shape) - (len(expressions[0].composition) - 1 if expressions[0].has_ellipsis else 0)
    left, right = (_groups(e, dims, f"{i}") for i, e in enumerate(expressions))
    sizes = dict(given)
    for names, n in zip(left, shape):
        sizes.update({name: int(name.split("#")[0]) for name in names if "#" in name})
        unknown = [name for name in names if name not in sizes]
        if unknown:
            known = math.prod(sizes[name] for name in names if name in sizes)
            sizes[unknown[0]] = n // known if known else 0
    sizes.update({name: int(name.split("#")[0]) for name in flat(right) if "#" in name})
    return Pattern(left, right, tuple(sizes.items()))


def parse_einsum(
    pattern: str, shapes: Sequence[tuple[int, ...]]
) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The axes of each operand and of the result of `einsum`.

    Raises:
        InputError: einops does not accept the pattern for these shapes, or the dims of an ellipsis differ.
    """
    einsum: Any = einops.einsum
    _judge("einsum", pattern, shapes, lambda values: einsum(*values, pattern))
    left, _, right = pattern.partition("->")
    sides = [ParsedExpression(side, allow_underscore=True, allow_duplicates=True) for side in (*left.split(","), right)]
    ellipses = {len(shape) - (len(s.composition) - 1) for s, shape in zip(sides, shapes) if s.has_ellipsis}
    names = [flat(_groups(side, max(ellipses, default=0), "")) for side in sides]
    sizes: dict[str, int] = {}
    differ = [
        n for own, shape in zip(names, shapes) for n, size in zip(own, shape) if sizes.setdefault(n, size) != size
    ]
    if differ or len(ellipses) > 1:
        raise InputError(
            f"px.ops.einsum {pattern!r}: the operands' dims differ",
            got=", ".join(map(str, shapes)),
            expected="one size for each name, and the same dims in place of each ellipsis",
            fix="px.ops.repeat the dims that are missing, or name them",
            source=user_source(),
        )
    return tuple(names[:-1]), names[-1]


def _judge(function: str, pattern: str, shapes: Sequence[tuple[int, ...]], call: Callable[[list[Any]], Any]) -> None:
    """Runs einops on values without data."""
    try:
        with tc.no_dispatch_modes(), tc.DisableTorchFunction():
            call([torch.empty(shape, device="meta") for shape in shapes])
    except (EinopsError, RuntimeError) as error:
        raise InputError(
            f"px.ops.{function} {pattern!r} does not fit",
            got=", ".join(f"shape {shape}" for shape in shapes),
            expected=" ".join(str(error).split()),
            fix="the left side has one name or group for each dim; see https://einops.rocks",
            source=user_source(),
        ) from None


def _groups(expression: ParsedExpression, dims: int, side: str) -> Groups:
    """Dims as elementary axes: those of an ellipsis are `…0`, `…1`, those that are numbers `3#side.0`."""
    dots = [f"…{i}" for i in range(dims)]
    count = iter(range(1_000))

    def names(group: Any) -> list[str]:
        found: list[str] = []
        for axis in group:
            if isinstance(axis, AnonymousAxis):
                found.append(f"{axis.value}#{side}.{next(count)}")
            else:
                found += dots if axis == "…" else [axis]
        return found

    groups: list[tuple[str, ...]] = []
    for group in expression.composition:
        groups += [(dot,) for dot in dots] if group == "…" else [tuple(names(group))]
    return tuple(groups)
