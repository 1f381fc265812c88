"""Losses that are means over all elements: torch 2.13 runs their kernels on the local part of a sharded value.

A backward kernel then divides by the number of local elements, and its gradient is too large by the number of shards.
Written out as smaller operators they divide by the number of global elements.
"""

from __future__ import annotations

import torch

from ptrainx.core.torch_compat_decomp import run_decomposed

__all__ = ["register_loss_rules"]

_LOSSES = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss")


def register_loss_rules() -> None:
    """Makes DTensor write out each loss and its backward."""
    for name in _LOSSES:
        run_decomposed(getattr(torch.ops.aten, name).default)
        run_decomposed(getattr(torch.ops.aten, f"{name}_backward").default)
