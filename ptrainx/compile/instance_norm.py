"""Instance normalisation of global values.

torch's kernel repeats the running statistics for each instance and writes into those copies.
"""

from __future__ import annotations

import math

import torch

__all__ = ["instance_norm"]


def instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.instance_norm`; running statistics are means over the global batch.

    Source: Ulyanov et al. 2016, https://arxiv.org/abs/1607.08022.
    """
    dims, shape = list(range(2, input.ndim)), [1, -1] + [1] * (input.ndim - 2)
    if use_input_stats or running_mean is None or running_var is None:
        mean = input.mean(dims, keepdim=True)
        centred = input - mean
        var = (centred * centred).mean(dims, keepdim=True)
        if running_mean is not None and running_var is not None:
            count = math.prod(input.shape[2:])
            with torch.no_grad():
                seen, spread = mean.flatten(1).mean(0), var.flatten(1).mean(0) * (count / max(count - 1, 1))
                running_mean.copy_(running_mean * (1 - momentum) + momentum * seen)
                running_var.copy_(running_var * (1 - momentum) + momentum * spread)
    else:
        centred, var = input - running_mean.reshape(shape), running_var.reshape(shape)
    out = centred * torch.rsqrt(var + eps)
    if weight is not None:
        out = out * weight.reshape(shape)
    return out if bias is None else out + bias.reshape(shape)
