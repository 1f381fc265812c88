"""`rearrange`, `reduce` and `repeat`: einops on plain, global and per-shard values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import einops
import torch

from ptrainx.core.errors import InputError
from ptrainx.core.trace_context import user_source
from ptrainx.ops.einops.extreme import extreme
from ptrainx.ops.einops.pattern import flat, parse, singles
from ptrainx.ops.einops.regroup import regroup
from ptrainx.ops.parts import Call, open_call

__all__ = ["rearrange", "reduce", "repeat"]

Tensors = torch.Tensor | Sequence[torch.Tensor]
Dims = tuple[int, ...]
Reduction = str | Callable[[torch.Tensor, Dims], torch.Tensor]


def rearrange(x: Tensors, pattern: str, **sizes: int) -> torch.Tensor:
    """`einops.rearrange`, on sharded values too.

    A mesh axis that splits a dim splits one elementary axis of the pattern. If that stays the major one of its dim, as
    `h` in `"b t (h d) -> b h t d"`, it stays split, and nothing is sent. If not, as in `"b t (h d) -> b t (d h)"`, the
    mesh axis is gathered, which `comms()` tells as implied, with axis and pattern.

    Args:
        x: a tensor, or several of one shape, which are stacked along a new first dim. Plain, a global value in
            `px.jit`, a rank's part in the body of a `px.shard_map`.
        pattern: as of einops.
        sizes: of elementary axes that the shape does not tell.

    Returns:
        the rearranged value, of the same dtype.

    Raises:
        InputError: a pattern that does not fit.
        TraceError: a placed value outside of a step.

    Gradient: rearranged back, with nothing sent where nothing was; sums that are owed stay so.

    Source: Rogozhnikov, "Einops", ICLR 2022, https://einops.rocks.

    >>> rearrange(torch.arange(6), "(a b) -> b a", a=2)
    tensor([[0, 3],
            [1, 4],
            [2, 5]])
    """
    x = _one(x)
    parsed = parse("rearrange", pattern, tuple(x.shape), tuple(sizes.items()))
    call = open_call(f"px.ops.rearrange {pattern!r}", [x])
    if call is None:
        return einops.rearrange(x, pattern, **sizes)
    return regroup(call.trace.as_global(x), parsed.left, parsed.right, dict(parsed.sizes), call)


def reduce(x: Tensors, pattern: str, reduction: Reduction, **sizes: int) -> torch.Tensor:
    """`einops.reduce`, on sharded values too: the axes that are missing on the right are reduced.

    A reduction over an axis that is not split sends nothing. Over one that is, a sum or mean stays owed and is paid
    where it is used; a maximum or minimum costs one all-reduce of the result.

    Args:
        x: as for `rearrange`.
        pattern: as of einops.
        reduction: "sum", "mean", "max", "min", "prod", "any", "all", or a function of a tensor and the dims to reduce.
        sizes: of elementary axes that the shape does not tell.

    Returns:
        the reduced value.

    Raises:
        InputError: a pattern that does not fit, an unknown reduction.
        TraceError: a placed value outside of a step.

    >>> reduce(torch.arange(6.0), "(a b) -> b", "mean", a=2)
    tensor([1.5000, 2.5000, 3.5000])
    """
    x = _one(x)
    if isinstance(reduction, str) and reduction not in _REDUCTIONS:
        raise InputError(
            f"px.ops.reduce {pattern!r}: no reduction is called {reduction!r}",
            expected=f"one of {', '.join(_REDUCTIONS)}, or a function of (tensor, dims)",
            source=user_source(),
        )
    parsed = parse("reduce", pattern, tuple(x.shape), tuple(sizes.items()))
    call = open_call(f"px.ops.reduce {pattern!r}", [x])
    if call is None:
        whole: Any = reduction
        return einops.reduce(x, pattern, whole, **sizes)
    known, kept = dict(parsed.sizes), flat(parsed.right)
    gone = [name for name in flat(parsed.left) if name not in kept]
    x = regroup(call.trace.as_global(x), parsed.left, singles([*kept, *gone]), known, call)
    if gone:
        x = _reduced(x, tuple(range(len(kept), len(kept) + len(gone))), reduction, call)
    return regroup(call.trace.as_global(x), singles(kept), parsed.right, known, call)


def repeat(x: Tensors, pattern: str, **sizes: int) -> torch.Tensor:
    """`einops.repeat`, on sharded values too: the axes that are new on the right are repeated over.

    New axes are not split. What is split stays so if it stays major, as `h` in `"t h -> t (h copies)"`.

    Args:
        x: as for `rearrange`.
        pattern: as of einops.
        sizes: of the new axes, and of others that the shape does not tell.

    Returns:
        the repeated value, of the same dtype.

    Raises:
        InputError: a pattern that does not fit.
        TraceError: a placed value outside of a step.

    >>> repeat(torch.tensor([1, 2]), "h -> (h copies)", copies=2)
    tensor([1, 1, 2, 2])
    """
    x = _one(x)
    parsed = parse("repeat", pattern, tuple(x.shape), tuple(sizes.items()))
    call = open_call(f"px.ops.repeat {pattern!r}", [x])
    if call is None:
        return einops.repeat(x, pattern, **sizes)
    known, before, after = dict(parsed.sizes), flat(parsed.left), flat(parsed.right)
    out = regroup(call.trace.as_global(x), parsed.left, singles([n for n in after if n in before]), known, call)
    for dim, name in enumerate(after):
        out = out if name in before else out.unsqueeze(dim)
    if len(after) > len(before):
        out = out.expand([known[name] for name in after])
    return regroup(out, singles(after), parsed.right, known, call)


def _one(x: Tensors) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.stack(list(x))


def _reduced(x: Any, dims: Dims, reduction: Reduction, call: Call) -> torch.Tensor:
    if not isinstance(reduction, str):
        return reduction(x, dims)
    return extreme(x, dims, reduction == "max", call) if reduction in ("max", "min") else _SIMPLE[reduction](x, dims)


def _prod(x: torch.Tensor, dims: Dims) -> torch.Tensor:
    for dim in reversed(dims):
        x = x.prod(dim)
    return x


_SIMPLE: dict[str, Callable[[torch.Tensor, Dims], torch.Tensor]] = {
    "sum": lambda x, dims: x.sum(dims),
    "mean": lambda x, dims: x.mean(dims),
    "prod": _prod,
    "any": lambda x, dims: x.any(dims),
    "all": lambda x, dims: x.all(dims),
}
_REDUCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all")
