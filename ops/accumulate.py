"""`accumulate_grads`: a large batch as a loop over microbatches, its gradients summed unpaid and paid once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor, describe
from ptrainx.core.errors import GradientError, InputError
from ptrainx.core.trace_context import current_trace, user_source
from ptrainx.ops.random import fold_in
from ptrainx.ops.scan import scan

__all__ = ["accumulate_grads", "microbatches"]


def accumulate_grads(
    grad_fn: Any,
    num_microbatches: int,
    argnums: int | Sequence[int] = (1,),
    *,
    key_argnums: int | Sequence[int] = (),
    weight: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A function like `grad_fn` that works through its batch in microbatches.

    Microbatch i of M takes rows i, i + M, i + 2M, ... of the global batch, so that sharded rows stay where they are.
    Values, aux and gradients are means over microbatches. Sums that gradients owe over mesh axes are carried unpaid
    and paid once, after the loop: the bytes on the wire are those of one step.

    Args:
        grad_fn: what `px.grad` or `px.value_and_grad` returned.
        num_microbatches: M; divides the rows, and each rank's rows.
        argnums: positional arguments that are split by rows: pytrees of tensors with one number of rows.
        key_argnums: positional arguments that are random keys; microbatch i gets `fold_in(key, i)`.
        weight: called like the differentiated function, with a microbatch; a scalar by which that microbatch counts,
            for instance its number of tokens. Equal weights if None.

    Returns:
        a function with the arguments and results of `grad_fn`.

    Raises:
        InputError: rows that M does not divide, or leaves with different numbers of rows.
        GradientError: `grad_fn` is not made by `px.grad` or `px.value_and_grad`.
    """
    batch_argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    keys = (key_argnums,) if isinstance(key_argnums, int) else tuple(key_argnums)
    if not all(hasattr(grad_fn, name) for name in ("unreduced", "pay", "package")):
        raise GradientError(
            "accumulate_grads takes a function made by px.grad or px.value_and_grad",
            got=getattr(grad_fn, "__name__", repr(grad_fn)),
            fix="accumulate_grads(px.value_and_grad(loss_fn), num_microbatches)",
        )
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise InputError(f"num_microbatches={num_microbatches!r}", expected="a positive integer")

    def accumulated(*args: Any, **kwargs: Any) -> Any:
        missing = [n for n in (*batch_argnums, *keys) if n >= len(args)]
        if missing:
            raise InputError(
                f"accumulate_grads: argnums or key_argnums name argument {missing[0]} of {len(args)}",
                fix="pass batches and keys by position",
                source=user_source(),
            )
        stacked = {n: microbatches(args[n], num_microbatches, n) for n in batch_argnums}

        def one(index: Any, batch: dict[int, Any]) -> Any:
            call = [batch.get(n, a) for n, a in enumerate(args)]
            for n in keys:
                call[n] = fold_in(args[n], index)
            value, aux, grads = grad_fn.unreduced(*call, **kwargs)
            if weight is None:
                return 1.0, (value, aux, grads)
            share = weight(*call, **kwargs)
            return share, px_tree.map(lambda t: t * share, (value, aux, grads))

        # The first microbatch sets the placements of the carry: sums start owed, and stay so.
        total = one(0, px_tree.map(lambda t: t[0], stacked))
        if num_microbatches > 1:
            rest = px_tree.map(lambda t: t[1:], stacked)
            index = torch.arange(1, num_microbatches)
            total, _ = scan(lambda c, x: (px_tree.map(_add, c, one(x[0], x[1])), None), total, (index, rest))
        count, sums = total
        if weight is None:
            count = num_microbatches
        value, aux, grads = px_tree.map(lambda t: t / count, sums)
        if grad_fn.reduce:
            grads = grad_fn.pay(grads, args)
        return grad_fn.package(value, aux, grads)

    # So that the lines of reports are those of the differentiated function.
    functools.update_wrapper(accumulated, grad_fn, updated=())
    return accumulated


def _add(a: Any, b: Any) -> Any:
    return a + b


def microbatches(batch: Any, m: int, position: int, name: str = "accumulate_grads") -> Any:
    """The batch with a leading dim of microbatches; row r of the batch becomes row r // m of microbatch r % m."""
    rows: dict[str, int] = {}

    def split(path: Any, leaf: Any) -> torch.Tensor:
        where = px_tree.path_expr(path, f"argument {position}")
        x = as_tensor(leaf, where) if current_trace() is None else current_trace().as_global(leaf)  # type: ignore[union-attr]
        if x.ndim == 0:
            raise InputError(
                f"{name}: {where} has no rows",
                got=describe(x),
                fix="close over it, or leave its argument out of argnums",
            )
        rows[where] = x.shape[0]
        shards = _row_shards(x)
        if x.shape[0] % (m * shards):
            raise InputError(
                f"{name}: {where} has {x.shape[0]} rows over {shards} shards, which {m} microbatches do not divide",
                expected=f"a multiple of {m * shards} rows",
                fix="change the batch size or num_microbatches",
                source=user_source(),
            )
        return x.reshape(x.shape[0] // m, m, *x.shape[1:]).transpose(0, 1)

    out = px_tree.map_with_path(split, batch)
    if len(set(rows.values())) > 1:
        raise InputError(
            f"{name}: leaves with different numbers of rows",
            got=str(rows),
            expected="one number: microbatch i takes rows i::M of each leaf",
            fix="close over what is no row of the batch, or leave its argument out of argnums",
        )
    return out


def _row_shards(x: torch.Tensor) -> int:
    if not isinstance(x, DTensor):
        return 1
    return math.prod(x.device_mesh.size(i) for i, p in enumerate(x.placements) if p.is_shard(0))
