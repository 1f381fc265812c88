"""Operators that change a value's shape in place, on global and per-shard values.

torch's own products call one: a vector times a matrix is `squeeze_` of a product of matrices. DTensor (torch 2.13) runs
it on the local tensor, and returns the value with its old shape where the placements stay the same. Here the view is
made as a new value, and the old one becomes it. `tests/compile/test_shapes_in_place.py` tells when torch is mended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ptrainx.core import torch_compat as tc

__all__ = ["NEW_SHAPE", "change_shape"]

_aten = torch.ops.aten

NEW_SHAPE: dict[Any, Callable[..., Any]] = {
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.t_.default: _aten.t.default,
}
"""The operators, and those that give the view as a new value."""


def change_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator of `NEW_SHAPE`: its first argument becomes the view, and is returned."""
    value = args[0]
    view = NEW_SHAPE[func](*args, **kwargs)
    value._local_tensor, value._spec = view._local_tensor, view._spec
    return tc.take_shape_in_place(func, args, kwargs, value)
