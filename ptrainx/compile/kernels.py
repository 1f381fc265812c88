"""Which kernel runs an operator.

Matrix products are most of a CPU step. torch's `mm` goes to MKL, which does not use AVX-512 on AMD cores; oneDNN does,
and is as exact and faster there from about 2 MFLOP on. On AVX2 cores MKL is the faster one. The choice depends on
shapes, dtypes and the processor alone, so that ranks on one kind of machine choose alike and replicas stay equal to the
bit.

Everything else is called by the shortest way there is: torch's own bindings parse their arguments in C, which saves
most of a microsecond against an operator's handle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

__all__ = ["callable_of", "choose_kernel"]

_MIN_FLOPS = 2e6

_BINDINGS: dict[str, Callable[..., Any]] = {
    "add.Tensor": torch.add,
    "sub.Tensor": torch.sub,
    "mul.Tensor": torch.mul,
    "div.Tensor": torch.div,
    "add_.Tensor": torch.Tensor.add_,
    "sub_.Tensor": torch.Tensor.sub_,
    "mul_.Tensor": torch.Tensor.mul_,
    "div_.Tensor": torch.Tensor.div_,
    "mm.default": torch.mm,
    "bmm.default": torch.bmm,
    "view.default": torch.Tensor.view,
    "t.default": torch.t,
    "transpose.int": torch.transpose,
    "permute.default": torch.permute,
    "sqrt.default": torch.sqrt,
    "sqrt_.default": torch.Tensor.sqrt_,
    "rsqrt.default": torch.rsqrt,
    "neg.default": torch.neg,
    "lerp_.Scalar": torch.Tensor.lerp_,
    "addcmul_.default": torch.Tensor.addcmul_,
}
"""Operators with a binding that takes the same arguments."""


def choose_kernel(node: Node) -> Callable[..., Any]:
    """What the generated code calls for a node."""
    target: Any = node.target
    if target is torch.ops.aten.mm.default and _prefers_onednn(node):
        return _onednn_mm
    return callable_of(target)


def callable_of(target: Any) -> Callable[..., Any]:
    """An operator without the Python layer in front of it."""
    schema = getattr(target, "_schema", None)
    if schema is not None and schema.name.startswith("aten::"):
        name = f"{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"
        if name in _BINDINGS:
            return _BINDINGS[name]
    return getattr(target, "_op", target)


def _prefers_onednn(node: Node) -> bool:
    left, right = (operand.meta["val"] for operand in node.args[:2])  # type: ignore[union-attr]
    if left.dtype is not torch.float32 or left.device.type != "cpu" or not _mkl_is_slow():
        return False
    return 2 * left.shape[0] * left.shape[1] * right.shape[1] >= _MIN_FLOPS


@functools.cache
def _mkl_is_slow() -> bool:
    """Whether these are AVX-512 cores that MKL treats as AVX2 ones."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")):
        return False
    try:
        with open("/proc/cpuinfo") as info:
            return any(line.startswith("vendor_id") and "AuthenticAMD" in line for line in info)
    except OSError:
        return False


def _onednn_mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(left, right.t(), None, "none", [], "")
