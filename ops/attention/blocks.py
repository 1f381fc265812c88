"""Attention of a block of queries to a block of keys: what a ring is made of.

In: this rank's queries and a block of keys and values, [batch, heads, length, head_dim]. Out: the attention to that
block alone, with the logarithm of its weights' sum, by which `merge` joins the results of several blocks. The backward
needs no other block: given that logarithm over *all* keys, weights are computed again block by block.

On CPUs both are torch's fused kernel, which holds no matrix of weights; elsewhere matrix products over a few queries at
a time. Sums are accumulated in float32 (float64 for float64).

B batch, H heads of queries, K heads of keys and values, G = H / K, Q queries, S keys, D head_dim.
"""

from __future__ import annotations

import torch

__all__ = ["attend", "attend_backward", "merge", "wide"]

aten = torch.ops.aten
QUERIES_AT_A_TIME = 1024
T = torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over blocks are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    """Attention to one block.

    Args:
        q: [B, H, Q, D].
        k, v: [B, K, S, D]; K divides H, and head h of the queries reads head h // G.
        causal: query i sees keys up to i; Q == S.
        scale: of the scores.

    Returns:
        the attention [B, H, Q, D] and the logarithm of the sum of weights [B, H, Q], both in the wide dtype.
    """
    rows, k, v = _aligned(q, k, v, causal)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(rows, k, v, 0.0, causal, scale=scale)
    else:
        out, lse = _products(rows, k, v, causal, scale)
    return out.reshape(q.shape).to(wide(q.dtype)), lse.reshape(q.shape[:-1])


def attend_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    """One block's part of the gradients of attention to all blocks.

    Args:
        grad: of the whole attention, [B, H, Q, D].
        q, k, v, causal, scale: as for `attend`.
        out: the whole attention.
        lse: the logarithm of the sum of all weights, [B, H, Q]; inf for a query that does not see the block.

    Returns:
        what the block adds to the gradient of q, and the gradients of k and v from these queries, in the wide dtype.
    """
    rows, keys, values = _aligned(q, k, v, causal)
    grad, out, lse = grad.reshape(rows.shape), out.reshape(rows.shape), lse.reshape(rows.shape[:-1])
    if q.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, rows, keys, values, out, lse, 0.0, causal, scale=scale
        )
    else:
        found = _products_backward(grad, rows, keys, values, out, lse, causal, scale)
    dq, dk, dv = (g.to(wide(q.dtype)) for g in found)
    if dk.shape != k.shape:
        dk, dv = (g.unflatten(1, (k.shape[1], -1)).sum(2) for g in (dk, dv))
    return dq.reshape(q.shape), dk, dv


def merge(out: T, lse: T, block: T, block_lse: T) -> tuple[T, T]:
    """The attention to two sets of keys together, from the attention to each.

    Args:
        out, lse: of one, of which each query sees some key.
        block, block_lse: of the other; -inf for a query that sees none of it.
    """
    share = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    return out + share * (block - out), torch.logaddexp(lse, block_lse)


def _aligned(q: T, k: T, v: T, causal: bool) -> tuple[T, T, T]:
    """Queries, keys and values with equally many heads.

    Without a mask, the queries of the heads that read the same keys are one longer list of queries.
    """
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return q, k, v
    if not causal:
        return q.reshape(q.shape[0], k.shape[1], groups * q.shape[2], q.shape[3]), k, v
    return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


def _scores(q: T, k: T, start: int, causal: bool, scale: float) -> T:
    scores = (q.to(wide(q.dtype)) @ k.to(wide(q.dtype)).transpose(-1, -2)) * scale
    if not causal:
        return scores
    places = torch.arange(k.shape[-2], device=q.device)
    return scores.masked_fill(places > places[start : start + q.shape[-2], None], float("-inf"))


def _products(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    outs, sums = [], []
    for start in range(0, q.shape[-2], QUERIES_AT_A_TIME):
        scores = _scores(q[..., start : start + QUERIES_AT_A_TIME, :], k, start, causal, scale)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype))
        sums.append(lse)
    return torch.cat(outs, -2), torch.cat(sums, -1)


def _products_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    dtype = wide(q.dtype)
    dqs, dk, dv = [], torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    for start in range(0, q.shape[-2], QUERIES_AT_A_TIME):
        rows = slice(start, start + QUERIES_AT_A_TIME)
        g, part = grad[..., rows, :].to(dtype), q[..., rows, :]
        weights = (_scores(part, k, start, causal, scale) - lse[..., rows].unsqueeze(-1)).exp()
        carried = g @ v.to(dtype).transpose(-1, -2) - (g * out[..., rows, :].to(dtype)).sum(-1, keepdim=True)
        slopes = weights * carried * scale
        dqs.append(slopes @ k.to(dtype))
        dk = dk + slopes.transpose(-1, -2) @ part.to(dtype)
        dv = dv + weights.transpose(-1, -2) @ g
    return torch.cat(dqs, -2), dk, dv
