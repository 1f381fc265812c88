"""What an operation does to how the ranks' values are related, before it runs: casts, and refusals.

Where a value that is the same on every rank meets one that varies, it is cast (`linear.Cast`), so that its gradient is
summed over the ranks. A sum that is owed may be added to its like, scaled by what is the same on every rank, moved and
viewed; anything else would be computed of an addend alone, and is refused.
"""

from __future__ import annotations

from typing import Any

import optree
import torch

from ptrainx.core.avals import describe
from ptrainx.core.errors import MutationError, SpecError
from ptrainx.mesh.per_shard import is_per_shard, relation
from ptrainx.ops.collectives.linear import varying
from ptrainx.ops.collectives.region import Region

__all__ = ["relate", "vary_over"]

T = torch.Tensor
_ADD = {"add", "add_", "sub", "sub_", "subtract", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__"}
_SCALE = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__", "matmul", "__matmul__", "__rmatmul__", "mm",
          "bmm", "mv", "einsum", "linear"}  # fmt: skip
_DIVIDE = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"}
_LINEAR = {
    "__getitem__", "alias", "cat", "chunk", "clone", "concat", "contiguous", "detach", "double", "expand", "expand_as",
    "flatten", "flip", "float", "half", "bfloat16", "mean", "movedim", "narrow", "neg", "__neg__", "permute", "reshape",
    "roll", "select", "split", "squeeze", "stack", "sum", "swapaxes", "swapdims", "t", "to", "transpose", "tril",
    "triu", "type", "unbind", "unflatten", "unsqueeze", "view", "view_as", "zeros_like",
}  # fmt: skip
_BLIND = {"empty_like", "full_like", "ones_like", "rand_like", "new_empty", "new_full", "new_ones", "new_tensor",
          "new_zeros", "zeros_like", "detach_"}  # fmt: skip
"""Functions that read no value of their operand."""


def relate(region: Region, func: Any, args: Any, kwargs: Any, source: str) -> tuple[Any, Any]:
    """The arguments of a torch function, cast where they have to be.

    Raises:
        SpecError: an unpaid sum is an operand of something that is not linear in it.
        MutationError: a varying value is written into one that is differentiated and the same on every rank.
    """
    arguments: Any = (args, kwargs)
    leaves = [x for x in optree.tree_leaves(arguments, none_is_leaf=True) if is_per_shard(x)]
    name = getattr(func, "__name__", str(func))
    if not leaves or name in _BLIND:
        return args, kwargs
    placements = {id(x): relation(x) for x in leaves}
    owed = {i for p in placements.values() for i, q in enumerate(p) if q.is_partial()}
    if owed:
        _check_owed(region, name, args, leaves, placements, owed, source)
    axes = vary_over(region, leaves)
    if len(leaves) == 1:
        return args, kwargs
    if _writes(name) and is_per_shard(args[0]):
        _check_write(region, name, args[0], axes, source)

    def cast(x: Any) -> Any:
        return varying(x, region, axes, source) if is_per_shard(x) and x.requires_grad else x

    if not torch.is_grad_enabled():
        return args, kwargs
    moved: Any = optree.tree_map(cast, arguments, none_is_leaf=True)
    return moved[0], moved[1]


def vary_over(region: Region, values: list[Any]) -> tuple[str, ...]:
    """The axes along which some of the values are not the same on every rank."""
    found = {i for x in values for i, p in enumerate(relation(x)) if not p.is_replicate()}
    return tuple(axis for i, axis in enumerate(region.axis_names) if i in found)


def _writes(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return (name.startswith("__i") or name == "__setitem__") if dunder else name.endswith("_")


def _check_write(region: Region, name: str, target: Any, axes: tuple[str, ...], source: str) -> None:
    lacking = [axis for axis in axes if relation(target)[region.axis_names.index(axis)].is_replicate()]
    if lacking and target.requires_grad and torch.is_grad_enabled():
        raise MutationError(
            f"{region.name} writes a value that varies along {lacking} in place into a differentiated one that doesn't",
            got=f"{name} on {describe(target)}",
            source=source,
            fix="make a new value (x = x + y instead of x += y)",
        )


def _check_owed(
    region: Region, name: str, args: Any, leaves: list[Any], placements: Any, owed: set[int], source: str
) -> None:
    axes = tuple(region.axis_names[i] for i in sorted(owed))
    alike = all(all(placements[id(x)][i].is_partial() for i in owed) for x in leaves)
    one = sum(any(placements[id(x)][i].is_partial() for i in owed) for x in leaves) == 1
    same_elsewhere = all(
        placements[id(x)][i].is_partial() or placements[id(x)][i].is_replicate() for x in leaves for i in owed
    )
    numbers = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    fits = (
        (name in _LINEAR and alike)
        or (name in _ADD and alike and not any(numbers))
        or (name in _SCALE and one and same_elsewhere)
        or (name in _DIVIDE and one and same_elsewhere and is_per_shard(args[0]) and placements[id(args[0])] != ())
    )
    if fits and name in _DIVIDE:
        fits = any(placements[id(args[0])][i].is_partial() for i in owed)
    if not fits:
        shown = axes[0] if len(axes) == 1 else axes
        raise SpecError(
            f"{region.name} computes {name} of a sum that is still owed along {', '.join(map(repr, axes))}",
            got="each rank holds an addend of it",
            expected="the sum itself, or what is linear in it: its like added, a factor that is the same on every rank",
            source=source,
            fix=f"pay it first: px.psum(x, {shown!r})",
        )
