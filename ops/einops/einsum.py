"""`einsum`: sums of products named by axes, on plain, global and per-shard values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import einops
import torch

from ptrainx.core.errors import InputError
from ptrainx.core.trace_context import user_source
from ptrainx.ops.einops.contract import Names, contract
from ptrainx.ops.einops.pattern import parse_einsum
from ptrainx.ops.parts import open_call

__all__ = ["einsum"]


def einsum(*tensors_and_pattern: Any) -> torch.Tensor:
    """`einops.einsum`, on sharded values too: `einsum(x, w, "b t d, d h -> b t h")`.

    Along each mesh axis, every rank computes with its parts of one named axis, or all ranks compute the same. Operands
    that are split by different ones meet at what costs least to move, which `comms()` tells as implied. A named axis
    that is split in one operand alone and replicated in the others is cut there, and nothing is sent. Where a
    contracted axis is split, the result is a sum that is owed, and is paid where it is used.

    Args:
        tensors_and_pattern: the operands, then the pattern, as of einops.

    Returns:
        the contraction.

    Raises:
        InputError: a pattern that does not fit.
        TraceError: a placed value outside of a step.

    Gradient: of each operand a contraction of the others with the cotangent, by the same rules; of a replicated
    operand, a sum that is owed over the mesh axes that split the result.

    >>> einsum(torch.ones(2, 3), torch.ones(3, 2), "b d, d h -> b h")
    tensor([[3., 3.],
            [3., 3.]])
    """
    *operands, pattern = tensors_and_pattern
    if not isinstance(pattern, str) or not operands or not all(isinstance(x, torch.Tensor) for x in operands):
        raise InputError(
            "px.ops.einsum takes tensors, then a pattern",
            got=", ".join(type(x).__name__ for x in tensors_and_pattern),
            fix='write px.ops.einsum(x, w, "b d, d h -> b h")',
            source=user_source(),
        )
    names, result = parse_einsum(pattern, [tuple(x.shape) for x in operands])
    call = open_call(f"px.ops.einsum {pattern!r}", operands)
    if call is None:
        plain: Any = einops.einsum
        return plain(*operands, pattern)
    values = [call.trace.as_global(x) for x in operands]
    prepared = [_prepared(x, own, _others(names, i, result)) for i, (x, own) in enumerate(zip(values, names))]
    return contract([x for x, _ in prepared], tuple(own for _, own in prepared), result, call)


def _others(names: Sequence[Names], i: int, result: Names) -> set[str]:
    return {name for own in (*names[:i], *names[i + 1 :], result) for name in own}


def _prepared(x: Any, names: Names, needed: set[str]) -> tuple[Any, Names]:
    """An operand with its diagonals taken, and what nobody else needs summed."""
    own = list(names)
    for name in dict.fromkeys(names):
        while own.count(name) > 1:
            first = own.index(name)
            second = own.index(name, first + 1)
            x = x.diagonal(dim1=first, dim2=second)
            own = [n for i, n in enumerate(own) if i not in (first, second)] + [name]
    alone = tuple(i for i, name in enumerate(own) if name not in needed)
    return (x.sum(alone), tuple(n for n in own if n in needed)) if alone else (x, tuple(own))
