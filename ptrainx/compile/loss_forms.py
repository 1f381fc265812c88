"""Losses that torch computes with a look at values on the host, written without it."""

from __future__ import annotations

import math
from typing import Any

import torch

from ptrainx.core.errors import InputError

__all__ = ["gaussian_nll_loss"]


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """`torch.nn.functional.gaussian_nll_loss`, without its look on the host for a negative variance.

    Source: Nix and Weigend 1994, https://doi.org/10.1109/ICNN.1994.374138.
    """
    if reduction not in ("none", "mean", "sum"):
        raise InputError(
            "gaussian_nll_loss has no such reduction", got=repr(reduction), expected='"none", "mean" or "sum"'
        )
    variance: Any = var if isinstance(var, torch.Tensor) else var * torch.ones_like(input)
    if variance.shape != input.shape:
        if tuple(input.shape[:-1]) == tuple(variance.shape):
            variance = variance.unsqueeze(-1)
        elif input.shape[:-1] != variance.shape[:-1] or variance.shape[-1] != 1:
            raise InputError(
                "gaussian_nll_loss: the variance fits no input",
                got=f"var {list(variance.shape)}, input {list(input.shape)}",
                expected="one variance an element, or one for each row of the last dim",
            )
    # The bound takes no part in the gradient.
    with torch.no_grad():
        below = (eps - variance).clamp(min=0)
    variance = variance + below
    loss = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()
