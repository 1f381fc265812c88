"""How each dtype is written in a safetensors file.

What the format lacks is stored as what it has: complex numbers as pairs of floats, a last dim of 2 more; 8-bit floats
that safetensors does not name as bytes. The manifest names the true dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["DTYPES", "Stored", "bytes_of", "dtype_name", "stored_shape"]


class Stored(NamedTuple):
    """A dtype on disk.

    Attributes:
        dtype: torch's.
        code: the safetensors name of what is stored.
        itemsize: bytes of one element.
        pair: whether an element is stored as two.
    """

    dtype: torch.dtype
    code: str
    itemsize: int
    pair: bool = False


_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "U8",
    "float8_e5m2fnuz": "U8",
    "float8_e8m0fnu": "U8",
    "complex64": "F32",
    "complex128": "F64",
}

DTYPES: dict[str, Stored] = {
    name: Stored(dtype, code, dtype.itemsize, dtype.is_complex)
    for name, code in _CODES.items()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""Name in the manifest -> how it is stored."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in the manifest.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape under which safetensors has a tensor of this dtype and shape."""
    return (*shape, 2) if DTYPES[dtype].pair else shape


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; the tensor's own memory."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
