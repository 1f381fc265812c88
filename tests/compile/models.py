"""Three models with their losses, as plain functions of a tree of parameters, and a step of training over them.

Letters: B batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P
from tests.compile.programs import values

__all__ = ["Model", "convnet", "gpt", "mlp", "scanned", "train"]


class Model(NamedTuple):
    """A loss, the parameters and a batch to call it with: `loss(params, *batch)`."""

    loss: Callable[..., torch.Tensor]
    params: Any
    batch: tuple[torch.Tensor, ...]


def gpt(layers: int = 3, D: int = 16, T: int = 8, B: int = 4, V: int = 32, heads: int = 2) -> Model:
    """A decoder with tied embedding."""

    def weight(*shape: int, seed: int) -> torch.Tensor:
        return values(*shape, seed=seed) * 0.2

    def block(n: int) -> dict[str, torch.Tensor]:
        return {
            "ln1": torch.ones(D),
            "qkv": weight(D, 3 * D, seed=n),
            "o": weight(D, D, seed=n + 1),
            "ln2": torch.ones(D),
            "up": weight(D, 4 * D, seed=n + 2),
            "down": weight(4 * D, D, seed=n + 3),
        }

    def layer(p: dict[str, torch.Tensor], x_BTD: torch.Tensor) -> torch.Tensor:
        qkv = F.rms_norm(x_BTD, (D,), p["ln1"]) @ p["qkv"]
        q, k, v = (part.reshape(*x_BTD.shape[:2], heads, -1).transpose(1, 2) for part in qkv.chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + attended.transpose(1, 2).reshape(x_BTD.shape) @ p["o"]
        return x_BTD + F.gelu(F.rms_norm(x_BTD, (D,), p["ln2"]) @ p["up"]) @ p["down"]

    def loss(params: Any, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = F.embedding(tokens_BT, params["wte"]) + params["wpe"]
        for p in params["blocks"]:
            x_BTD = layer(p, x_BTD)
        logits_BTV = F.rms_norm(x_BTD, (D,), params["lnf"]) @ params["wte"].T
        return F.cross_entropy(logits_BTV.reshape(-1, V), targets_BT.reshape(-1))

    params = {
        "wte": weight(V, D, seed=5),
        "wpe": weight(T, D, seed=6),
        "lnf": torch.ones(D),
        "blocks": [block(4 * n) for n in range(layers)],
    }
    tokens = torch.arange(B * T).reshape(B, T) * 7 % V
    return Model(loss, params, (tokens, tokens.roll(-1, 1)))


def mlp(widths: tuple[int, ...] = (16, 32, 32, 8), B: int = 8) -> Model:
    """Layers with biases and ReLU between them; squared error."""

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for p in params[:-1]:
            x = torch.relu(F.linear(x, p["w"], p["b"]))
        return (F.linear(x, params[-1]["w"], params[-1]["b"]) - y).square().mean()

    params = [{"w": values(n, m, seed=m) * 0.2, "b": values(n, seed=n)} for m, n in itertools.pairwise(widths)]
    return Model(loss, params, (values(B, widths[0]), values(B, widths[-1], seed=1)))


def convnet(channels: int = 8, size: int = 8, B: int = 4) -> Model:
    """Two convolutions, the second one strided, a mean over places, a product."""

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.relu(F.conv2d(x, params["first"], padding=1))
        x = torch.relu(F.conv2d(x, params["second"], params["bias"], stride=2, padding=1))
        return F.cross_entropy(x.mean((2, 3)) @ params["head"], y)

    params = {
        "first": values(channels, 3, 3, 3) * 0.4,
        "second": values(2 * channels, channels, 3, 3, seed=1) * 0.4,
        "bias": values(2 * channels, seed=2),
        "head": values(2 * channels, 4, seed=3),
    }
    return Model(loss, params, (values(B, 3, size, size), torch.arange(B) % 4))


def scanned(layers: int = 3, D: int = 16, B: int = 8) -> Model:
    """Layers of two products as one loop; squared error. Weights are stacked, and gathered layer by layer."""

    def body(x_BD: torch.Tensor, layer: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        layer = px.reshard(layer, P())
        hidden = F.gelu(F.rms_norm(x_BD, (D,), layer["norm"]) @ layer["up"])
        return x_BD + hidden @ layer["down"], None

    def loss(params: Any, x_BD: torch.Tensor, y_BD: torch.Tensor) -> torch.Tensor:
        out_BD, _ = px.ops.scan(body, x_BD @ params["first"], params["blocks"])
        return (out_BD - y_BD).square().mean()

    blocks = {
        "norm": torch.ones(layers, D),
        "up": values(layers, D, 4 * D) * 0.2,
        "down": values(layers, 4 * D, D, seed=1) * 0.2,
    }
    params = {"first": values(D, D, seed=2) * 0.2, "blocks": blocks}
    return Model(loss, params, (values(B, D), values(B, D, seed=3)))


def train(
    model: Model, mesh: Any, weights: px.PartitionSpec | None = None, **options: Any
) -> tuple[Any, px.TrainState, tuple[torch.Tensor, ...]]:
    """A jitted step of AdamW, its first state and its batch.

    Args:
        model: what to train.
        mesh: has an axis "data", over which the batch is split.
        weights: where parameters and the optimizer's state lie; replicated if None.
        **options: of `px.jit`.
    """
    optimizer = px.optim.adamw(1e-2)
    state = px.TrainState(step=0, params=model.params, opt_state=optimizer.init(model.params))

    def place(path: tuple, leaf: Any) -> px.PartitionSpec:
        if weights is None or not getattr(leaf, "ndim", 0):
            return P()
        return P(None, *weights.entries) if _stacked(px.tree.path_str(path)) else weights

    specs = px.tree.map_with_path(place, state)

    def step(state: px.TrainState, *batch: torch.Tensor) -> tuple[px.TrainState, torch.Tensor]:
        def whole(params: Any) -> torch.Tensor:
            # Those of a loop are gathered in it.
            gathered = px.tree.map_with_path(
                lambda path, leaf: leaf if _stacked(px.tree.path_str(path)) else px.reshard(leaf, P()), params
            )
            return model.loss(gathered if weights is not None else params, *batch)

        loss, grads = px.value_and_grad(whole)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = px.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss

    in_specs = (specs, *[P("data")] * len(model.batch))
    jitted = px.jit(step, mesh=mesh, in_specs=in_specs, out_specs=(specs, P()), donate_argnums=0, **options)
    return jitted, state, model.batch


def _stacked(path: str) -> bool:
    """Whether a parameter is a stack of one a layer: `blocks/up`, not `blocks/3/up`."""
    return re.search(r"blocks/[^/0-9]+$", path) is not None
