"""Trains a byte-level GPT whose MLPs are mixtures of experts, the experts spread over the ranks.

    python examples/moe/moe_gpt.py                                              one process
    ptrainx run -n 4 examples/moe/moe_gpt.py --mesh data=2,expert=2             each rank half of the experts
    python examples/moe/moe_gpt.py --mesh data=2,expert=2,model=2 --simulate    eight devices simulated in one process

Each token goes to two of eight experts, chosen by a router that is trained along. The batch is split over `data` and
`expert`; at each layer an all-to-all along `expert` carries the tokens to their experts, another one brings the results
back. A small loss keeps the experts equally busy.

Shapes: B batch, T time (bytes), D width, N heads, H head dim, E experts, F hidden, L layers, V = 256 bytes.

Source: Fedus et al., "Switch Transformers", 2022, https://arxiv.org/abs/2101.03961.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ptrainx as px
from ptrainx import P

__all__ = ["Config", "init", "loss", "main", "rows", "specs"]

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model; each token goes to `chosen` experts, each of which takes `capacity` times its share."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    experts: int = 8
    chosen: int = 2
    capacity: float = 1.5
    context: int = 128


def init(key: Tensor, config: Config) -> dict[str, Any]:
    """Initial parameters; those of the layers are stacked: their leading dim is the layer."""
    L, D, E, hidden = config.layers, config.width, config.experts, 2 * config.width
    key_embed, key_position, key_head, key_router, *keys = px.random.split(key, 10)
    shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (E, D, hidden), "down": (E, hidden, D)}
    drawn = {name: _normal(k, (L, *shape), 1 / math.sqrt(shape[-2])) for k, (name, shape) in zip(keys, shapes.items())}
    experts = {name: drawn.pop(name) for name in ("up", "down")}
    norms = {"norm_attention": torch.ones(L, D), "norm_experts": torch.ones(L, D)}
    return {
        "embed": _normal(key_embed, (VOCABULARY, D), 0.5),
        "position": _normal(key_position, (config.context, D), 0.02),
        "blocks": drawn | norms | {"router": _normal(key_router, (L, D, E), 0.02), "experts": experts},
        "norm": torch.ones(D),
        "head": _normal(key_head, (D, VOCABULARY), 0.5 / math.sqrt(D)),
    }


def _normal(key: Tensor, shape: tuple[int, ...], std: float) -> Tensor:
    return px.random.normal(key, shape) * std


def specs(params: Any, axes: Any) -> Any:
    """Where parameters lie: experts over `expert`, heads over `model`; dim 0 of a stacked value is the layer."""
    expert, model = (name if axes.get(name, 1) > 1 else None for name in ("expert", "model"))
    rules = [
        (r"/experts/", P(None, expert)),
        (r"/(q|k|v)$", P(None, None, model)),
        (r"/o$", P(None, model)),
        (r".*", P()),
    ]
    return px.match_rules(rules, params)


def rows(axes: Any) -> P:
    """Where a batch lies: its rows over `data` and `expert`, as far as the mesh has them."""
    return P(tuple(name for name in ("data", "expert") if axes.get(name, 1) > 1) or None)


def loss(params: Any, batch: tuple[Tensor, Tensor], config: Config, axes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(what is minimised, {"cross_entropy": nats a byte, "dropped": share of choices that found an expert full}).

    Args:
        params: from `init`.
        batch: (bytes, the byte after each), int64 [B, T].
        config: the sizes.
        axes: sizes of the mesh's axes.
    """
    tokens_BT, targets_BT = batch
    place = lambda x_BTD: px.reshard(x_BTD, rows(axes))  # noqa: E731

    def experts(params: Any, x_ERD: Tensor) -> Tensor:
        return F.gelu(x_ERD @ params["up"]) @ params["down"]

    def layer(x_BTD: Tensor, block: Any) -> tuple[Tensor, Any]:
        x_BTD = x_BTD + place(_attention(block, _norm(x_BTD, block["norm_attention"]), config.heads))
        y_BTD = _norm(x_BTD, block["norm_experts"])
        mixed_BTD, aux = px.ops.moe(
            experts,
            block["experts"],
            y_BTD,
            y_BTD @ block["router"],
            k=config.chosen,
            capacity_factor=config.capacity,
        )
        return x_BTD + place(mixed_BTD), (aux.load_balancing_loss, aux.router_z_loss, aux.dropped)

    x_BTD = place(F.embedding(tokens_BT, params["embed"]) + params["position"][: tokens_BT.shape[1]])
    x_BTD, (balance_L, z_L, dropped_L) = px.scan(layer, x_BTD, params["blocks"])
    scores_BTV = _norm(x_BTD, params["norm"]) @ params["head"]
    cross_entropy = F.cross_entropy(scores_BTV.flatten(0, 1), targets_BT.flatten())
    total = cross_entropy + 0.01 * balance_L.mean() + 0.001 * z_L.mean()
    return total, {"cross_entropy": cross_entropy, "dropped": dropped_L.mean()}


def _norm(x_BTD: Tensor, weight_D: Tensor) -> Tensor:
    return F.rms_norm(x_BTD, weight_D.shape, weight_D, 1e-6)


def _attention(block: Any, x_BTD: Tensor, heads: int) -> Tensor:
    q_BNTH, k_BNTH, v_BNTH = (
        px.ops.rearrange(x_BTD @ block[name], "b t (n h) -> b n t h", n=heads) for name in ("q", "k", "v")
    )
    mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
    return px.ops.rearrange(mixed_BNTH, "b n t h -> b t (n h)") @ block["o"]


def main(argv: list[str] | None = None) -> float:
    """Trains on the source of Python's standard library, and returns the last cross-entropy."""
    parser = argparse.ArgumentParser(description="Trains a byte-level GPT with mixtures of experts.")
    parser.add_argument("--mesh", default="expert=-1", help="expert=4, or data=2,expert=2 (default: all on expert)")
    parser.add_argument("--simulate", action="store_true", help="all devices in this process")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args(argv)
    axes = {name: int(size) for name, _, size in (part.partition("=") for part in o.mesh.split(","))}
    axes.setdefault("expert", 1)
    mesh, config = px.make_mesh(axes, simulate=o.simulate), Config()
    optimizer = px.optim.chain(px.optim.clip_by_global_norm(1.0), px.optim.adamw(o.lr, weight_decay=0.1))

    def begin(key: Tensor) -> px.TrainState:
        params = init(key, config)
        return px.TrainState(step=0, params=params, opt_state=optimizer.init(params), key=key)

    key, where_rows = px.random.key(o.seed), rows(mesh.shape)
    where = specs(px.eval_shape(begin, key), mesh.shape)

    @px.jit(mesh=mesh, in_specs=(where, where_rows), out_specs=(where, P()), donate_argnums=0)
    def step(state: px.TrainState, batch: Any) -> tuple[px.TrainState, dict[str, Tensor]]:
        objective = lambda params: loss(params, batch, config, mesh.shape)  # noqa: E731
        (_, metrics), grads = px.value_and_grad(objective, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = px.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    files, _ = px.data.python_stdlib_files()
    windows = px.data.ByteWindows(px.data.read_bytes(files), config.context)
    loader = px.data.Loader(windows, o.batch, mesh=mesh, spec=where_rows, seed=o.seed, epochs=None)
    state, metrics = px.jit(begin, mesh=mesh, out_specs=where)(key), {"cross_entropy": torch.zeros(())}
    for number, batch in zip(range(1, o.steps + 1), loader):
        state, metrics = step(state, batch)
        if px.initialize().rank == 0 and (number % 20 == 0 or number == o.steps):
            dropped = float(metrics["dropped"])
            print(f"step {number}: {metrics['cross_entropy']:.4f} nats a byte, {dropped:.1%} of choices dropped")
    return float(metrics["cross_entropy"])


if __name__ == "__main__":
    main()
