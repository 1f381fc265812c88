"""`vmap`: a function of one example to a function of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor, describe
from ptrainx.core.errors import InputError, TraceError, TreeError
from ptrainx.core.trace_context import current_trace, user_source
from ptrainx.transforms.batched import Batched, trace_example
from ptrainx.transforms.outside import OutsideFunction

__all__ = ["vmap"]

Axes = Sequence["int | None"]


def vmap(fn: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0, axis_size: int | None = None) -> Any:
    """A function like `fn` that takes a batch of its arguments and gives a batch of its results.

    It works on plain tensors, on placed values and inside a jitted step, where the batch may be sharded; it nests, and
    composes with `grad`, `jvp`, `vjp`, `hvp`, `scan` and `remat`: `vmap(grad(loss))` gives a gradient for each example.
    Values that `fn` closes over are shared by all examples.

    Args:
        fn: a pure function of pytrees of tensors, for one example.
        in_axes: the dim of each positional argument that is the batch: a tuple with one entry an argument, or one for
            all; an entry is an int, None for what all examples share, or a tree of those that is a prefix of the
            argument. Keyword arguments have it at 0.
        out_axes: the dim of each result that becomes the batch, a prefix of the result; None for what does not depend
            on the example.
        axis_size: the number of examples; needed by nothing, checked if given.

    Returns:
        a function of batches.

    Raises:
        InputError: dims of different sizes, or no batched argument.
        TreeError: axes that do not fit their tree.
        TraceError: an operator that can't be batched; `px.reshard`, `px.shard_map` or `px.debug.print` inside.

    >>> vmap(torch.dot)(torch.ones(3, 2), torch.ones(3, 2))
    tensor([2., 2., 2.])

    Source: `jax.vmap`; batching by `torch.vmap`.
    """
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__

    @functools.wraps(fn, updated=())
    def batched(*args: Any, **kwargs: Any) -> Any:
        trace = current_trace()
        if trace is not None and trace.region is not None:
            raise TraceError(
                f"px.vmap inside {trace.region.name}, where values are per-shard ones",
                source=user_source(),
                fix="write the batch dim out (einsum, broadcasting), or call px.vmap around px.shard_map's caller",
            )
        pairs, treedef = px_tree.flatten_with_path((args, kwargs))
        axes = _argument_axes(name, in_axes, args, kwargs)
        leaves = [as_tensor(leaf) if trace is None else trace.as_global(leaf) for _, leaf in pairs]
        axes = [_dim(name, px_tree.path_expr(p), axis, leaf) for (p, _), axis, leaf in zip(pairs, axes, leaves)]
        _check_sizes(name, pairs, leaves, axes, axis_size)
        shapes = [tuple(n for dim, n in enumerate(leaf.shape) if dim != axis) for leaf, axis in zip(leaves, axes)]

        def call(examples: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
            inner, keywords = px_tree.unflatten(treedef, examples)
            found, structure = px_tree.flatten(fn(*inner, **keywords))
            return [as_tensor(leaf) for leaf in found], structure

        example = trace_example(name, call, leaves, shapes)
        result = px_tree.unflatten(example.tree, range(example.tree.num_leaves))
        outs = _spread(name, "out_axes", out_axes, result, "result")
        graph = Batched(name, example, leaves, axes, outs)
        given = [*leaves, *graph.constants]
        if trace is None and any(isinstance(value, DTensor) for value in given):
            return px_tree.unflatten(example.tree, OutsideFunction(lambda *g: tuple(graph(*g)), None)(*given))
        return px_tree.unflatten(example.tree, graph(*given))

    return batched


def _argument_axes(name: str, in_axes: Any, args: tuple, kwargs: dict[str, Any]) -> list[int | None]:
    """One axis a leaf of (args, kwargs)."""
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise TreeError(
            f"px.vmap of {name} was called with {len(args)} positional arguments",
            got=f"in_axes for {len(in_axes)}",
            fix="give in_axes one entry an argument, or one int for all",
            source=user_source(),
        )
    each = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    found: list[int | None] = []
    for i, (axes, value) in enumerate(zip(each, args)):
        found += _spread(name, "in_axes", axes, value, f"argument {i}")
    return [*found, *[0] * len(px_tree.leaves(kwargs))]


def _spread(name: str, what: str, axes: Any, value: Any, path: str) -> list[int | None]:
    """One axis a leaf of a value, from a tree that may be a prefix of it."""
    if axes is None or (isinstance(axes, int) and not isinstance(axes, bool)):
        return [axes] * len(px_tree.leaves(value))
    # Children one level down; None stands for itself here.
    given, form = px_tree.flatten(axes, is_leaf=lambda x: x is not axes)
    parts, other = px_tree.flatten(value, is_leaf=lambda x: x is not value)
    if not given or form != other:
        raise TreeError(
            f"px.vmap of {name}: {what} do not fit {path}",
            got=repr(axes),
            expected="an int, None, or a tree of them with the containers of the value",
            source=user_source(),
        )
    found: list[int | None] = []
    for i, (axis, part) in enumerate(zip(given, parts)):
        found += _spread(name, what, axis, part, f"{path}[{i}]")
    return found


def _dim(name: str, path: str, axis: int | None, leaf: torch.Tensor) -> int | None:
    if axis is None:
        return None
    if not -leaf.ndim <= axis < leaf.ndim:
        raise InputError(
            f"px.vmap of {name}: {path} has no dim {axis} to be the batch",
            got=describe(leaf),
            fix="give it axis None in in_axes, if all examples share it",
            source=user_source(),
        )
    return axis % leaf.ndim


def _check_sizes(name: str, pairs: Sequence[Any], leaves: Sequence[torch.Tensor], axes: Axes, size: int | None) -> None:
    found = {
        px_tree.path_expr(path): leaf.shape[axis]
        for (path, _), leaf, axis in zip(pairs, leaves, axes)
        if axis is not None
    }
    wanted = set(found.values()) if size is None else {*found.values(), size}
    if not found or len(wanted) > 1:
        raise InputError(
            f"px.vmap of {name}: " + ("the batched dims differ in size" if found else "no argument has a batched dim"),
            got=", ".join(f"{path}: {n}" for path, n in found.items()) or f"in_axes of {len(leaves)} Nones",
            expected=f"axis_size={size}" if size is not None else "one size",
            source=user_source(),
        )
