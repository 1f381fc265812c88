"""What each collective does, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptrainx.mesh.exchange import COLLECTIVES, exchange

INPUTS = [np.arange(8).reshape(4, 2) + 10.0 * rank for rank in range(2)]
INTS = [np.array([6, 3, 5, 9]), np.array([3, 5, 6, 1])]
PIECES = [np.arange(6) + 10.0 * rank for rank in range(2)]
F = "_c10d_functional::"

# name, inputs, each rank's other arguments, expected outputs
TABLE = [
    (F + "all_reduce", INPUTS, ["sum"], [sum(INPUTS)] * 2),
    (F + "all_reduce", INPUTS, ["avg"], [np.mean(INPUTS, axis=0)] * 2),
    (F + "all_reduce", INPUTS, ["max"], [np.max(INPUTS, axis=0)] * 2),
    (F + "all_reduce", INPUTS, ["min"], [np.min(INPUTS, axis=0)] * 2),
    (F + "all_reduce", INPUTS, ["product"], [np.prod(INPUTS, axis=0)] * 2),
    (F + "all_reduce", INTS, ["band"], [INTS[0] & INTS[1]] * 2),
    (F + "all_reduce", INTS, ["bor"], [INTS[0] | INTS[1]] * 2),
    (F + "all_reduce", INTS, ["bxor"], [INTS[0] ^ INTS[1]] * 2),
    (F + "all_gather_into_tensor", INPUTS, [2], [np.concatenate(INPUTS)] * 2),
    (F + "reduce_scatter_tensor", INPUTS, ["sum", 2], list(np.split(sum(INPUTS), 2))),
    ("ptrainx::all_gather_pieces", PIECES, [[2, 4], 2], [np.array([0, 1, 10, 11, 2, 3, 4, 5, 12, 13, 14, 15.0])] * 2),
    (
        "ptrainx::reduce_scatter_pieces",
        PIECES,
        ["sum", [1, 2], 2],
        [np.array([10, 14, 16.0]), np.array([12, 18, 20.0])],
    ),
    (F + "broadcast", INPUTS, [1], [INPUTS[1]] * 2),
    ("ptrainx::ppermute", INPUTS, [[-1, 0]], [np.zeros((4, 2)), INPUTS[0]]),
    (
        "_dtensor::shard_dim_alltoall",
        INPUTS,
        [0, 1],
        list(np.split(np.concatenate(INPUTS, axis=0), 2, axis=1)),
    ),
]


@pytest.mark.parametrize(("name", "inputs", "args", "expected"), TABLE, ids=[f"{t[0]}{t[2]}" for t in TABLE])
def test_collective(name, inputs, args, expected):
    tensors = [torch.from_numpy(x.copy()) for x in inputs]
    outputs = exchange(name, tensors, [args] * 2)
    for output, right in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(output.numpy(), right)
    storages = {t.untyped_storage().data_ptr() for t in (*outputs, *tensors)}
    assert len(storages) == 4, "outputs share memory with each other or the inputs"
    for tensor, before in zip(tensors, inputs):
        np.testing.assert_array_equal(tensor.numpy(), before)


def test_all_to_all_takes_sizes_of_each_rank():
    first, second = np.arange(3), np.arange(10, 13)
    args = [[[1, 2], [1, 2]], [[2, 1], [2, 1]]]  # (output sizes, input sizes) of ranks 0 and 1
    outputs = exchange(F + "all_to_all_single", [torch.from_numpy(first), torch.from_numpy(second)], args)
    np.testing.assert_array_equal(outputs[0], [0, 10, 11])
    np.testing.assert_array_equal(outputs[1], [1, 2, 12])


def test_sums_are_taken_in_rank_order():
    tensors = [torch.tensor([x]) for x in (1.0, 1e8, -1e8)]
    right = (np.float32(1) + np.float32(1e8)) + np.float32(-1e8)
    assert [t.item() for t in exchange(F + "all_reduce", tensors, [["sum"]] * 3)] == [right] * 3


def test_the_table_covers_what_is_said():
    assert {t[0] for t in TABLE} | {F + "all_to_all_single"} == set(COLLECTIVES)
