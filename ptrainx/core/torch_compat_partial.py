"""Private torch names about owed sums: how DTensor makes addends of a value that every rank holds.

torch gives each of n ranks the value divided by n: integers become floats, and floats are rounded twice. Here the first
rank gets the value and the others zeros, which is exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import Partial

__all__ = ["make_addends_exact"]


def make_addends_exact() -> Callable[[], None]:
    """Replaces how a replicated value becomes addends; returns the undo."""
    original = Partial._partition_value

    def partition(self: Any, tensor: Any, mesh: Any, mesh_dim: int) -> Any:
        if self.reduce_op != "sum" or type(self) is not Partial:
            return original(self, tensor, mesh, mesh_dim)
        index = mesh.get_coordinate()[mesh_dim]
        if isinstance(tensor, LocalTensor):
            places = getattr(getattr(index, "node", None), "_local_ints", None) or dict.fromkeys(tensor._ranks, index)
            parts = tensor._local_tensors.items()
            return LocalTensor({rank: t if places[rank] == 0 else torch.zeros_like(t) for rank, t in parts})
        return tensor if index == 0 else torch.zeros_like(tensor)

    Partial._partition_value = partition  # type: ignore[method-assign]

    def undo() -> None:
        Partial._partition_value = original  # type: ignore[method-assign]

    return undo
