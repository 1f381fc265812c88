"""Which kernel runs an operator.

Matrix products are most of a CPU step. torch's `mm` goes to MKL, which is slow on AMD cores; oneDNN's product is as
exact and faster there from about 2 MFLOP on, and no slower elsewhere. The rule depends on shapes and dtypes alone, so
that every rank chooses alike and replicas stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

__all__ = ["callable_of", "choose_kernel"]

_MIN_FLOPS = 2e6


def choose_kernel(node: Node) -> Callable[..., Any]:
    """What the generated code calls for a node."""
    target: Any = node.target
    if target is torch.ops.aten.mm.default and _prefers_onednn(node):
        return _onednn_mm
    return callable_of(target)


def callable_of(target: Any) -> Callable[..., Any]:
    """An operator without the Python layer in front of it."""
    return getattr(target, "_op", target)


def _prefers_onednn(node: Node) -> bool:
    left, right = (operand.meta["val"] for operand in node.args[:2])  # type: ignore[union-attr]
    if left.dtype is not torch.float32 or left.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return 2 * left.shape[0] * left.shape[1] * right.shape[1] >= _MIN_FLOPS


def _onednn_mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(left, right.t(), None, "none", [], "")
