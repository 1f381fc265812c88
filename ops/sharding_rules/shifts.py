"""Shifts of integers.

torch 2.13's DTensor takes `__lshift__` for an operator that writes in place, by its last underscore, and gives the
operand back unshifted.
"""

from __future__ import annotations

import torch

from ptrainx.core.torch_compat_decomp import run_as

__all__ = ["register_shift_rules"]


def register_shift_rules() -> None:
    """Makes DTensor run the operators of `<<` and `>>` as the functions of the same meaning."""
    aten = torch.ops.aten
    for operator, function in (
        (aten.__lshift__, torch.bitwise_left_shift),
        (aten.__rshift__, torch.bitwise_right_shift),
    ):
        run_as(operator.Tensor, function)
        run_as(operator.Scalar, function)
