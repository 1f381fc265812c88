"""The model in PyTorch: as a function of a tree of tensors, and as the module that DDP and FSDP wrap.

Letters as in `model`: x_BTD has dims batch, tokens, width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.bench.model import EPSILON, SIZES, batch, initial_params

__all__ = ["GPT", "attend", "block", "loss_fn", "torch_batch", "torch_params"]


def attend(q_BHTd: torch.Tensor, k_BHTd: torch.Tensor, v_BHTd: torch.Tensor) -> torch.Tensor:
    """Causal attention."""
    return F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)


def block(params: Any, x_BTD: torch.Tensor, heads: int, attend: Any = attend) -> torch.Tensor:
    """One layer: attention, then the two products with GELU between; both on normed input, both added."""
    B, T, D = x_BTD.shape
    qkv = F.rms_norm(x_BTD, (D,), params["ln1"], EPSILON) @ params["qkv"]
    q, k, v = (part.reshape(B, T, heads, D // heads).transpose(1, 2) for part in qkv.chunk(3, -1))
    x_BTD = x_BTD + attend(q, k, v).transpose(1, 2).reshape(B, T, D) @ params["o"]
    up = F.gelu(F.rms_norm(x_BTD, (D,), params["ln2"], EPSILON) @ params["up"])
    return x_BTD + up @ params["down"]


def head(params: Any, x_BTD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next token; the embedding is tied."""
    logits = F.rms_norm(x_BTD, x_BTD.shape[-1:], params["lnf"], EPSILON) @ params["wte"].T
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets_BT.reshape(-1))


def embed(params: Any, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Tokens to vectors, with their positions added."""
    return F.embedding(tokens_BT, params["wte"]) + params["wpe"][: tokens_BT.shape[1]]


def loss_fn(
    params: Any, tokens_BT: torch.Tensor, targets_BT: torch.Tensor, heads: int, attend: Any = attend
) -> torch.Tensor:
    """The loss as a function of the tree of parameters."""
    x_BTD = embed(params, tokens_BT)
    for layer in params["blocks"]:
        x_BTD = block(layer, x_BTD, heads, attend)
    return head(params, x_BTD, targets_BT)


class Block(nn.Module):
    """A layer as a module, so that FSDP can gather and free it by itself."""

    def __init__(self, params: dict[str, Any], heads: int):
        super().__init__()
        self.heads = heads
        self.params = nn.ParameterDict({name: nn.Parameter(torch.tensor(value)) for name, value in params.items()})

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return block(self.params, x_BTD, self.heads)


class GPT(nn.Module):
    """The model as a module: tokens and targets to loss."""

    def __init__(self, size: str):
        super().__init__()
        params = initial_params(size)
        self.blocks = nn.ModuleList(Block(layer, SIZES[size].H) for layer in params.pop("blocks"))
        self.params = nn.ParameterDict({name: nn.Parameter(torch.tensor(value)) for name, value in params.items()})

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = embed(self.params, tokens_BT)
        for layer in self.blocks:
            x_BTD = layer(x_BTD)
        return head(self.params, x_BTD, targets_BT)


def torch_params(size: str) -> dict[str, Any]:
    """The initial parameters as a tree of tensors."""
    params = initial_params(size)
    layers = [{name: torch.tensor(value) for name, value in layer.items()} for layer in params.pop("blocks")]
    return {**{name: torch.tensor(value) for name, value in params.items()}, "blocks": layers}


def torch_batch(size: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch as tensors."""
    tokens, targets = batch(size)
    return torch.from_numpy(tokens), torch.from_numpy(targets)
