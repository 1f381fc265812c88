"""All-to-all attention: for the time of the attention a rank has the whole sequence, of a few heads.

Next to a ring it sends less and needs no other kernel, but holds the whole sequence of its heads, and can't be split
over more ranks than there are heads.
"""

from __future__ import annotations

from typing import Any

from torch.nn.functional import scaled_dot_product_attention

from ptrainx.core.errors import SpecError
from ptrainx.ops.attention.sharded import over_sequence
from ptrainx.ops.collectives.all_to_all import all_to_all
from ptrainx.ops.collectives.region import Region

__all__ = ["all_to_all_attention"]


def all_to_all_attention(
    q: Any, k: Any, v: Any, *, axis: str = "seq", causal: bool = False, scale: float | None = None
) -> Any:
    """Attention over a sequence that is sharded along an axis, exchanged for heads.

    An all-to-all gives each rank the whole sequence of an n-th of the heads, any attention kernel does the rest, and
    another one gives the sequence back.

    Args:
        q: [batch, heads, length, head_dim], floating-point. Batch and heads may be sharded along other axes, as
            `P("data", "model", "seq")`; the length is, or becomes, sharded along `axis`.
        k, v: like q; fewer heads, if they divide q's (grouped queries). Heads that are fewer than the shards are
            repeated as often as it takes. They go where q is.
        axis: the mesh axis of the sequence. A mesh of one device need not have it.
        causal: a position sees itself and what is before it.
        scale: of the scores; 1 / sqrt(head_dim) if None.

    Returns:
        like q, its length sharded along `axis`.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
        SpecError: heads on a rank, or a length, that the axis does not divide; heads of k that the axes of q's heads do
            not divide.
        MeshError: an axis that the mesh does not have.
        TraceError: placed values outside of a step.

    Global meaning: softmax(scale * q k^T, causal) v, along the whole length.
    Gradient: the same exchanges, the other way.
    Bytes: (n - 1) / n times q, k, v and the result, each way.

    Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509).

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(seq=2, simulate=True)
    >>> q, k, v = torch.randn(3, 1, 4, 8, 16)
    >>> spec = P(None, None, "seq")
    >>> step = px.jit(px.ops.all_to_all_attention, mesh=mesh, in_specs=spec, out_specs=spec)
    >>> want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> torch.allclose(px.device_get(step(q, k, v)), want, atol=1e-5)
    True
    """

    def body(region: Region, q: Any, k: Any, v: Any, source: str) -> Any:
        n = region.sizes.get(axis, 1)
        if n > 1:
            k, v = _enough_heads(q, k, v, axis, n, source)
            q, k, v = (all_to_all(x, axis, 1, 2, tiled=True) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        return all_to_all(out, axis, 2, 1, tiled=True) if n > 1 else out

    return over_sequence("all_to_all_attention", body, q, k, v, axis, "contiguous", is_causal=causal, scale=scale)


def _enough_heads(q: Any, k: Any, v: Any, axis: str, n: int, source: str) -> tuple[Any, Any]:
    """Keys and values whose heads the axis divides.

    Raises:
        SpecError: it can't be.
    """
    heads, shared = q.shape[1], k.shape[1]
    if heads % n == 0 and shared % n == 0:
        return k, v
    if heads % n == 0 and n % shared == 0:
        return k.repeat_interleave(n // shared, 1), v.repeat_interleave(n // shared, 1)
    raise SpecError(
        f"px.ops.all_to_all_attention: {axis!r} has {n} ranks, which do not divide the heads on each of them",
        got=f"{heads} heads of q, {shared} of k and v on a rank",
        expected=f"multiples of {n}, or for k and v a divisor of {n}",
        fix="split over fewer ranks, or use px.ops.ring_attention, which does not cut heads",
        source=source,
    )
