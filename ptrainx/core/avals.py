"""Abstract values: a leaf's shape and dtype without its data, and which Python and numpy values count as leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from ptrainx.core.errors import TreeError

__all__ = ["ShapeDtypeStruct", "as_tensor", "describe", "is_array_like"]

DTYPE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


@dataclasses.dataclass(frozen=True)
class ShapeDtypeStruct:
    """The shape and dtype of a tensor that need not exist; what `px.eval_shape` returns at each leaf."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def __repr__(self) -> str:
        return describe(self)


def describe(value: Any) -> str:
    """A value's type in short.

    >>> describe(torch.zeros(2, 3))
    'f32[2,3]'
    """
    if isinstance(value, (torch.Tensor, ShapeDtypeStruct)):
        return f"{DTYPE_NAMES.get(value.dtype, str(value.dtype))}[{','.join(str(int(n)) for n in value.shape)}]"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"numpy {value.dtype}[{','.join(map(str, value.shape))}]"
    return f"{type(value).__name__} {value!r}"[:80]


def is_array_like(value: Any) -> bool:
    """Whether a value can be a leaf of a jitted function's arguments."""
    return isinstance(value, (torch.Tensor, np.ndarray, np.generic, bool, int, float))


def as_tensor(value: Any, where: str = "value") -> torch.Tensor:
    """A leaf as a tensor: Python int, float, bool become 0-d int64, default float, bool; numpy keeps its dtype.

    Shares memory with a tensor or a writable numpy array.

    Raises:
        TreeError: the leaf is of no known type.
    """
    if isinstance(value, torch.Tensor):
        return value
    # Before Python's numbers: numpy.float64 is a float to Python.
    if isinstance(value, (np.ndarray, np.generic)):
        return _from_numpy(value, where)
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.bool)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise TreeError(f"{where}: {value} does not fit into 64 bits", fix="pass it as a float")
        return torch.tensor(value, dtype=torch.int64)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.get_default_dtype())
    kind = type(value)
    raise TreeError(
        f"{where} is a leaf of unknown type {kind.__module__}.{kind.__qualname__}",
        got=repr(value)[:80],
        expected="a tensor, a numpy array, or a Python int, float or bool",
        fix="pass it by static_argnums, or make its class a pytree with px.register_dataclass",
    )


def _from_numpy(value: np.ndarray | np.generic, where: str) -> torch.Tensor:
    array = np.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # torch has no read-only tensors and no negative strides; such an array is copied.
    if not array.flags.writeable or any(step < 0 for step in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise TreeError(
            f"{where}: a numpy array of dtype {array.dtype} has no torch counterpart",
            fix="convert it with .astype to a numeric dtype",
        ) from error
