"""`eval_shape`: what a function would return, without computing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor, is_array_like

__all__ = ["eval_shape"]


def eval_shape(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The shapes and dtypes of `fn(*args, **kwargs)`; allocates and computes nothing.

    Args:
        fn: a pure function of pytrees.
        args: values or `ShapeDtypeStruct`s.
        kwargs: likewise.

    Returns:
        the tree that `fn` returns, with a `ShapeDtypeStruct` at each array leaf.

    >>> eval_shape(lambda x: {"y": x @ x.T}, torch.zeros(3, 8))
    {'y': f32[3,3]}
    """
    mode = tc.FakeTensorMode(allow_non_fake_inputs=True)

    def enter(leaf: Any) -> Any:
        if isinstance(leaf, ShapeDtypeStruct):
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        if not is_array_like(leaf):
            return leaf
        value = as_tensor(leaf)
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)

    def leave(leaf: Any) -> Any:
        if not is_array_like(leaf):
            return leaf
        value = as_tensor(leaf)
        return ShapeDtypeStruct(tuple(value.shape), value.dtype)

    with mode:
        args, kwargs = px_tree.map(enter, (args, kwargs))
        result = fn(*args, **kwargs)
        return px_tree.map(leave, result)
