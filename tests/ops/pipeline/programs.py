"""A small model in the form of a pipeline, and its loss and gradients by plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import ptrainx as px
from ptrainx import P

WIDTH, ROWS = 6, 48


def embed(shared: Any, microbatch: Any) -> Any:
    return torch.tanh(microbatch["x"] @ px.reshard(shared["embed"], P()))


def layer(weights: Any, x: Any, microbatch: Any) -> Any:
    return x + torch.tanh(x @ weights["up"] + weights["bias"]) @ weights["down"]


def gathered_layer(weights: Any, x: Any, microbatch: Any) -> Any:
    """The layer for weights that are stored in parts."""
    return layer({name: px.reshard(leaf, P()) for name, leaf in weights.items()}, x, microbatch)


def head_loss(shared: Any, x: Any, microbatch: Any) -> Any:
    # The embedding is tied: it is used at both ends.
    return ((x @ px.reshard(shared["embed"], P()).T @ shared["head"] - microbatch["y"]) ** 2).mean()


def values(layers: int, rows: int = ROWS) -> tuple[Any, Any, Any]:
    """(stacked, shared, batch), in float64."""
    generator = torch.Generator().manual_seed(layers)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5

    stacked = {"up": draw(layers, WIDTH, 8), "bias": draw(layers, 8), "down": draw(layers, 8, WIDTH)}
    shared = {"embed": draw(WIDTH, WIDTH), "head": draw(WIDTH, 1)}
    return stacked, shared, {"x": draw(rows, WIDTH), "y": draw(rows, 1)}


def specs(axes: dict[str, int], zero: int = 0) -> tuple[Any, Any, Any]:
    """The specs of `values` on a mesh with these axes; `zero=3` stores weights in parts on "data" too."""
    pipe, model, data = (axis if axis in axes else None for axis in ("pipe", "model", "data"))
    kept = data if zero == 3 else None
    stacked = {"up": P(pipe, kept, model), "bias": P(pipe, model), "down": P(pipe, model, kept)}
    return stacked, {"embed": P(kept), "head": P()}, P(data)


def by_torch(stacked: Any, shared: Any, batch: Any, m: int) -> tuple[torch.Tensor, Any]:
    """The mean of the microbatches' losses, and its gradients, by autograd alone."""
    leaves = [t.clone().requires_grad_() for t in px.tree.leaves((stacked, shared))]
    own, common = px.tree.unflatten(px.tree.structure((stacked, shared)), leaves)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(m):
        part = {name: rows[i::m] for name, rows in batch.items()}
        x = embed(common, part)
        for n in range(own["up"].shape[0]):
            x = layer({name: leaf[n] for name, leaf in own.items()}, x, part)
        total = total + head_loss(common, x, part) / m
    return total.detach(), list(torch.autograd.grad(total, leaves))


def loss_and_grads(schedule: str, m: int, stage: Any = layer) -> Any:
    """The same as a pipeline."""
    fn = px.pipeline(stage, prologue=embed, epilogue=head_loss, num_microbatches=m, schedule=px.schedules.get(schedule))
    return px.value_and_grad(fn, argnums=(0, 1))


def assert_same(found: Any, expected: Any) -> None:
    """Values, relative to the largest of each leaf."""
    loss, grads = px.device_get(found)
    torch.testing.assert_close(torch.as_tensor(loss), expected[0], rtol=1e-10, atol=0.0)
    for a, b in zip(px.tree.leaves(grads), expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-10 * float(b.abs().max()))
