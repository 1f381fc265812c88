"""Private torch names about sharding rules: what DTensor knows of an operator, replaced by another rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from ptrainx.core.avals import ShapeDtypeStruct

__all__ = ["forget_propagations", "set_rule", "shaped_by_rank"]

Rows = Sequence[tuple[list[Any], list[Any]]]


def set_rule(operator: Any, rule: Callable[..., Rows]) -> None:
    """Makes `rule` the only thing that DTensor knows of an operator.

    Args:
        operator: an ATen or custom operator's overload.
        rule: takes the operator's arguments, tensors as `ShapeDtypeStruct`s; returns rows of (output placements, input
            placements), None for an argument that is no tensor.
    """
    dispatcher: Any = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    # torch looks for these before it looks for what is registered here.
    dispatcher._custom_op_handlers.pop(operator, None)
    for table in ("op_single_dim_strategy_funcs", "op_to_schema_info_for_single_dim_strategy", "op_to_rules"):
        getattr(propagator, table, {}).pop(operator, None)
    register_sharding(operator)(lambda *args, **kwargs: rule(*_shapes(args), **_shapes(kwargs)))
    propagator.op_to_schema_info[operator] = _everything_counts(operator)
    propagator.propagate_op_sharding.cache_clear()
    forget_propagations()


def forget_propagations() -> None:
    """Empties the cache of placements that torch keeps beneath Python, which knows of no ranks."""
    clear_fast_path = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_fast_path is not None:
        clear_fast_path()


def _everything_counts(operator: Any) -> RuntimeSchemaInfo:
    """That a rule may depend on every argument that is no tensor.

    torch's `register_sharding` remembers a rule's answer by integers alone: a call with other dims in a list, another
    flag or another number would get the answer of the first.
    """
    arguments = operator._schema.arguments
    plain = [i for i, a in enumerate(arguments) if not a.kwarg_only and "Tensor" not in str(a.type)]
    names = [a.name for a in arguments if a.kwarg_only and "Tensor" not in str(a.type)]
    return RuntimeSchemaInfo(min(plain, default=len(arguments)), names or None, needs_pytree=True)


def shaped_by_rank() -> set[Any]:
    """The operators that are given a local shape: what is worked out for one rank is not right for another."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster")
    return {operator for table in tables for operator in getattr(propagator, table, {})}


def _shapes(value: Any) -> Any:
    if isinstance(value, DTensorSpec):
        meta: Any = value.tensor_meta
        return ShapeDtypeStruct(tuple(meta.shape), meta.dtype)
    if isinstance(value, (tuple, list)):
        return type(value)(_shapes(v) for v in value)
    return {k: _shapes(v) for k, v in value.items()} if isinstance(value, dict) else value
