"""Private torch names about dims that are cut unevenly: what is sent is padded, and what comes is cropped.

torch pads and crops on the ranks that need it. The order of a graph's collectives follows from its operators, so here
every rank has the same ones, some of which change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import Shard, placement_types

__all__ = ["pad_alike"]


def pad_alike() -> Callable[[], None]:
    """Makes every rank pad and crop where one of them has to; returns the undo."""
    module: Any = placement_types
    shard: Any = Shard
    pad, crop = module.pad_tensor, Shard.__dict__["_maybe_unpad_tensor_with_sizes"]

    def crop_alike(dim: int, local: Any, sizes: Any, place: Any, make_contiguous: bool) -> Any:
        if isinstance(local, LocalTensor) or not isinstance(place, int):
            return crop.__func__(dim, local, sizes, place, make_contiguous)
        return _longer(local, dim, -sizes[place])

    module.pad_tensor = _longer
    shard._maybe_unpad_tensor_with_sizes = staticmethod(crop_alike)

    def undo() -> None:
        module.pad_tensor = pad
        shard._maybe_unpad_tensor_with_sizes = crop

    return undo


def _longer(tensor: torch.Tensor, dim: int, more: Any) -> torch.Tensor:
    """The tensor with zeros at the end of a dim; cropped there, if `more` is negative."""
    pads = [0, 0] * (tensor.ndim - dim - 1) + [0, more]
    return torch.ops.aten.constant_pad_nd.default(tensor, pads, 0.0)
