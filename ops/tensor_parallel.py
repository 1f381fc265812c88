"""Matrix products whose weights are split over an axis, and lookups in a table whose rows are, in Megatron's pairs.

    x [.., D] --column_parallel--> [.., F split] --pointwise--> [.., F split] --row_parallel--> [.., D]

In between nothing is sent. Before and after, either the values are whole on every rank of the axis (an all-reduce after
the pair, and one in its backward), or split along the sequence (an all-gather before the pair, a reduce-scatter after
it, and the same in the backward): as many bytes, and the values between the pairs take n times less memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

from ptrainx.core.errors import SpecError
from ptrainx.mesh.partition_spec import P, PartitionSpec, axes_of
from ptrainx.mesh.placement import check_spec, spec_of_placements, trace_placements
from ptrainx.ops.constrain import place_inside
from ptrainx.ops.einops.contract import contract
from ptrainx.ops.lookup import look_up_rows
from ptrainx.ops.parts import Call, open_call

__all__ = ["column_parallel", "row_parallel", "vocab_parallel_embedding"]


def column_parallel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, axis: str = "model"
) -> torch.Tensor:
    """`x @ weight + bias`, with the columns of the weight split over an axis; the first of a pair.

    Where x is split over the axis, along the sequence, it is gathered; its gradient comes back where x was: a
    reduce-scatter, or an all-reduce where every rank has all of x.

    Args:
        x: [..., D].
        weight: [D, F], `P(None, axis)`. Over other axes that split it, as ZeRO does, it is gathered.
        bias: [F], `P(axis)`.
        axis: the mesh axis.

    Returns:
        [..., F], the last dim split over the axis.

    Raises:
        SpecError: the weight is split over the axis along its rows; no such axis.

    On plain values, and in the body of a `px.shard_map`, it is `x @ weight + bias`.

    Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; with x split along the sequence: Korthikanti et
    al. 2022, https://arxiv.org/abs/2205.05198.

    >>> column_parallel(torch.ones(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """
    call = open_call("px.ops.column_parallel", [x, weight])
    if call is None:
        return x @ weight if bias is None else x @ weight + bias
    _check_split(weight, 1, axis, call)
    x = _place(x, _without(x, axis, call), "x", call)
    out = _matmul(x, _parameter(weight, P(None, axis), "weight", call), call)
    return out if bias is None else out + _parameter(bias, P(axis), "bias", call)


def row_parallel(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    axis: str = "model",
    sequence_dim: int | None = None,
) -> torch.Tensor:
    """`x @ weight + bias`, with the rows of the weight split over an axis; the second of a pair.

    Each rank has an addend of the result. The sum is an all-reduce, or a reduce-scatter along the sequence.

    Args:
        x: [..., F], the last dim split over the axis, as `column_parallel` leaves it.
        weight: [F, D], `P(axis)`. Over other axes that split it, it is gathered.
        bias: [D]; added once, after the sum.
        axis: the mesh axis.
        sequence_dim: the dim along which the result is to be split over the axis; None for the whole on every rank.

    Returns:
        [..., D].

    Raises:
        SpecError: the weight is split over the axis along its columns; no such axis.

    On plain values, and in the body of a `px.shard_map`, it is `x @ weight + bias`.

    Source: as `column_parallel`.

    >>> row_parallel(torch.ones(2, 4), torch.ones(4, 3)).shape
    torch.Size([2, 3])
    """
    call = open_call("px.ops.row_parallel", [x, weight])
    if call is None:
        return x @ weight if bias is None else x @ weight + bias
    _check_split(weight, 0, axis, call)
    x = _place(x, _split(_without(x, axis, call, x.ndim - 1), x.ndim - 1, axis, x.ndim, call), "x", call)
    out = _matmul(x, _parameter(weight, P(axis), "weight", call), call)
    out = _place(out, _output(out, axis, sequence_dim, call), "the result", call)
    return out if bias is None else out + bias


def vocab_parallel_embedding(
    tokens: torch.Tensor, table: torch.Tensor, *, axis: str = "model", sequence_dim: int | None = None
) -> torch.Tensor:
    """The rows of a table that tokens name, with the rows of the table split over an axis.

    Each rank looks up those that it has, and has zeros for the rest. The sum is an all-reduce, or a reduce-scatter
    along the sequence. The gradient of a rank's rows is computed on that rank alone.

    Args:
        tokens: int64 [...], in 0 .. V - 1. Over the axis they are gathered, if they are split.
        table: [V, D], `P(axis)`. Over other axes that split it, it is gathered.
        axis: the mesh axis.
        sequence_dim: the dim along which the result is to be split over the axis; None for the whole on every rank.

    Returns:
        [..., D].

    Raises:
        SpecError: the table is split over the axis along its columns, or leaves a rank without rows; no such axis.
        GradientError: a second derivative.

    On plain values, and in the body of a `px.shard_map`, it is `torch.nn.functional.embedding`.

    Source: as `column_parallel`.

    >>> vocab_parallel_embedding(torch.tensor([2, 0]), torch.eye(3))
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    call = open_call("px.ops.vocab_parallel_embedding", [tokens, table])
    if call is None:
        return torch.nn.functional.embedding(tokens, table)
    _check_split(table, 0, axis, call)
    tokens = _place(tokens, _without(tokens, axis, call), "tokens", call)
    out = look_up_rows(tokens, _parameter(table, P(axis), "table", call), call)
    return _place(out, _output(out, axis, sequence_dim, call), "the result", call)


def _matmul(x: Any, weight: Any, call: Call) -> Any:
    names = tuple(f"rows{i}" for i in range(x.ndim - 1))
    return contract([x, weight], ((*names, "inner"), ("inner", "columns")), (*names, "columns"), call)


def _spec(x: Any, call: Call) -> PartitionSpec:
    value = call.trace.as_global(x)
    return spec_of_placements(value.placements, call.trace.mesh.axis_names, value.ndim, call.trace.view.shape)


def _place(x: Any, spec: PartitionSpec, what: str, call: Call) -> Any:
    where = f"{call.label}: {what}"
    with call.marked(True, what):
        return place_inside(x, spec, where, call.trace, where)


def _parameter(x: Any, spec: PartitionSpec, what: str, call: Call) -> Any:
    """A parameter at a placement. One that is there already goes on owing the sums of its gradient."""
    value = call.trace.as_global(x)
    check_spec(spec, call.trace.mesh, value.shape, f"{call.label}: {what}")
    there = trace_placements(spec, call.trace.mesh) == tuple(value.placements)
    return value if there else _place(x, spec, what, call)


def _without(x: Any, axis: str, call: Call, whole: int | None = None) -> PartitionSpec:
    """A value's spec without an axis, and with the dim `whole` not split at all."""
    entries = _spec(x, call).entries
    return P(*(() if d == whole else tuple(a for a in axes_of(e) if a != axis) for d, e in enumerate(entries)))


def _split(spec: PartitionSpec, dim: int, axis: str, ndim: int, call: Call) -> PartitionSpec:
    """A spec with a dim split by one more axis, in mesh order."""
    entries = [axes_of(e) for e in spec.entries] + [()] * (ndim - len(spec))
    order = call.trace.mesh.axis_names
    both = {*entries[dim], axis}
    entries[dim] = tuple(a for a in order if a in both) if axis in order else (*entries[dim], axis)
    return P(*entries)


def _output(out: Any, axis: str, sequence_dim: int | None, call: Call) -> PartitionSpec:
    spec = _without(out, axis, call)
    if sequence_dim is None:
        return spec
    if not -out.ndim <= sequence_dim < out.ndim:
        raise SpecError(
            f"{call.label}: sequence_dim={sequence_dim} is no dim of the result",
            got=f"shape {tuple(out.shape)}",
            expected=f"a dim from 0 to {out.ndim - 2}",
            source=call.source,
        )
    return _split(spec, sequence_dim % out.ndim, axis, out.ndim, call)


def _check_split(weight: Any, dim: int, axis: str, call: Call) -> None:
    value = call.trace.as_global(weight)
    names = call.trace.mesh.axis_names
    if axis not in names or value.ndim != 2:
        return  # place_inside tells
    placement = value.placements[names.index(axis)]
    if isinstance(placement, Shard) and placement.dim != dim:
        raise SpecError(
            f"{call.label}: the weight is split over {axis!r} along dim {placement.dim}",
            got=f"shape {tuple(value.shape)} at {_spec(value, call)}",
            expected=str(P(None, axis) if dim else P(axis)),
            fix=f"give it that spec, or call px.ops.{'row' if dim else 'column'}_parallel",
            source=call.source,
        )
