"""Leaves: what becomes of Python numbers, numpy values and tensors, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from ptrainx.core.avals import ShapeDtypeStruct, as_tensor, describe, is_array_like
from ptrainx.core.errors import TreeError

NUMBERS = [
    (True, torch.bool),
    (False, torch.bool),
    (3, torch.int64),
    (-(2**63), torch.int64),
    (2.5, torch.float32),
    (float("inf"), torch.float32),
    (np.float64(2.5), torch.float64),
    (np.float32(2.5), torch.float32),
    (np.float16(2.5), torch.float16),
    (np.int8(-3), torch.int8),
    (np.uint8(200), torch.uint8),
    (np.bool_(True), torch.bool),
    (np.complex64(1 + 2j), torch.complex64),
]


@pytest.mark.parametrize(("value", "dtype"), NUMBERS, ids=lambda v: repr(v))
def test_numbers_become_0d_tensors(value, dtype):
    tensor = as_tensor(value)
    assert tensor.shape == ()
    assert tensor.dtype == dtype
    assert tensor.item() == value


def test_a_python_float_takes_the_default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert as_tensor(0.1).dtype == torch.float64
        assert as_tensor(0.1).item() == 0.1
    finally:
        torch.set_default_dtype(before)


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.arange(6)[::-1],
    np.arange(12).reshape(3, 4)[:, ::2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(3, dtype=">f4"),
    np.arange(3, dtype=">i8"),
    np.broadcast_to(np.float32(1), (2, 2)),
    np.zeros((0, 3)),
    np.array(1.5),
    np.array([True, False]),
    np.arange(3, dtype=np.uint16),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype.str}{a.shape}{a.strides}")
def test_arrays_keep_dtype_and_values(array):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = as_tensor(array)
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensor.numpy().dtype == array.dtype.newbyteorder("=")


def test_a_read_only_array_is_copied_and_a_writable_one_shared():
    array = np.zeros(3)
    as_tensor(array)[0] = 1
    assert array[0] == 1
    array.flags.writeable = False
    as_tensor(array)[1] = 1
    assert array[1] == 0


REFUSED = [
    ("text", r"step\.name is a leaf of unknown type builtins\.str"),
    (None, r"unknown type builtins\.NoneType"),
    (1j, r"unknown type builtins\.complex"),
    (object(), r"unknown type builtins\.object"),
    (2**63, r"step\.name: 9223372036854775808 does not fit into 64 bits"),
    (-(2**63) - 1, r"does not fit into 64 bits"),
    (np.array(["a"]), r"step\.name: a numpy array of dtype <U1 has no torch counterpart"),
    (np.array([object()]), r"dtype object has no torch counterpart"),
    (np.datetime64("2020"), r"dtype datetime64\[Y\] has no torch counterpart"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[m[:30] for _, m in REFUSED])
def test_other_leaves_are_refused_by_path(value, message):
    with pytest.raises(TreeError, match=message):
        as_tensor(value, "step.name")


def test_the_refusal_says_what_to_do():
    with pytest.raises(TreeError, match=r"px\.register_dataclass"):
        as_tensor(object())


DESCRIBED = [
    (torch.zeros(2, 3), "f32[2,3]"),
    (torch.zeros((), dtype=torch.bfloat16), "bf16[]"),
    (torch.zeros(1, dtype=torch.uint16), "u16[1]"),
    (ShapeDtypeStruct((4,), torch.int64), "i64[4]"),
    (np.zeros((2, 2), np.int32), "numpy int32[2,2]"),
    (np.float64(1), "numpy float64[]"),
    (3, "int 3"),
    (2.5, "float 2.5"),
]


@pytest.mark.parametrize(("value", "text"), DESCRIBED, ids=[t for _, t in DESCRIBED])
def test_describe(value, text):
    assert describe(value) == text


def test_a_description_is_short():
    assert len(describe("x" * 1000)) <= 80


def test_shape_dtype_struct_is_a_value():
    one, other = ShapeDtypeStruct((2, 3), torch.float32), ShapeDtypeStruct((2, 3), torch.float32)
    assert one == other
    assert hash(one) == hash(other)
    assert one.ndim == 2
    assert repr(one) == "f32[2,3]"
    assert one != ShapeDtypeStruct((2, 3), torch.float16)


ARRAY_LIKE = [1, 1.0, True, np.zeros(1), np.int8(1), torch.zeros(1)]
NOT_ARRAY_LIKE = ["a", None, [1], 1j, object()]


def test_is_array_like():
    assert all(is_array_like(value) for value in ARRAY_LIKE)
    assert not any(is_array_like(value) for value in NOT_ARRAY_LIKE)
