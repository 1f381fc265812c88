"""Experts with room for so many tokens: a buffer of fixed size for each expert and group of tokens.

Tokens are divided into groups, whose number is part of the program and not of the mesh, so that which tokens find room
is the same on every mesh. In each group, choices take places in order: all first choices, token by token, then all
second ones. A choice that finds its expert full is dropped: it adds nothing to its token's result.

    tokens [G, S, d] -> buffers [G, E, C, d] -> all-to-all -> [n G, E / n, C, d] -> experts -> all-to-all -> tokens

G groups on a rank, S tokens in a group, E experts, C places, n ranks along the experts' axis, k choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ptrainx.core.errors import InputError
from ptrainx.core.trace_context import user_source
from ptrainx.ops.collectives.all_to_all import all_to_all
from ptrainx.ops.experts.routing import MoEAux, choose, one_hot, summary
from ptrainx.ops.experts.sharded import Ranks, over_experts

__all__ = ["moe"]


def moe(
    expert_fn: Callable[[Any, Any], Any],
    expert_params: Any,
    x: Any,
    logits: Any,
    *,
    k: int = 2,
    capacity_factor: float = 1.25,
    groups: int | None = None,
    axis: str = "expert",
    normalize: bool = True,
) -> tuple[Any, MoEAux]:
    """Each token through its k most probable experts, which have room for so many tokens and lie along a mesh axis.

    y = sum over a token's experts e of weight_e * expert_e(x), without the choices that found their expert full.

    Args:
        expert_fn: (params, x) -> y, row by row: leaves of params are [experts, ...], x is [experts, rows, d], y is
            [experts, rows, d_out]; those experts that a rank has. Batched products do it: `(x @ p["up"]).relu() @
            p["down"]`.
        expert_params: a pytree of [experts, ...], sharded as `P("expert", ...)`. Along axes that tokens lie along they
            are gathered; along others they stay split, and expert_fn has to sum (`px.psum`).
        x: [batch, length, d], the batch sharded along data axes and, best, the experts' one as well:
            `P(("data", "expert"))`. It is split so if it is not.
        logits: [batch, length, experts] of your router.
        k: experts a token.
        capacity_factor: room for ceil(k * tokens / experts * capacity_factor) tokens in each expert, of each group, but
            not more than there are tokens in it.
        groups: into how many groups of consecutive tokens the batch is divided; the batch's size if None, so that each
            row is a group. A multiple of the ranks that tokens lie along.
        axis: the mesh axis of the experts. A mesh of one device need not have it.
        normalize: whether a token's k weights are divided by their sum; else they are softmax probabilities.

    Returns:
        (y [batch, length, d_out] in the dtype of x, `MoEAux` with the balancing losses over all tokens).

    Raises:
        InputError: shapes; k of more experts than there are; a factor that is not positive; groups that do not divide
            the tokens.
        SpecError: experts that the axis does not divide; groups that the ranks of the tokens do not divide.
        MeshError: an axis that the mesh does not have.
        TraceError: placed values outside of a step.

    Gradient: of the result by x, params and logits (through the weights). Which expert is chosen has none.
    Bytes: two all-to-alls of the buffers, (n - 1) / n * groups on a rank * experts * capacity * d elements each; the
    losses add an all-reduce of 2 * experts + 2 numbers.

    Source: Lepikhin et al. 2020, GShard (arXiv:2006.16668); Fedus et al. 2021, Switch Transformer (arXiv:2101.03961).

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(expert=2, simulate=True)
    >>> params, x = torch.randn(4, 8, 8), torch.randn(2, 6, 8)
    >>> layer = lambda params, x: px.ops.moe(lambda w, x: x @ w, params, x, x[..., :4], k=1, capacity_factor=4.0)
    >>> y, aux = px.jit(layer, mesh=mesh, in_specs=P("expert"))(params, x)
    >>> best = params[x[..., :4].argmax(-1)]
    >>> torch.allclose(px.device_get(y), (x.unsqueeze(-2) @ best).squeeze(-2), atol=1e-5), float(aux.dropped)
    (True, 0.0)
    """
    if not (isinstance(capacity_factor, (int, float)) and 0 < capacity_factor < math.inf):
        raise InputError(
            f"px.ops.moe: capacity_factor={capacity_factor!r} leaves experts no room",
            expected="a positive number, such as 1.25",
            fix="px.ops.dropless_moe drops no token",
            source=user_source(),
        )

    def body(x: Any, logits: Any, params: Any, ranks: Ranks) -> tuple[Any, MoEAux]:
        n_groups, size, d = x.shape
        experts = logits.shape[-1]
        room = min(size, math.ceil(k * size / experts * capacity_factor))
        choices = choose(logits, k, normalize)
        slots, kept = _slots(choices.experts, experts, room)
        buffers = _rows(x, _filled_by(slots, size, experts * room)).view(n_groups, experts, room, d)
        if ranks.experts > 1:
            buffers = all_to_all(buffers, axis, 1, 0, tiled=True)
        rows = buffers.transpose(0, 1).flatten(1, 2)
        out = expert_fn(params, rows)
        out = out.unflatten(1, (buffers.shape[0], room)).transpose(0, 1)
        if ranks.experts > 1:
            out = all_to_all(out, axis, 0, 1, tiled=True)
        found = _rows(out.flatten(1, 2), slots.flatten(1)).unflatten(1, (size, k))
        weights = (choices.weights * kept).to(out.dtype)
        y = (found * weights.unsqueeze(-1)).sum(2)
        return y.to(x.dtype), summary(choices, kept, ranks.tokens, ranks.total)

    return over_experts("moe", body, expert_params, x, logits, axis=axis, k=k, groups=groups)


def _slots(chosen: Any, experts: int, room: int) -> tuple[Any, Any]:
    """([G, S, k] the place of each choice in the buffers of its group, E * C for a dropped one; which are kept)."""
    in_order = one_hot(chosen.transpose(1, 2), experts).flatten(1, 2)
    places = (in_order.cumsum(1) * in_order).sum(-1) - 1
    places = places.unflatten(1, (chosen.shape[2], chosen.shape[1])).transpose(1, 2)
    kept = places < room
    nowhere = torch.full((), experts * room, device=chosen.device)
    return torch.where(kept, chosen * room + places, nowhere), kept


def _filled_by(slots: Any, size: int, places: int) -> Any:
    """[G, E * C]: which token of its group fills each place; `size` for an empty one."""
    tokens = torch.arange(size, device=slots.device)[None, :, None].expand(slots.shape).flatten(1)
    empty = torch.full((slots.shape[0], places + 1), size, device=slots.device)
    return empty.scatter(1, slots.flatten(1), tokens)[:, :places]


def _rows(x: Any, index: Any) -> Any:
    """x[g, index[g]] of [G, rows, d], zeros where the index is the number of rows."""
    groups, rows, _ = x.shape
    padded = torch.cat([x, x.new_zeros(groups, 1, x.shape[2])], 1).flatten(0, 1)
    start = torch.arange(groups, device=x.device).unsqueeze(1) * (rows + 1)
    return padded.index_select(0, (index + start).flatten()).view(*index.shape, x.shape[2])
