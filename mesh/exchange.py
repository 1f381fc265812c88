"""What each collective does, as a function from all ranks' inputs to all ranks' outputs.

The one reference that simulated values and the lockstep run share. Inputs and outputs are lists in the order of the
ranks in the group; no output shares memory with an input or another output. Sums are taken in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["COLLECTIVES", "exchange"]

Tensors = list[torch.Tensor]


def _reduce(inputs: Tensors, op: str) -> torch.Tensor:
    total = inputs[0].clone()
    for other in inputs[1:]:
        if op in ("sum", "avg"):
            total = total + other
        elif op == "product":
            total = total * other
        elif op == "max":
            total = torch.maximum(total, other)
        elif op == "min":
            total = torch.minimum(total, other)
        elif op in ("band", "bor", "bxor"):
            total = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op](total, other)
        else:
            raise AssertionError(f"unknown reduction {op}")
    return total / len(inputs) if op == "avg" else total


def _all_reduce(inputs: Tensors, op: str) -> Tensors:
    total = _reduce(inputs, op)
    return [total.clone() for _ in inputs]


def _all_gather(inputs: Tensors, group_size: int) -> Tensors:
    whole = torch.cat(inputs)
    return [whole.clone() for _ in inputs]


def _reduce_scatter(inputs: Tensors, op: str, group_size: int) -> Tensors:
    return [part.clone() for part in _reduce(inputs, op).chunk(len(inputs))]


def _all_gather_pieces(inputs: Tensors, sizes: Sequence[int], group_size: int) -> Tensors:
    pieces = zip(*(t.split(list(sizes)) for t in inputs))
    whole = torch.cat([part for parts in pieces for part in parts])
    return [whole.clone() for _ in inputs]


def _reduce_scatter_pieces(inputs: Tensors, op: str, sizes: Sequence[int], group_size: int) -> Tensors:
    n = len(inputs)
    pieces = [piece.chunk(n) for piece in _reduce(inputs, op).split([n * size for size in sizes])]
    return [torch.cat([chunks[i] for chunks in pieces]) for i in range(n)]


def _all_to_all(inputs: Tensors, outs: Sequence[Sequence[int]], ins: Sequence[Sequence[int]]) -> Tensors:
    parts = [list(t.split(list(sizes))) for t, sizes in zip(inputs, ins)]
    return [torch.cat([row[i] for row in parts]) for i in range(len(inputs))]


def _broadcast(inputs: Tensors, source: int) -> Tensors:
    # The operator's source counts within the group.
    return [inputs[source].clone() for _ in inputs]


def _shard_dim(inputs: Tensors, gather_dim: int, shard_dim: int) -> Tensors:
    whole = torch.cat(inputs, gather_dim)
    return [part.clone() for part in whole.chunk(len(inputs), shard_dim)]


def _permute(inputs: Tensors, sources: Sequence[int]) -> Tensors:
    return [torch.zeros_like(inputs[j]) if i < 0 else inputs[i].clone() for j, i in enumerate(sources)]


COLLECTIVES: dict[str, Callable[..., Tensors]] = {
    "_c10d_functional::all_reduce": _all_reduce,
    "_c10d_functional::all_gather_into_tensor": _all_gather,
    "_c10d_functional::reduce_scatter_tensor": _reduce_scatter,
    "ptrainx::all_gather_pieces": _all_gather_pieces,
    "ptrainx::reduce_scatter_pieces": _reduce_scatter_pieces,
    "_c10d_functional::all_to_all_single": _all_to_all,
    "_c10d_functional::broadcast": _broadcast,
    "_dtensor::shard_dim_alltoall": _shard_dim,
    "ptrainx::ppermute": _permute,
}
"""Operator name to its meaning; arguments after the tensor and before the group's name follow the inputs."""


def exchange(name: str, inputs: Tensors, args: Sequence[Any]) -> Tensors:
    """Runs one collective over one group.

    Args:
        name: operator name, a key of `COLLECTIVES`.
        inputs: one tensor a rank, in group order.
        args: a rank's arguments between the tensor and the group name, for each rank in group order.

    Returns:
        one tensor a rank, in group order.
    """
    if name == "_c10d_functional::all_to_all_single":
        return _all_to_all(inputs, [a[0] for a in args], [a[1] for a in args])
    return COLLECTIVES[name](inputs, *args[0])
