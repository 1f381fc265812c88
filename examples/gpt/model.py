"""A byte-level GPT: initial values, logits and loss as pure functions on a pytree of tensors.

Shapes: B batch, T time (bytes), D width, N heads, H head dim, F = 4 D hidden, V = 256 bytes, K bytes seen by the input
layer. A tensor's name ends in its shape: `x_BTD`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ptrainx as px

__all__ = ["VOCABULARY", "Config", "Place", "anywhere", "init", "logits", "losses", "mean_loss"]

VOCABULARY = 256
Place = Callable[[Tensor], Tensor]
"""Says where activations [B, T, D] lie on a mesh, at the ends of each sublayer."""


def anywhere(x_BTD: Tensor) -> Tensor:
    """No mesh, or no wish."""
    return x_BTD


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model.

    Attributes:
        width: of the residual stream, a multiple of `heads`.
        layers: blocks of attention and MLP.
        heads: attention heads.
        context: bytes that a prediction can look back on.
        span: bytes that the input layer puts together: the byte itself and those before it.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    span: int = 4

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 1 or self.width % self.heads:
            raise px.errors.InputError(
                "no such model", got=repr(self), expected="sizes of at least 1, the width a multiple of the heads"
            )


def init(key: Tensor, config: Config) -> dict[str, Any]:
    """Initial parameters, float32.

    Weights are normal with variance 1 / fan-in; what writes to the residual stream is scaled down by its number of
    writers, so that the stream's variance does not grow with depth. Norms start at one.
    """
    D, hidden = config.width, 4 * config.width
    key_embed, key_position, key_head, key_blocks = px.random.split(key, 4)
    quiet = 1 / math.sqrt(2 * config.layers)
    return {
        "embed": _normal(key_embed, (config.span, VOCABULARY, D), 0.5 / math.sqrt(config.span)),
        "position": _normal(key_position, (config.context, D), 0.02),
        "blocks": [_init_block(px.random.fold_in(key_blocks, i), D, hidden, quiet) for i in range(config.layers)],
        "norm": torch.ones(D),
        "head": _normal(key_head, (D, VOCABULARY), 0.5 / math.sqrt(D)),
    }


def _init_block(key: Tensor, D: int, hidden: int, quiet: float) -> dict[str, Tensor]:
    keys = px.random.split(key, 6)
    return {
        "norm_attention": torch.ones(D),
        "q": _normal(keys[0], (D, D), 1 / math.sqrt(D)),
        "k": _normal(keys[1], (D, D), 1 / math.sqrt(D)),
        "v": _normal(keys[2], (D, D), 1 / math.sqrt(D)),
        "o": _normal(keys[3], (D, D), quiet / math.sqrt(D)),
        "norm_mlp": torch.ones(D),
        "up": _normal(keys[4], (D, hidden), 1 / math.sqrt(D)),
        "down": _normal(keys[5], (hidden, D), quiet / math.sqrt(hidden)),
    }


def _normal(key: Tensor, shape: tuple[int, ...], std: float) -> Tensor:
    return px.random.normal(key, shape) * std


def logits(params: dict[str, Any], tokens_BT: Tensor, config: Config, place: Place = anywhere) -> Tensor:
    """Unnormalised log-probabilities of the byte after each byte.

    Args:
        params: from `init`.
        tokens_BT: int64 [B, T], T <= context.
        config: the sizes.
        place: where activations lie.

    Returns:
        [B, T, V], in the parameters' dtype.
    """
    x_BTD = place(_embed(params["embed"], tokens_BT) + params["position"][: tokens_BT.shape[1]])
    for block in params["blocks"]:
        x_BTD = x_BTD + place(_attention(block, place(_norm(x_BTD, block["norm_attention"])), config.heads))
        x_BTD = x_BTD + place(_mlp(block, place(_norm(x_BTD, block["norm_mlp"]))))
    return place(_norm(x_BTD, params["norm"])) @ params["head"]


def losses(
    params: dict[str, Any], tokens_BT: Tensor, targets_BT: Tensor, config: Config, place: Place = anywhere
) -> Tensor:
    """Cross-entropy of each target byte in nats, [B, T], in float32 where the model is computed in less."""
    scores_BTV = _wide(logits(params, tokens_BT, config, place))
    return F.cross_entropy(scores_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none").view(targets_BT.shape)


def mean_loss(params: dict[str, Any], batch: tuple[Tensor, Tensor], config: Config, place: Place = anywhere) -> Tensor:
    """Mean cross-entropy of a batch `(tokens, targets)`, nats a byte."""
    return losses(params, *batch, config, place).mean()


def _embed(table_KVD: Tensor, tokens_BT: Tensor) -> Tensor:
    """A sum of embeddings: of the byte itself, of the one before it, and so on, each with a table of its own.

    In float32: the gradient adds up the rows of equal bytes, hundreds of them, where bfloat16 counts up to 256.
    """
    wide_KVD = _wide(table_KVD)
    x_BTD = F.embedding(tokens_BT, wide_KVD[0])
    for k in range(1, min(len(table_KVD), tokens_BT.shape[1])):
        before_BTD = F.embedding(tokens_BT[:, :-k], wide_KVD[k])
        x_BTD = x_BTD + F.pad(before_BTD, (0, 0, k, 0))
    return x_BTD.to(table_KVD.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _norm(x_BTD: Tensor, weight_D: Tensor) -> Tensor:
    return F.rms_norm(x_BTD, weight_D.shape, weight_D, 1e-6)


def _attention(block: dict[str, Tensor], x_BTD: Tensor, heads: int) -> Tensor:
    q_BNTH, k_BNTH, v_BNTH = (
        (x_BTD @ block[name]).unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("q", "k", "v")
    )
    mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
    return mixed_BNTH.transpose(1, 2).flatten(2) @ block["o"]


def _mlp(block: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
    hidden_BTF = F.relu(x_BTD @ block["up"]).square()
    return hidden_BTF @ block["down"]
