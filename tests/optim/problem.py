"""The small nonconvex problem that optimizers are compared on, and the loop that runs ours on it."""

from __future__ import annotations

from typing import Any

import torch

from ptrainx import optim
from ptrainx.core import tree

STEPS = 25


def start(dtype: torch.dtype) -> Any:
    """Parameters of several ranks, a 0-d one and an empty node among them."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "layers": [{"w": normal(5, 4), "b": normal(4)}, {"w": normal(4, 3), "b": normal(3)}],
        "gain": normal(),
        "unused": None,
    }


def loss(params: Any) -> torch.Tensor:
    """A two-layer network that fits fixed targets: tanh and a sine make it nonconvex."""
    first, second = params["layers"]
    dtype = first["w"].dtype
    x = torch.linspace(-2, 2, 35, dtype=torch.float64).reshape(7, 5).to(dtype)
    hidden = torch.tanh(x @ first["w"] + first["b"])
    y = torch.sin(hidden @ second["w"] + second["b"]) * params["gain"]
    return ((y - x[:, :3].cos()) ** 2).mean()


def gradient(params: Any) -> Any:
    """The gradient of `loss`, by torch's own autograd."""
    leaves, treedef = tree.flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return tree.unflatten(treedef, torch.autograd.grad(loss(tree.unflatten(treedef, leaves)), leaves))


def trajectory(optimizer: optim.GradientTransformation, params: Any, steps: int = STEPS) -> list[list[torch.Tensor]]:
    """The parameters' leaves after each step."""
    state, path = optimizer.init(params), []
    for _ in range(steps):
        updates, state = optimizer.update(gradient(params), state, params)
        params = optim.apply_updates(params, updates)
        path.append(tree.leaves(params))
    return path
