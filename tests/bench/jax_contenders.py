"""The model in JAX on two devices of one process, as a JAX user would write it: jit, shardings, optax.

Imported only in the process that runs JAX, which has set the number of host devices before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.bench.model import EPSILON, SIZES, batch, initial_params, optimizer_settings

__all__ = ["jax_replicated", "jax_sharded"]


def _norm(x_BTD: jax.Array, weight_D: jax.Array) -> jax.Array:
    return x_BTD * jax.lax.rsqrt(jnp.mean(x_BTD * x_BTD, axis=-1, keepdims=True) + EPSILON) * weight_D


def _block(params: Any, x_BTD: jax.Array, heads: int) -> jax.Array:
    B, T, D = x_BTD.shape
    qkv = _norm(x_BTD, params["ln1"]) @ params["qkv"]
    q, k, v = (part.reshape(B, T, heads, D // heads) for part in jnp.split(qkv, 3, axis=-1))
    x_BTD = x_BTD + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(B, T, D) @ params["o"]
    up = jax.nn.gelu(_norm(x_BTD, params["ln2"]) @ params["up"], approximate=False)
    return x_BTD + up @ params["down"]


def _loss(params: Any, tokens_BT: jax.Array, targets_BT: jax.Array, heads: int) -> jax.Array:
    x_BTD = params["wte"][tokens_BT] + params["wpe"][: tokens_BT.shape[1]]
    for layer in params["blocks"]:
        x_BTD = _block(layer, x_BTD, heads)
    logits = _norm(x_BTD, params["lnf"]) @ params["wte"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets_BT).mean()


def _contender(size: str, weights: PartitionSpec) -> Callable[[], float]:
    heads = SIZES[size].H
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    optimizer = optax.adam(**optimizer_settings())
    params = jax.tree.map(jnp.asarray, initial_params(size))
    state = (params, optimizer.init(params))
    places = jax.tree.map(lambda leaf: NamedSharding(mesh, weights) if leaf.ndim else whole, state)
    state = jax.device_put(state, places)
    data = jax.device_put(batch(size), rows)

    def step(state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(_loss)(params, tokens, targets, heads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    compiled = jax.jit(step, donate_argnums=0, out_shardings=(places, whole))
    held = [state]

    def run() -> jax.Array:
        held[0], loss = compiled(held[0], *data)
        jax.block_until_ready((held[0], loss))
        return loss

    return run


def jax_replicated(size: str, rank: int) -> Callable[[], float]:
    """Parameters on both devices."""
    return _contender(size, PartitionSpec())


def jax_sharded(size: str, rank: int) -> Callable[[], float]:
    """Parameters and optimizer state sharded over both devices, gathered where XLA decides."""
    return _contender(size, PartitionSpec("data"))
