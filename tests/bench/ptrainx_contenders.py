"""The model through `px.jit`, written as a user would: a pure step, a mesh, a spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ptrainx as px
from ptrainx import P
from tests.bench.model import SIZES, optimizer_settings
from tests.bench.torch_model import loss_fn, torch_batch, torch_params

__all__ = ["ptrainx_eager", "ptrainx_step", "ptrainx_zero3", "trainer"]


def trainer(
    size: str, mesh: px.Mesh, weights: px.PartitionSpec, backend: str = "graph"
) -> tuple[Callable[..., Any], px.TrainState, tuple[torch.Tensor, torch.Tensor]]:
    """The jitted step, its first state and the batch, placed on `mesh`.

    Args:
        size: of the model.
        mesh: has an axis "data".
        weights: where parameters and optimizer state lie.
        backend: of `px.jit`.
    """
    heads = SIZES[size].H
    optimizer = px.optim.adamw(**optimizer_settings(), weight_decay=0.0)
    params = torch_params(size)
    state = px.TrainState(step=0, params=params, opt_state=optimizer.init(params), key=px.random.key(0))
    specs = px.tree.map(lambda leaf: weights if getattr(leaf, "ndim", 0) > 0 else P(), state)

    @px.jit(
        mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=(specs, P()), donate_argnums=0, backend=backend
    )
    def step(state: px.TrainState, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[px.TrainState, torch.Tensor]:
        def whole(params: Any) -> torch.Tensor:
            return loss_fn(px.reshard(params, P()), tokens, targets, heads)

        loss, grads = px.value_and_grad(whole)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = px.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss

    in_specs, out_specs = (specs, P("data"), P("data")), (specs, P())
    jitted = px.jit(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, donate_argnums=0, backend=backend)
    return jitted, px.device_put(state, specs, mesh), px.device_put(torch_batch(size), P("data"), mesh)


def _on_two_ranks(size: str, weights: px.PartitionSpec, backend: str = "graph") -> Callable[[], torch.Tensor]:
    step, state, data = trainer(size, px.make_mesh(data=2), weights, backend)
    held = [state]
    del state

    def run() -> torch.Tensor:
        held[0], loss = step(held[0], *data)
        return loss

    return run


def ptrainx_step(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """Parameters on every rank: what DDP does."""
    return _on_two_ranks(size, P())


def ptrainx_zero3(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """Parameters and optimizer state sharded: what FSDP does."""
    return _on_two_ranks(size, P("data"))


def ptrainx_eager(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """The same step operator by operator on DTensors."""
    return _on_two_ranks(size, P(), "eager")
