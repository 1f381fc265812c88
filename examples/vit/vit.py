"""Trains a small vision transformer on scikit-learn's handwritten digits, on any mesh.

    python examples/vit/vit.py                                            one process
    ptrainx run -n 4 examples/vit/vit.py --mesh data=2,model=2            four
    python examples/vit/vit.py --mesh data=2,model=2,seq=2 --simulate     eight devices simulated in one process

The axes of the mesh, each of which may be missing: `data` splits the batch, `model` the heads and hidden units, `seq`
the patches of an image. The program is the same on all of them; where values lie is said by specs, here in `specs` and
`place`.

Shapes: B batch, T patches, D width, N heads, H head dim, F hidden, L layers, C classes.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, https://arxiv.org/abs/2010.11929.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import ptrainx as px
from ptrainx import P

__all__ = ["Config", "images", "init", "logits", "loss", "main", "place", "specs"]

SIZE, CLASSES, TEST = 8, 10, 360
"""Pixels on a side, kinds of digits, images kept for the test."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model; `patch` pixels on a side of a patch."""

    width: int = 64
    layers: int = 3
    heads: int = 4
    patch: int = 2

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (SIZE // self.patch) ** 2


def init(key: Tensor, config: Config) -> dict[str, Any]:
    """Initial parameters; those of the layers are stacked: their leading dim is the layer."""
    L, D, hidden = config.layers, config.width, 4 * config.width
    key_embed, key_position, key_head, *keys = px.random.split(key, 9)
    shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (D, hidden), "down": (hidden, D)}
    blocks = {name: _normal(k, (L, *shape), 1 / math.sqrt(shape[0])) for k, (name, shape) in zip(keys, shapes.items())}
    return {
        "embed": _normal(key_embed, (config.patch**2, D), 1 / config.patch),
        "position": _normal(key_position, (config.patches, D), 0.1),
        "blocks": blocks | {"norm_attention": torch.ones(L, D), "norm_mlp": torch.ones(L, D)},
        "norm": torch.ones(D),
        "head": _normal(key_head, (D, CLASSES), 0.5 / math.sqrt(D)),
    }


def _normal(key: Tensor, shape: tuple[int, ...], std: float) -> Tensor:
    return px.random.normal(key, shape) * std


def specs(params: Any, axes: Any) -> Any:
    """Where parameters lie: heads and hidden units over `model`; of a stacked matrix these are dims 1 and 2."""
    model = "model" if axes.get("model", 1) > 1 else None
    rules = [(r"/(q|k|v|up)$", P(None, None, model)), (r"/(o|down)$", P(None, model)), (r".*", P())]
    return px.match_rules(rules, params)


def place(axes: Any) -> Callable[[Tensor], Tensor]:
    """Where activations [B, T, D] lie between the layers: rows over `data`, patches over `seq`."""
    data, seq = ("data" if "data" in axes else None), ("seq" if "seq" in axes else None)
    return lambda x_BTD: px.reshard(x_BTD, P(data, seq))


def logits(params: Any, images_BSS: Tensor, config: Config, put: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Scores of the classes, [B, C].

    Args:
        params: from `init`.
        images_BSS: float32 [B, 8, 8], from 0 to 1.
        config: the sizes.
        put: says where activations lie, see `place`.
    """
    patches_BTP = px.ops.rearrange(images_BSS, "b (i p) (j q) -> b (i j) (p q)", p=config.patch, q=config.patch)
    x_BTD = put(patches_BTP @ params["embed"] + params["position"])

    def layer(x_BTD: Tensor, block: Any) -> tuple[Tensor, None]:
        x_BTD = x_BTD + put(_attention(block, _norm(x_BTD, block["norm_attention"]), config.heads))
        hidden_BTF = F.gelu(_norm(x_BTD, block["norm_mlp"]) @ block["up"])
        return x_BTD + put(hidden_BTF @ block["down"]), None

    x_BTD, _ = px.scan(layer, x_BTD, params["blocks"])
    return _norm(x_BTD, params["norm"]).mean(1) @ params["head"]


def _norm(x_BTD: Tensor, weight_D: Tensor) -> Tensor:
    return F.rms_norm(x_BTD, weight_D.shape, weight_D, 1e-6)


def _attention(block: Any, x_BTD: Tensor, heads: int) -> Tensor:
    q_BNTH, k_BNTH, v_BNTH = (
        px.ops.rearrange(x_BTD @ block[name], "b t (n h) -> b n t h", n=heads) for name in ("q", "k", "v")
    )
    mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH)
    return px.ops.rearrange(mixed_BNTH, "b n t h -> b t (n h)") @ block["o"]


def loss(params: Any, batch: Any, config: Config, put: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Mean cross-entropy of a batch {"image": [B, 8, 8], "label": int64 [B]}, in nats."""
    return F.cross_entropy(logits(params, batch["image"], config, put), batch["label"])


def images() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(images to train on, images for the test), the same in every run."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    every = {"image": (digits.images / 16).astype(np.float32)[order], "label": digits.target.astype(np.int64)[order]}
    return {k: v[:-TEST] for k, v in every.items()}, {k: v[-TEST:] for k, v in every.items()}


def main(argv: list[str] | None = None) -> float:
    """Trains, and returns the share of test images that are told right."""
    parser = argparse.ArgumentParser(description="Trains a vision transformer on handwritten digits.")
    parser.add_argument("--mesh", default="data=-1", help="data=2, or data=2,model=2,seq=2 (default: all on data)")
    parser.add_argument("--simulate", action="store_true", help="all devices in this process")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args(argv)
    axes = {name: int(size) for name, _, size in (part.partition("=") for part in o.mesh.split(","))}
    mesh, config = px.make_mesh(axes, simulate=o.simulate), Config()
    rate = px.optim.warmup_cosine_decay_schedule(0.0, o.lr, max(1, o.steps // 10), max(2, o.steps))
    optimizer = px.optim.chain(px.optim.clip_by_global_norm(1.0), px.optim.adamw(rate, weight_decay=0.05))

    def begin(key: Tensor) -> px.TrainState:
        params = init(key, config)
        return px.TrainState(step=0, params=params, opt_state=optimizer.init(params), key=key)

    key, put, rows = px.random.key(o.seed), place(mesh.shape), P("data" if "data" in mesh.shape else None)
    where = specs(px.eval_shape(begin, key), mesh.shape)

    @px.jit(mesh=mesh, in_specs=(where, rows), out_specs=(where, P()), donate_argnums=0)
    def step(state: px.TrainState, batch: Any) -> tuple[px.TrainState, Tensor]:
        value, grads = px.value_and_grad(lambda params: loss(params, batch, config, put))(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = px.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), value

    training, test = images()
    loader = px.data.Loader(training, o.batch, mesh=mesh, seed=o.seed, epochs=None)
    state = px.jit(begin, mesh=mesh, out_specs=where)(key)
    for number, batch in zip(range(1, o.steps + 1), loader):
        state, value = step(state, batch)
        if px.initialize().rank == 0 and (number % 50 == 0 or number == o.steps):
            print(f"step {number}: loss {value:.4f}")
    scores = px.jit(lambda params, x: logits(params, x, config, put), mesh=mesh, in_specs=(where.params, rows))
    found = px.device_get(scores(state.params, test["image"])).argmax(1)
    right = float((found == torch.from_numpy(test["label"])).float().mean())
    if px.initialize().rank == 0:
        print(f"{right:.1%} of {TEST} test images are told right")
    return right


if __name__ == "__main__":
    main()
