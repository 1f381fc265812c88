"""Contractions of global values: which named axis each mesh axis splits, and the product of the parts.

In a contraction every name but those of the result is summed over. Along one mesh axis the ranks may work on the parts
of one name, in every operand that has it; then that name is split in the result, or, if it is contracted, the results
are addends of a sum that is owed. Or all ranks work on the whole. `_ways` lists these, and the one that moves least
wins.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.ops.parts import Call, wrap

__all__ = ["Names", "contract"]

Names = tuple[str, ...]
Row = tuple[tuple[Placement, ...], Placement]
"""Along one mesh axis: the operands' placements, and the result's."""


def contract(operands: Sequence[DTensor], names: tuple[Names, ...], result: Names, call: Call) -> Any:
    """The contraction of global values.

    Args:
        operands: the values.
        names: of their dims; no name is twice in one, and each is in another operand or in the result.
        result: the names of the result's dims.
        call: for reports.
    """
    mesh = operands[0].device_mesh
    sizes = {name: n for x, own in zip(operands, names) for name, n in zip(own, x.shape)}
    rows = [_cheapest(i, operands, names, result, sizes) for i in range(mesh.ndim)]
    moved = []
    with call.trace.marked(asked=False, reason=f"operands of {call.label}", source=call.source):
        for k, x in enumerate(operands):
            wanted = [row[0][k] for row in rows]
            moved.append(x if list(x.placements) == wanted else x.redistribute(mesh, wanted))
    placements = tuple(row[1] for row in rows)
    return _Contract.apply(names, result, placements, [sizes[name] for name in result], call, *moved)


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        names: tuple[Names, ...],
        result: Names,
        placements: tuple[Placement, ...],
        shape: list[int],
        call: Call,
        *operands: Any,
    ) -> Any:
        ctx.names, ctx.result, ctx.call = names, result, call
        ctx.save_for_backward(*operands)
        letter = dict(zip(dict.fromkeys(n for own in names for n in own), string.ascii_letters))
        sides = ["".join(letter[name] for name in own) for own in (*names, result)]
        with tc.DisableTorchFunction(), call.trace.marked(source=call.source):
            locals_ = [x._local_tensor for x in operands]
            out = _product(locals_, names, result)
            out = torch.einsum(f"{','.join(sides[:-1])}->{sides[-1]}", *locals_) if out is None else out
            out = out.view_as(out) if any(out is x for x in locals_) else out
        return wrap(out, operands[0].device_mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        operands = ctx.saved_tensors
        grads: list[Any] = []
        for k, needed in enumerate(ctx.needs_input_grad[5:]):
            if not needed:
                grads.append(None)
                continue
            others = [x.conj() if x.is_complex() else x for x in (*operands[:k], *operands[k + 1 :])]
            names = (ctx.result, *ctx.names[:k], *ctx.names[k + 1 :])
            grads.append(contract([grad, *others], names, ctx.names[k], ctx.call))
        return None, None, None, None, None, *grads


def _product(operands: Sequence[torch.Tensor], names: Sequence[Names], result: Names) -> torch.Tensor | None:
    """The contraction as one matrix product, for which the fastest kernels are; None where it is none."""
    if len(operands) != 2:
        return None
    (a, b), (left, right) = operands, names
    contracted = [name for name in left if name in right]
    if not contracted or any(name in result for name in contracted):
        return None
    rows, columns = ([name for name in own if name not in contracted] for own in (left, right))
    size = {name: n for x, own in zip(operands, names) for name, n in zip(own, x.shape)}
    volume = [math.prod(size[name] for name in group) for group in (rows, contracted, columns)]
    first = a.permute([left.index(name) for name in (*rows, *contracted)]).reshape(volume[0], volume[1])
    second = b.permute([right.index(name) for name in (*contracted, *columns)]).reshape(volume[1], volume[2])
    out = (first @ second).reshape([size[name] for name in (*rows, *columns)])
    return out.permute([(*rows, *columns).index(name) for name in result])


def _cheapest(i: int, operands: Sequence[DTensor], names: Sequence[Names], result: Names, sizes: dict[str, int]) -> Row:
    """The row along mesh dim i that moves the fewest elements; the first of equals."""
    n = operands[0].device_mesh.shape[i]
    now = [x.placements[i] for x in operands]
    volumes = [_volume(x) for x in operands]
    volume = math.prod(sizes[name] for name in result)

    def cost(row: Row) -> float:
        moves = sum(_moved(old, new, size, n) for old, new, size in zip(now, row[0], volumes))
        # A sum that stays owed is paid in the result.
        owed = row[1].is_partial() and any(p.is_partial() for p in row[0])
        return moves + (2 * (n - 1) / n * volume if owed else 0)

    return min(_ways(now, names, result), key=cost)


def _volume(x: DTensor) -> float:
    """Elements of a rank's part: the same number on every rank, so that all choose alike where parts are uneven."""
    return math.prod(x.shape) / math.prod(x.device_mesh.shape[i] for i, p in enumerate(x.placements) if _splits(p))


def _splits(placement: Any) -> bool:
    return isinstance(placement, Shard) or tc.is_strided_shard(placement)


def _ways(now: Sequence[Any], names: Sequence[Names], result: Names) -> Iterator[Row]:
    """What the ranks along one mesh axis may do, for operands that are placed so now."""
    split = [own[p.dim] for p, own in zip(now, names) if isinstance(p, Shard)]
    for name in sorted(dict.fromkeys(split), key=lambda name: name not in result):
        operands = tuple(Shard(own.index(name)) if name in own else Replicate() for own in names)
        yield operands, Shard(result.index(name)) if name in result else Partial("sum")
    owed = [p for p in now if p.is_partial("sum")]
    if len(owed) == 1 and all(p.is_replicate() or p is owed[0] for p in now):
        yield tuple(now), Partial("sum")
    yield tuple(Replicate() for _ in now), Replicate()


def _moved(old: Any, new: Any, local: float, n: int) -> float:
    """Elements that a rank sends to bring an operand, of which it holds so many, from one placement to another."""
    if old == new or old.is_replicate():
        return 0.0
    if old.is_partial():
        return (2 if new.is_replicate() else 1) * (n - 1) / n * local
    return (n - 1) * local if new.is_replicate() else (n - 1) / n * local
