"""Llama and Qwen2 as pure functions on the trees that `px.checkpoint.hf_shapes` gives.

Shapes: B batch, T tokens, D width, N heads, G heads of keys and values, H head dim, V vocabulary. A tensor's name ends
in its shape: `x_BTD`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ptrainx as px

__all__ = ["logits"]

Config = Mapping[str, Any]
"""What stands in `config.json`."""


def logits(params: Any, tokens_BT: Tensor, config: Config) -> Tensor:
    """Unnormalised log-probabilities of the token after each token.

    Args:
        params: layers as a list, or stacked.
        tokens_BT: int64 [B, T].
        config: of the model.

    Returns:
        [B, T, V], in the parameters' dtype.
    """
    rotation_TH = _rotation(tokens_BT.shape[1], config)

    def block(x_BTD: Tensor, layer: Any) -> tuple[Tensor, None]:
        eps = config["rms_norm_eps"]
        x_BTD = x_BTD + _attention(layer, _norm(x_BTD, layer["norm_attention"], eps), rotation_TH, config)
        return x_BTD + _mlp(layer, _norm(x_BTD, layer["norm_mlp"], eps)), None

    x_BTD = F.embedding(tokens_BT, params["embed"])
    if isinstance(params["layers"], list):
        for layer in params["layers"]:
            x_BTD, _ = block(x_BTD, layer)
    else:
        x_BTD, _ = px.scan(block, x_BTD, params["layers"])
    x_BTD = _norm(x_BTD, params["norm"], config["rms_norm_eps"])
    return x_BTD @ (params["head"] if "head" in params else params["embed"].t())


def _norm(x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    scale_BT1 = torch.rsqrt(wide_BTD.square().mean(-1, keepdim=True) + eps)
    return weight_D * (wide_BTD * scale_BT1).to(x_BTD.dtype)


def _attention(layer: Any, x_BTD: Tensor, rotation_TH: tuple[Tensor, Tensor], config: Config) -> Tensor:
    N = config["num_attention_heads"]
    G = config.get("num_key_value_heads") or N
    q_BNTH, k_BGTH, v_BGTH = (
        _linear(layer, name, x_BTD).unflatten(-1, (heads, -1)).transpose(1, 2)
        for name, heads in (("q", N), ("k", G), ("v", G))
    )
    q_BNTH, k_BGTH = _rotated(q_BNTH, rotation_TH), _rotated(k_BGTH, rotation_TH)
    k_BNTH, v_BNTH = (heads.repeat_interleave(N // G, dim=1) for heads in (k_BGTH, v_BGTH))
    mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
    return _linear(layer, "o", mixed_BNTH.transpose(1, 2).flatten(2))


def _mlp(layer: Any, x_BTD: Tensor) -> Tensor:
    return _linear(layer, "down", F.silu(_linear(layer, "gate", x_BTD)) * _linear(layer, "up", x_BTD))


def _linear(layer: Any, name: str, x: Tensor) -> Tensor:
    bias = layer.get(f"{name}_bias")
    return x @ layer[name] if bias is None else x @ layer[name] + bias


def _rotation(length: int, config: Config) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, H] of the angles by which queries and keys are turned.

    Sources: Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864; for `llama3`, long contexts by slower
    turning of slow pairs, Dubey et al., "The Llama 3 herd of models", 2024, https://arxiv.org/abs/2407.21783.
    """
    H = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    speeds_F = theta ** -(torch.arange(0, H, 2).float() / H)
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns_F = rope["original_max_position_embeddings"] * speeds_F / (2 * math.pi)
        fast_F = ((turns_F - low) / (high - low)).clamp(0, 1)
        speeds_F = speeds_F * (fast_F + (1 - fast_F) / rope["factor"])
    elif kind != "default":
        raise px.errors.InputError("positions of another kind", got=f"rope_type {kind!r}", expected="default or llama3")
    angles_TF = torch.arange(length).float()[:, None] * speeds_F
    angles_TH = torch.cat([angles_TF, angles_TF], dim=-1)
    return angles_TH.cos(), angles_TH.sin()


def _rotated(x_BNTH: Tensor, rotation_TH: tuple[Tensor, Tensor]) -> Tensor:
    cos_TH, sin_TH = (part.to(x_BNTH.dtype) for part in rotation_TH)
    left, right = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_TH + torch.cat([-right, left], dim=-1) * sin_TH
