"""Ring attention: each rank keeps its queries, and the keys and values go round.

In step j a rank has the block of the rank j places before it, adds its queries' attention to that, and passes the block
on. Blocks are joined by the logarithm of their weights' sum (`blocks.merge`), so nothing is ever held but two blocks:
the one at hand and the one that is coming. The backward goes round once more: weights are computed again from the saved
logarithm, and the gradient of a block travels with it, home in the end.

    forward     n - 1 hops of k and v
    backward    n - 1 hops of k and v, n - 1 hops of their gradients

A hop starts before the work that hides it. The steps between the first and the last one are one loop of the graph
(`ops/loop`), so a ring of 64 ranks is traced in the time of one of 4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import InputError
from ptrainx.core.trace_context import open_grads, user_source
from ptrainx.mesh.per_shard import like_per_shard, relation
from ptrainx.ops.attention.blocks import attend, attend_backward
from ptrainx.ops.attention.order import check_zigzag
from ptrainx.ops.attention.sharded import over_sequence
from ptrainx.ops.attention.steps import Contiguous, Order, Zigzag
from ptrainx.ops.attention.whole import whole_attention
from ptrainx.ops.collectives import wire
from ptrainx.ops.collectives.region import Region
from ptrainx.ops.loop.local import local_loop

__all__ = ["ring_attention"]

T = torch.Tensor
Chunks = Sequence[T]


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis: str = "seq",
    causal: bool = False,
    order: str = "contiguous",
    scale: float | None = None,
) -> Any:
    """Attention over a sequence that is sharded along an axis, in which keys and values go round in a ring.

    It equals `torch.nn.functional.scaled_dot_product_attention` of the whole sequence. A rank holds its own part of the
    sequence and one more block of keys and values, forwards and backwards, so memory falls as 1 / n, and a hop is sent
    while a block is computed.

    Args:
        q: [batch, heads, length, head_dim], floating-point. Batch and heads may be sharded along other axes, as
            `P("data", "model", "seq")`; the length is, or becomes, sharded along `axis`.
        k, v: like q; fewer heads, if they divide q's (grouped queries). They go where q is.
        axis: the mesh axis of the sequence. A mesh of one device need not have it.
        causal: a position sees itself and what is before it.
        order: "contiguous", or "zigzag" for a sequence that was put into the order of `zigzag`, in which causal
            attention is the same work for each rank; contiguous, a rank also computes blocks that it can't see.
        scale: of the scores; 1 / sqrt(head_dim) if None.

    Returns:
        like q, its length sharded along `axis`. Sums over blocks are accumulated in float32, of bfloat16 as well.

    Raises:
        InputError: shapes or dtypes that do not fit each other; an unknown order.
        SpecError: a length that the shards do not divide (zigzag: twice the shards); heads of k that the axes of q's
            heads do not divide.
        MeshError: an axis that the mesh does not have.
        TraceError: placed values outside of a step.

    Global meaning: softmax(scale * q k^T, causal) v, along the whole length.
    Gradient: another time round; weights are computed again. A derivative of that gathers k and v whole instead.
    Bytes: forwards (n - 1) times a block of k and v; backwards the same, and (n - 1) times their gradients in float32.

    Source: Liu, Zaharia, Abbeel 2023, Ring Attention with Blockwise Transformers (arXiv:2310.01889).

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(seq=2, simulate=True)
    >>> q, k, v = torch.randn(3, 1, 4, 8, 16)
    >>> attention = lambda q, k, v: px.ops.ring_attention(q, k, v, causal=True)
    >>> step = px.jit(attention, mesh=mesh, out_specs=P(None, None, "seq"))
    >>> want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(px.device_get(step(q, k, v)), want, atol=1e-5)
    True
    """
    if order not in ("contiguous", "zigzag"):
        raise InputError(
            f"px.ops.ring_attention: order={order!r}", expected="'contiguous' or 'zigzag'", source=user_source()
        )

    def body(region: Region, q: Any, k: Any, v: Any, source: str) -> Any:
        n = region.sizes.get(axis, 1)
        if order == "zigzag" and n > 1:
            check_zigzag("ring_attention", q.shape[2] * n, n)
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        if open_grads() > 1:
            return whole_attention(q, k, v, axis, n, causal, order, factor)
        steps = Zigzag(factor) if causal and order == "zigzag" else Contiguous(causal, factor)
        return _Attention.apply(q, k, v, _Ring(region, axis, n, causal, steps, factor, source))

    return over_sequence("ring_attention", body, q, k, v, axis, order, is_causal=causal, scale=scale)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """One call's ring."""

    region: Region
    axis: str
    n: int
    causal: bool
    order: Order
    scale: float
    source: str

    def passed_on(self, x: T) -> T:
        """The tensor of the rank before this one."""
        return wire.permute(self.region, x, (self.axis,), [(i - 1) % self.n for i in range(self.n)])

    def before(self, step: T | int) -> T:
        """Whether the block that is here in a step is of a rank before this one; 0-d."""
        return wire.own_index(self.region, self.axis) >= step

    def marked(self, reason: str) -> Any:
        """What is sent inside is of this call."""
        return self.region.trace.marked(asked=True, reason=reason, source=self.source)

    def repeat(self, step: Callable[..., list[T]], carry: list[T], constants: list[T], start: int = 1) -> list[T]:
        """The steps up to the last but one: in the graph one loop, however many they are."""
        return local_loop(step, carry, constants, range(start, self.n - 1), self.region.trace)


class _Attention(torch.autograd.Function):
    """The ring as a step of autograd, on each rank's own tensors."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, ring: _Ring) -> Any:
        ctx.ring, ctx.placements = ring, relation(q)
        with tc.DisableTorchFunction(), ring.marked("px.ops.ring_attention"):
            out, lse = _forward(ring, *(x._local_tensor.contiguous() for x in (q, k, v)))
        ctx.save_for_backward(q, k, v)
        # Their tensors alone: torch gives a saved result back wrapped twice.
        ctx.out = out, lse
        return like_per_shard(out, ring.region.device_mesh, ctx.placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ring, (out, lse) = ctx.ring, ctx.out
        with tc.DisableTorchFunction(), ring.marked("gradient of px.ops.ring_attention"):
            grad, q, k, v = (x._local_tensor.contiguous() for x in (grad, *ctx.saved_tensors))
            found = _backward(ring, grad, q, k, v, out, lse)
        return *(like_per_shard(g, ring.region.device_mesh, ctx.placements) for g in found), None


def _forward(ring: _Ring, q: T, k: T, v: T) -> tuple[T, T]:
    """(attention in q's dtype, logarithm of the weights' sum) of this rank's queries to all keys."""
    if ring.n == 1:
        out, lse = attend(q, k, v, ring.causal, ring.scale)
        return out.to(q.dtype), lse
    order, m = ring.order, len(ring.order.split(q))
    coming = ring.passed_on(order.pack(k, v))
    chunks = order.split(q)
    out, lse = attend(q, k, v, ring.causal, ring.scale)

    def add(carry: Chunks, queries: Chunks, step: T | int) -> list[T]:
        block, state = carry[0], carry[1:]
        return order.add(ring.before(step), queries, block, state[:m], state[m:])

    def pass_and_add(carry: Chunks, queries: Chunks, step: T) -> list[T]:
        coming = ring.passed_on(carry[0])
        return [coming, *add(carry, queries, step)]

    carry = ring.repeat(pass_and_add, [coming, *order.split(out), *order.split(lse)], [*chunks])
    state = add(carry, chunks, ring.n - 1)
    return torch.cat(state[:m], 2).to(q.dtype), torch.cat(state[m:], 2)


def _backward(ring: _Ring, grad: T, q: T, k: T, v: T, out: T, lse: T) -> tuple[T, T, T]:
    """The gradients of this rank's queries, keys and values.

    Values go before keys here. A block packed as it was in the forward would be the same computation, made once for
    both, and its first hop be kept from there to here.
    """
    if ring.n == 1:
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse, ring.causal, ring.scale)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
    order, m, n = ring.order, len(ring.order.split(q)), ring.n
    block = ring.passed_on(order.pack(v, k))
    rows = [chunk for x in (grad, q, out, lse) for chunk in order.split(x)]
    dq, dk, dv = attend_backward(grad, q, k, v, out, lse, ring.causal, ring.scale)

    def slopes(sums: Chunks, rows: Chunks, block: T, step: T | int) -> tuple[list[T], T]:
        *slope, packed = order.slopes(ring.before(step), [rows[i * m : (i + 1) * m] for i in range(4)], block)
        return [a + b for a, b in zip(sums, slope)], packed

    def pass_and_add(carry: Chunks, rows: Chunks, step: T) -> list[T]:
        block, travelling, *sums = carry
        coming, came = ring.passed_on(block), ring.passed_on(travelling)
        sums, packed = slopes(sums, rows, block, step)
        return [coming, came + packed, *sums]

    coming = ring.passed_on(block) if n > 2 else block
    sums, travelling = slopes(order.split(dq), rows, block, 1)
    if n > 2:
        block, travelling, *sums = ring.repeat(pass_and_add, [coming, travelling, *sums], rows, start=2)
        came = ring.passed_on(travelling)
        sums, packed = slopes(sums, rows, block, n - 1)
        travelling = came + packed
    home = order.pack(dv, dk) + ring.passed_on(travelling)
    dv, dk = order.unpack(home.to(q.dtype))
    return torch.cat(sums, 2).to(q.dtype), dk, dv
