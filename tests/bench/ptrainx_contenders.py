"""The model through `px.jit`, written as a user would: a pure step, a mesh, a spec; layers as a loop or as a scan."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import ptrainx as px
from ptrainx import P
from tests.bench.model import SIZES, optimizer_settings
from tests.bench.torch_model import block, embed, head, torch_batch, torch_params

__all__ = [
    "ptrainx_eager",
    "ptrainx_inductor",
    "ptrainx_inductor_gloo",
    "ptrainx_ordered",
    "ptrainx_scan_inductor",
    "ptrainx_step",
    "ptrainx_zero3",
    "ptrainx_zero3_inductor",
    "ptrainx_zero3_inductor_gloo",
    "ptrainx_zero3_scan_inductor",
    "trainer",
]


def trainer(
    size: str,
    mesh: px.Mesh,
    sharded: bool,
    backend: str = "graph",
    scanned: bool = False,
    layers: int | None = None,
    **options: Any,
) -> tuple[Callable[..., Any], px.TrainState, tuple[torch.Tensor, torch.Tensor]]:
    """The jitted step, its first state and the batch, placed on `mesh`.

    Args:
        size: of the model.
        mesh: has an axis "data".
        sharded: whether parameters and optimizer state are split over "data" (ZeRO-3) or held by every rank.
        backend: of `px.jit`.
        scanned: layers as one `px.scan` over stacked parameters rather than as a Python loop.
        layers: so many instead of the size's own number.
        **options: more of `px.jit`.
    """
    heads = SIZES[size].H
    optimizer = px.optim.adamw(**optimizer_settings(), weight_decay=0.0)
    params = torch_params(size)
    if layers is not None:
        params["blocks"] = (params["blocks"] * layers)[:layers]
    if scanned:
        params["blocks"] = px.tree.map(lambda *leaves: torch.stack(leaves), *params["blocks"])
    state = px.TrainState(step=0, params=params, opt_state=optimizer.init(params), key=px.random.key(0))
    specs = px.match_rules(_rules(sharded, scanned), state)

    def loss_fn(params: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outer = px.reshard({name: leaf for name, leaf in params.items() if name != "blocks"}, P())

        def layer(x: torch.Tensor, weights: Any) -> tuple[torch.Tensor, None]:
            return block(px.reshard(weights, P()), x, heads), None

        x = embed(outer, tokens)
        if scanned:
            x, _ = px.scan(layer, x, params["blocks"])
        else:
            for weights in params["blocks"]:
                x, _ = layer(x, weights)
        return head(outer, x, targets)

    def step(state: px.TrainState, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[px.TrainState, torch.Tensor]:
        loss, grads = px.value_and_grad(loss_fn)(state.params, tokens, targets)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = px.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss

    in_specs, out_specs = (specs, P("data"), P("data")), (specs, P())
    options |= {"in_specs": in_specs, "out_specs": out_specs, "backend": backend}
    jitted = px.jit(step, mesh=mesh, donate_argnums=0, **options)
    return jitted, px.device_put(state, specs, mesh), px.device_put(torch_batch(size), P("data"), mesh)


def _rules(sharded: bool, scanned: bool) -> list[tuple[str, px.PartitionSpec]]:
    everything = [(r".*", P())]
    if not sharded:
        return everything
    stacked = [(r"blocks/", P(None, "data"))] if scanned else []
    return [*stacked, (r"(^|/)(step|key|count)$", P()), (r"/", P("data")), *everything]


def _on_two_ranks(
    size: str, sharded: bool, backend: str = "graph", scanned: bool = False, **options: Any
) -> Callable[[], torch.Tensor]:
    step, state, data = trainer(size, px.make_mesh(data=2), sharded, backend, scanned, **options)
    held = [state]
    del state

    def run() -> torch.Tensor:
        held[0], loss = step(held[0], *data)
        return loss

    return run


def _through_gloo(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The step with its collectives through gloo's sockets, as PyTorch's go; that is settled when it is compiled."""

    def run() -> torch.Tensor:
        before = os.environ.get("PTRAINX_SHARED_MEMORY")
        os.environ["PTRAINX_SHARED_MEMORY"] = "0"
        try:
            return step()
        finally:
            if before is None:
                del os.environ["PTRAINX_SHARED_MEMORY"]
            else:
                os.environ["PTRAINX_SHARED_MEMORY"] = before

    return run


def ptrainx_inductor_gloo(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """`ptrainx_inductor` through gloo."""
    return _through_gloo(ptrainx_inductor(size, rank))


def ptrainx_zero3_inductor_gloo(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """`ptrainx_zero3_inductor` through gloo."""
    return _through_gloo(ptrainx_zero3_inductor(size, rank))


def ptrainx_step(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """Parameters on every rank: what DDP does."""
    return _on_two_ranks(size, sharded=False)


def ptrainx_zero3(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """Parameters and optimizer state sharded: what FSDP does."""
    return _on_two_ranks(size, sharded=True)


def ptrainx_ordered(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """Parameters on every rank; four logical shards, so that the bits are those of 1, 2 and 4 ranks."""
    return _on_two_ranks(size, sharded=False, reductions="ordered", logical_shards=4)


def ptrainx_eager(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """The same step operator by operator on DTensors."""
    return _on_two_ranks(size, sharded=False, backend="eager")


def ptrainx_inductor(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """Parameters on every rank, compiled."""
    return _on_two_ranks(size, sharded=False, backend="inductor")


def ptrainx_zero3_inductor(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """Parameters and optimizer state sharded, compiled."""
    return _on_two_ranks(size, sharded=True, backend="inductor")


def ptrainx_scan_inductor(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """Parameters on every rank, layers as a scan, compiled."""
    return _on_two_ranks(size, sharded=False, backend="inductor", scanned=True)


def ptrainx_zero3_scan_inductor(size: str, rank: int) -> Callable[[], torch.Tensor]:
    """Parameters and optimizer state sharded, layers as a scan, compiled."""
    return _on_two_ranks(size, sharded=True, backend="inductor", scanned=True)
