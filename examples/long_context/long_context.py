"""Trains a byte-level GPT on long windows of text, split over the ranks along the sequence.

    python examples/long_context/long_context.py                                              one process
    ptrainx run -n 4 examples/long_context/long_context.py --mesh seq=4                       each rank a quarter
    python examples/long_context/long_context.py --mesh data=2,model=2,seq=2 --simulate       eight devices simulated

Attention goes round a ring: each rank keeps its queries, and keys and values pass from rank to rank, so that no rank
ever holds the whole sequence. The order of positions is zigzag, which gives every rank as many of a causal mask's
pairs. The loss is computed in chunks, so that no rank holds all logits either.

Shapes: B batch, T time (bytes), D width, N heads, H head dim, F hidden, L layers, V = 256 bytes.

Sources: Liu et al., "Ring Attention with Blockwise Transformers", 2023, https://arxiv.org/abs/2310.01889; Brandon et
al., "Striped Attention", 2023, https://arxiv.org/abs/2311.09431.
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

__all__ = ["Config", "init", "loss", "main", "specs"]

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model; `chunk` rows of logits are held at a time."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 1024
    chunk: int = 256


def init(key: Tensor, config: Config) -> dict[str, Any]:
    """Initial parameters; those of the layers are stacked: their leading dim is the layer."""
    L, D, hidden = config.layers, config.width, 4 * config.width
    key_embed, key_position, key_head, *keys = px.random.split(key, 9)
    shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (D, hidden), "down": (hidden, D)}
    blocks = {name: _normal(k, (L, *shape), 1 / math.sqrt(shape[0])) for k, (name, shape) in zip(keys, shapes.items())}
    return {
        "embed": _normal(key_embed, (VOCABULARY, D), 0.5),
        "position": _normal(key_position, (config.context, D), 0.02),
        "blocks": blocks | {"norm_attention": torch.ones(L, D), "norm_mlp": torch.ones(L, D)},
        "norm": torch.ones(D),
        "head": _normal(key_head, (D, VOCABULARY), 0.5 / math.sqrt(D)),
    }


def _normal(key: Tensor, shape: tuple[int, ...], std: float) -> Tensor:
    return px.random.normal(key, shape) * std


def specs(params: Any, axes: Any) -> Any:
    """Where parameters lie: heads and hidden units over `model`; of a stacked matrix these are dims 1 and 2."""
    model = "model" if axes.get("model", 1) > 1 else None
    rules = [(r"/(q|k|v|up)$", P(None, None, model)), (r"/(o|down)$", P(None, model)), (r".*", P())]
    return px.match_rules(rules, params)


def loss(params: Any, batch: tuple[Tensor, Tensor], config: Config, axes: Any) -> Tensor:
    """Mean cross-entropy in nats a byte.

    Args:
        params: from `init`.
        batch: (bytes, the byte after each), int64 [B, T], in the order of the text.
        config: the sizes.
        axes: sizes of the mesh's axes: `data` splits the batch, `model` the heads, `seq` the sequence.
    """
    data, model, seq = (name if axes.get(name, 1) > 1 else None for name in ("data", "model", "seq"))
    length = batch[0].shape[1]
    order_T = px.ops.zigzag(length, seq) if seq else torch.arange(length)  # position of the text at each place
    tokens_BT, targets_BT = (px.reshard(x[:, order_T], P(data, seq)) for x in batch)
    place = lambda x_BTD: px.reshard(x_BTD, P(data, seq))  # noqa: E731

    def attention(block: Any, x_BTD: Tensor) -> Tensor:
        q_BNTH, k_BNTH, v_BNTH = (
            px.reshard(
                px.ops.rearrange(x_BTD @ block[name], "b t (n h) -> b n t h", n=config.heads), P(data, model, seq)
            )
            for name in ("q", "k", "v")
        )
        if seq is None:
            mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        else:
            mixed_BNTH = px.ops.ring_attention(q_BNTH, k_BNTH, v_BNTH, axis=seq, causal=True, order="zigzag")
        return px.ops.rearrange(mixed_BNTH, "b n t h -> b t (n h)") @ block["o"]

    def layer(x_BTD: Tensor, block: Any) -> tuple[Tensor, None]:
        x_BTD = x_BTD + place(attention(block, _norm(x_BTD, block["norm_attention"])))
        hidden_BTF = F.gelu(_norm(x_BTD, block["norm_mlp"]) @ block["up"])
        return x_BTD + place(hidden_BTF @ block["down"]), None

    x_BTD = place(F.embedding(tokens_BT, params["embed"]) + params["position"][order_T])
    x_BTD, _ = px.scan(layer, x_BTD, params["blocks"])
    return px.ops.chunked_cross_entropy(_norm(x_BTD, params["norm"]), params["head"], targets_BT, chunk=config.chunk)


def _norm(x_BTD: Tensor, weight_D: Tensor) -> Tensor:
    return F.rms_norm(x_BTD, weight_D.shape, weight_D, 1e-6)


def main(argv: list[str] | None = None) -> float:
    """Trains on the source of Python's standard library, and returns the last loss."""
    parser = argparse.ArgumentParser(description="Trains a byte-level GPT on long windows of text.")
    parser.add_argument("--mesh", default="seq=-1", help="seq=4, or data=2,model=2,seq=2 (default: all on seq)")
    parser.add_argument("--simulate", action="store_true", help="all devices in this process")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=Config.context)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args(argv)
    axes = {name: int(size) for name, _, size in (part.partition("=") for part in o.mesh.split(","))}
    mesh, config = (
        px.make_mesh(axes, simulate=o.simulate),
        Config(context=o.context, chunk=min(Config.chunk, o.context)),
    )
    optimizer = px.optim.chain(px.optim.clip_by_global_norm(1.0), px.optim.adamw(o.lr, weight_decay=0.1))

    def begin(key: Tensor) -> px.TrainState:
        params = init(key, config)
        return px.TrainState(step=0, params=params, opt_state=optimizer.init(params), key=key)

    key, rows = px.random.key(o.seed), P("data" if "data" in mesh.shape else None)
    where = specs(px.eval_shape(begin, key), mesh.shape)

    @px.jit(mesh=mesh, in_specs=(where, rows), out_specs=(where, P()), donate_argnums=0)
    def step(state: px.TrainState, batch: Any) -> tuple[px.TrainState, Tensor]:
        value, grads = px.value_and_grad(lambda params: loss(params, batch, config, mesh.shape))(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = px.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), value

    files, _ = px.data.python_stdlib_files()
    windows = px.data.ByteWindows(px.data.read_bytes(files), config.context)
    loader = px.data.Loader(windows, o.batch, mesh=mesh, spec=rows, seed=o.seed, epochs=None)
    state, value = px.jit(begin, mesh=mesh, out_specs=where)(key), torch.zeros(())
    for number, batch in zip(range(1, o.steps + 1), loader):
        if number == 1 and px.initialize().rank == 0:
            print(step.lower(state, batch).memory())
        state, value = step(state, batch)
        if px.initialize().rank == 0 and (number % 20 == 0 or number == o.steps):
            print(f"step {number}: loss {value:.4f} nats a byte")
    return float(value)


if __name__ == "__main__":
    main()
