"""GPT-2 as a pure function on the trees that `px.checkpoint.hf_shapes` gives.

Shapes: B batch, T tokens, D width, N heads, H head dim, V vocabulary. A tensor's name ends in its shape: `x_BTD`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import ptrainx as px

__all__ = ["logits"]


def logits(params: Any, tokens_BT: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Unnormalised log-probabilities of the token after each token.

    Args:
        params: layers as a list, or stacked.
        tokens_BT: int64 [B, T], T at most `n_positions`.
        config: what stands in `config.json`.

    Returns:
        [B, T, V], in the parameters' dtype.
    """
    eps = config["layer_norm_epsilon"]

    def block(x_BTD: Tensor, layer: Any) -> tuple[Tensor, None]:
        x_BTD = x_BTD + _attention(layer, _norm(layer, "norm_attention", x_BTD, eps), config["n_head"])
        return x_BTD + _mlp(layer, _norm(layer, "norm_mlp", x_BTD, eps)), None

    x_BTD = F.embedding(tokens_BT, params["embed"]) + params["position"][: tokens_BT.shape[1]]
    if isinstance(params["layers"], list):
        for layer in params["layers"]:
            x_BTD, _ = block(x_BTD, layer)
    else:
        x_BTD, _ = px.scan(block, x_BTD, params["layers"])
    x_BTD = _norm(params, "norm", x_BTD, eps)
    return x_BTD @ (params["head"] if "head" in params else params["embed"].t())


def _norm(layer: Any, name: str, x_BTD: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x_BTD, x_BTD.shape[-1:], layer[name], layer[f"{name}_bias"], eps)


def _attention(layer: Any, x_BTD: Tensor, heads: int) -> Tensor:
    q_BNTH, k_BNTH, v_BNTH = (
        _linear(layer, name, x_BTD).unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("q", "k", "v")
    )
    mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
    return _linear(layer, "o", mixed_BNTH.transpose(1, 2).flatten(2))


def _mlp(layer: Any, x_BTD: Tensor) -> Tensor:
    return _linear(layer, "down", F.gelu(_linear(layer, "up", x_BTD), approximate="tanh"))


def _linear(layer: Any, name: str, x: Tensor) -> Tensor:
    return x @ layer[name] + layer[f"{name}_bias"]
