"""Queries, keys and values of a step as one rank has them, and the result as a global value again.

In: global values at any placement, or the per-shard ones of a `shard_map`'s body. Inside, the batch and the heads lie
as the query's did, the sequence along one axis, head_dim whole.

Next stage: `ring` and `all_to_all`, which compute on the ranks' own parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.functional import scaled_dot_product_attention

from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError, SpecError, TraceError
from ptrainx.core.trace_context import TraceContext, current_trace, user_source
from ptrainx.mesh.per_shard import Varying
from ptrainx.mesh.placement import check_spec, spec_of_placements
from ptrainx.ops.attention.order import axis_size_of, check_zigzag, unzigzag, zigzag
from ptrainx.ops.collectives.call import refuse_owed
from ptrainx.ops.collectives.linear import varying
from ptrainx.ops.collectives.region import Region
from ptrainx.ops.collectives.relate import vary_over

__all__ = ["Body", "over_sequence"]

Body = Callable[[Region, Any, Any, Any, str], Any]
"""(region, q, k, v as per-shard values, the user's line) -> this rank's part of the result."""


def over_sequence(name: str, body: Body, q: Any, k: Any, v: Any, axis: str, order: str, **options: Any) -> Any:
    """Attention by a function of each rank's parts.

    Args:
        name: how users call it.
        body: what to do with the parts.
        q, k, v: [batch, heads, length, head_dim]: global values, or per-shard ones.
        axis: along which the sequence lies.
        order: of the sequence.
        options: `is_causal` and `scale`, for attention outside of any step.

    Returns:
        a value like q.

    Raises:
        InputError, SpecError, MeshError, TraceError: as the functions that users call say.
    """
    trace, source = current_trace(), user_source()
    _check_shapes(name, q, k, v, source)
    n = axis_size_of(name, axis)
    if trace is None:
        return _outside(name, q, k, v, axis, order, n, options)
    if order == "zigzag" and trace.region is None:
        check_zigzag(name, q.shape[2], n)
    q, k, v = (trace.as_global(x) for x in (q, k, v))
    region = trace.region
    if region is not None:
        for x in (q, k, v):
            refuse_owed(f"ops.{name}", x, region, region.axis_names)
        return body(region, *_alike(region, q, k, v, axis, n, source), source)
    shape, placements = q.shape, _placements(trace, q, axis)
    region = Region(trace, f"px.ops.{name}", check=True)
    with trace.marked(source=source):
        q, k, v = (_enter(trace, region, name, *pair, placements) for pair in (("q", q), ("k", k), ("v", v)))
    with region.active():
        out = body(region, *_alike(region, q, k, v, axis, n, source), source)
    with trace.marked(source=source):
        return region.to_global(out, placements, shape)


def _check_shapes(name: str, q: Any, k: Any, v: Any, source: str) -> None:
    problems = []
    for which, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.ndim != 4 or not x.is_floating_point():
            problems.append(f"{which} is {describe(x)}, not floating-point [batch, heads, length, head_dim]")
    if not problems:
        if k.shape != v.shape:
            problems.append(f"k has shape {tuple(k.shape)}, v {tuple(v.shape)}")
        if (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]):
            problems.append(f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}: only heads may differ")
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            problems.append(f"{q.shape[1]} heads of q can't share {k.shape[1]} heads of k")
        if not q.dtype == k.dtype == v.dtype:
            problems.append(f"dtypes differ: {q.dtype}, {k.dtype}, {v.dtype}")
    if problems:
        raise InputError(
            f"px.ops.{name}: " + "\n    ".join(problems),
            expected="q [batch, heads, length, head_dim]; k and v like it, of fewer heads that divide q's if need be",
            source=source,
        )


def _outside(name: str, q: Any, k: Any, v: Any, axis: str, order: str, n: int, options: dict[str, Any]) -> Any:
    """On one device."""
    if any(isinstance(x, DTensor) for x in (q, k, v)):
        raise TraceError(
            f"px.ops.{name} of placed values outside of a step", fix="call it in a function given to px.jit"
        )
    if order == "zigzag" and n > 1:
        q, k, v = (x[:, :, unzigzag(x.shape[2], n)] for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)
    return out[:, :, zigzag(q.shape[2], n)] if order == "zigzag" and n > 1 else out


def _placements(trace: TraceContext, q: Any, axis: str) -> tuple[Placement, ...]:
    """The batch and the heads where q has them, the sequence along the axis; an axis of size 1 splits nothing."""

    def one(name: str, own: Placement) -> Placement:
        if trace.mesh.shape[name] == 1:
            return Replicate()
        if name == axis:
            return Shard(2)
        return own if isinstance(own, Shard) and own.dim in (0, 1) else Replicate()

    return tuple(one(name, own) for name, own in zip(trace.mesh.axis_names, q.placements))


def _enter(trace: TraceContext, region: Region, name: str, which: str, x: Any, wanted: tuple[Placement, ...]) -> Any:
    """A global value as the body gets it."""
    # One head of keys and values serves all queries, wherever their heads are.
    placements = tuple(Replicate() if p.is_shard(1) and x.shape[1] == 1 else p for p in wanted)
    names = trace.mesh.axis_names
    spec = spec_of_placements(placements, names, 4)
    try:
        check_spec(spec, trace.mesh, x.shape, f"px.ops.{name}: {which}", even=True)
    except SpecError as error:
        if which == "q" or x.shape[1] % max(_parts(trace, placements, 1), 1) == 0:
            raise
        raise SpecError(
            f"{error.problem}, as the heads of q are",
            got=error.got,
            expected="heads of k and v that the axes of q's heads divide, or one head",
            fix="repeat k's and v's heads (x.repeat_interleave(m, 1)), or split q's heads along fewer axes",
            source=user_source(),
        ) from None
    with tc.DisableTorchFunction():
        if tuple(x.placements) != placements:
            with trace.marked(asked=False, reason=f"px.ops.{name} takes {which} at {spec}"):
                x = x.redistribute(x.device_mesh, placements)
    return region.to_shard(x, tuple(Varying() if p.is_shard() else p for p in placements))


def _parts(trace: TraceContext, placements: tuple[Placement, ...], dim: int) -> int:
    parts = 1
    for size, placement in zip(trace.mesh.shape.values(), placements):
        parts *= size if placement.is_shard(dim) else 1
    return parts


def _alike(region: Region, q: Any, k: Any, v: Any, axis: str, n: int, source: str) -> tuple[Any, Any, Any]:
    """The three, each varying along every axis along which one of them does, and along the sequence's."""
    axes = vary_over(region, [q, k, v])
    if n > 1 and axis not in axes:
        axes = tuple(a for a in region.axis_names if a in axes or a == axis)
    return varying(q, region, axes, source), varying(k, region, axes, source), varying(v, region, axes, source)
