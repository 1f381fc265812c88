"""Reductions over `dim=[]`, which means all dims: torch 2.13's DTensor takes it for none.

A sum with its dims kept is then the rank's own, and the gradient of `amax` over a sharded value, which counts its
largest elements in that way, divides by zero on the ranks that hold none.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["with_all_dims"]

_aten = torch.ops.aten
_REDUCTIONS = {
    _aten.sum.dim_IntList,
    _aten.nansum.default,
    _aten.mean.dim,
    _aten.amax.default,
    _aten.amin.default,
    _aten.logsumexp.default,
    _aten.var.correction,
    _aten.std.correction,
    _aten.var_mean.correction,
    _aten.std_mean.correction,
    _aten.linalg_vector_norm.default,
}


def with_all_dims(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of an operator; of a reduction over no dims, with all dims said."""
    if func not in _REDUCTIONS:
        return args, kwargs
    index = next(i for i, formal in enumerate(func._schema.arguments) if formal.name == "dim")
    every = list(range(args[0].ndim))
    if len(args) > index and args[index] is not None and len(args[index]) == 0:
        return (*args[:index], every, *args[index + 1 :]), kwargs
    if kwargs.get("dim") is not None and len(kwargs["dim"]) == 0:
        return args, {**kwargs, "dim": every}
    return args, kwargs
