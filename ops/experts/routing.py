"""Which experts a token goes to, and what the choices of all tokens together say.

In: the router's logits. Out: each token's experts with their weights, and the losses that keep a router in balance.
All of it in float32 (float64 of float64). Next stage: `capacity` or `dropless`, which send tokens there.

G groups of tokens, S tokens in a group, E experts, k choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ptrainx.core.errors import InputError
from ptrainx.core.trace_context import user_source
from ptrainx.ops.random import uniform

__all__ = ["Choices", "MoEAux", "choose", "one_hot", "router_jitter", "summary"]

T = torch.Tensor


class MoEAux(NamedTuple):
    """What the choices of all tokens say; 0-d, float32.

    Attributes:
        load_balancing_loss: E * sum over experts of (fraction of choices that fall on it) * (mean probability of it): 1
            where all are alike, E where one takes everything. Switch Transformer, equation 4; a gradient through the
            probabilities. Add it to the loss with a factor of about 0.01.
        router_z_loss: mean of logsumexp(logits)^2, which keeps logits small. ST-MoE, equation 5; a factor of about
            0.001.
        dropped: the fraction of choices that found their expert full.

    Source: Fedus et al. 2021 (arXiv:2101.03961); Zoph et al. 2022 (arXiv:2202.08906).
    """

    load_balancing_loss: Any
    router_z_loss: Any
    dropped: Any


class Choices(NamedTuple):
    """Each token's experts, the best first: [..., k], their weights, and all probabilities and logits [..., E]."""

    experts: T
    weights: T
    probabilities: T
    logits: T


def choose(logits: T, k: int, normalize: bool) -> Choices:
    """The k most probable experts of each token.

    Args:
        logits: [..., E].
        k: how many.
        normalize: whether a token's weights are divided by their sum; else they are the probabilities.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    probabilities = logits.softmax(-1)
    weights, experts = probabilities.topk(k, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choices(experts, weights, probabilities, logits)


def one_hot(experts: T, n: int) -> T:
    """int64 [..., n]: 1 at each choice."""
    return (experts.unsqueeze(-1) == torch.arange(n, device=experts.device)).long()


def summary(choices: Choices, kept: T | None, tokens: int, total: Callable[[T], T]) -> MoEAux:
    """The losses over all tokens.

    Args:
        choices: of this rank's tokens.
        kept: which choices found room; None if all did.
        tokens: how many tokens there are on all ranks.
        total: sums a value over the ranks.
    """
    n, k = choices.probabilities.shape[-1], choices.experts.shape[-1]
    probabilities = choices.probabilities.reshape(-1, n)
    dtype = probabilities.dtype
    chosen = one_hot(choices.experts.reshape(-1), n).sum(0).to(dtype)
    squares = choices.logits.logsumexp(-1).square().sum()
    found = chosen.sum() if kept is None else kept.sum().to(dtype)
    # One vector: one collective.
    sums = total(torch.cat([chosen, probabilities.sum(0), squares[None], found[None]]))
    balance = n * (sums[:n] / (tokens * k) * (sums[n : 2 * n] / tokens)).sum()
    return MoEAux(balance, sums[2 * n] / tokens, 1 - sums[2 * n + 1] / (tokens * k))


def router_jitter(key: Any, x: Any, epsilon: float = 0.01) -> Any:
    """x with each element multiplied by a number drawn from [1 - epsilon, 1 + epsilon): noise for the router's input.

    Args:
        key: of `px.random`.
        x: floating-point, any shape.
        epsilon: from 0 to 1.

    Returns:
        like x; the same on every mesh.

    Raises:
        InputError: an epsilon out of range.

    Source: Fedus et al. 2021, Switch Transformer, appendix (arXiv:2101.03961).

    >>> import torch, ptrainx as px
    >>> x = px.ops.router_jitter(px.random.key(0), torch.ones(100), epsilon=0.1)
    >>> bool((x >= 0.9).all() and (x < 1.1).all())
    True
    """
    if not 0 <= epsilon <= 1:
        raise InputError(
            f"px.ops.router_jitter: epsilon={epsilon}", expected="a number from 0 to 1", source=user_source()
        )
    noise: Any = uniform(key, tuple(x.shape), minval=1 - epsilon, maxval=1 + epsilon)
    return x * noise.to(x.dtype)
