"""Experts that take every token that chooses them.

How many tokens an expert gets is known when a step runs, and the shapes of a graph before. So each rank takes the
tokens of all ranks that share the experts with it, sorts them by expert, and computes products of as many rows as there
are (`grouped_matmul`). What bounds memory is the worst case, in which every token chooses experts of one rank:

    tokens [N, d] -> all-gather -> [n N, d] -> rows [n N min(k, E / n), d] -> experts -> [n N, d] -> reduce-scatter

N tokens on a rank, E experts, n ranks along the experts' axis, k choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ptrainx.ops.collectives.all_gather import all_gather
from ptrainx.ops.collectives.axis_index import axis_index
from ptrainx.ops.collectives.psum_scatter import psum_scatter
from ptrainx.ops.experts.grouped import rows_within
from ptrainx.ops.experts.routing import MoEAux, choose, one_hot, summary
from ptrainx.ops.experts.sharded import Ranks, over_experts

__all__ = ["dropless_moe"]


def dropless_moe(
    expert_fn: Callable[[Any, Any, Any], Any],
    expert_params: Any,
    x: Any,
    logits: Any,
    *,
    k: int = 2,
    axis: str = "expert",
    normalize: bool = True,
) -> tuple[Any, MoEAux]:
    """Each token through its k most probable experts, which lie along a mesh axis; no token is dropped.

    y = sum over a token's experts e of weight_e * expert_e(x).

    Args:
        expert_fn: (params, x, sizes) -> y, row by row: leaves of params are [experts, ...], x is [rows, d], sorted by
            expert, sizes is int [experts]; those experts that a rank has. Rows behind the last expert's count for
            nothing. Products are `px.ops.grouped_matmul(x, params["up"], sizes)`.
        expert_params, x, logits, k, axis, normalize: as for `moe`.

    Returns:
        (y [batch, length, d_out] in the dtype of x, `MoEAux`, of which `dropped` is 0).

    Raises:
        InputError, SpecError, MeshError, TraceError: as `moe`.

    Memory: a rank holds the tokens of all n ranks along the axis, and min(k, experts on a rank) rows for each of them,
    whatever the router says. Computed are the rows that there are.
    Bytes: an all-gather of x and logits, a reduce-scatter of y: (n - 1) times a rank's part of each. Sent to exactly
    those ranks that need them, tokens would be fewer bytes only if shapes could depend on values.

    Source: Gale et al. 2022, MegaBlocks (arXiv:2211.15841).

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(expert=2, simulate=True)
    >>> params, x = torch.randn(4, 8, 8), torch.randn(2, 6, 8)
    >>> layer = lambda w, x: px.ops.dropless_moe(lambda w, x, n: px.ops.grouped_matmul(x, w, n), w, x, x[..., :4], k=1)
    >>> y, aux = px.jit(layer, mesh=mesh, in_specs=P("expert"))(params, x)
    >>> best = params[x[..., :4].argmax(-1)]
    >>> torch.allclose(px.device_get(y), (x.unsqueeze(-2) @ best).squeeze(-2), atol=1e-5)
    True
    """

    def body(x: Any, logits: Any, params: Any, ranks: Ranks) -> tuple[Any, MoEAux]:
        shape, n = x.shape, ranks.experts
        aux = summary(choose(logits, k, normalize), None, ranks.tokens, ranks.total)
        x, logits = x.flatten(0, 1), logits.flatten(0, 1)
        here = logits.shape[1] // n
        if n > 1:
            x, logits = (all_gather(value, axis, tiled=True) for value in (x, logits))
        choices = choose(logits, k, normalize)
        chosen = choices.experts.flatten()
        if n > 1:
            own = chosen - axis_index(axis) * here
            chosen = torch.where((own >= 0) & (own < here), own, torch.full_like(own, here))
        # Others' choices sort behind those of own experts.
        order = chosen.argsort(stable=True)[: x.shape[0] * min(k, here)]
        sizes = one_hot(chosen, here).sum(0)
        tokens = order // k
        out = expert_fn(params, x.index_select(0, tokens), sizes)
        zero = torch.zeros((), dtype=out.dtype, device=out.device)
        weights = choices.weights.flatten().index_select(0, order).unsqueeze(1).to(out.dtype)
        parts = torch.where(rows_within(sizes, out.shape[0]), out, zero) * weights
        y = out.new_zeros(x.shape[0], out.shape[1]).index_add(0, tokens, parts)
        if n > 1:
            y = psum_scatter(y, axis, tiled=True)
        return y.view(*shape[:2], -1).to(x.dtype), aux

    return over_experts("dropless_moe", body, expert_params, x, logits, axis=axis, k=k, groups=None)
