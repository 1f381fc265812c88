"""`scan`: a loop whose body is a pure function of a carry and one slice of the inputs.

In a step's graph it is one operator, whose body is traced once, however many steps there are (`ops/loop`); outside it
is a Python loop. The carry keeps one structure, shape, dtype and placement from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor, describe
from ptrainx.core.errors import InputError, SpecError, TreeError
from ptrainx.core.trace_context import TraceContext, current_trace, open_grads, user_source
from ptrainx.mesh.per_shard import Varying, is_per_shard
from ptrainx.mesh.placement import spec_of_placements
from ptrainx.ops.debug_print import held_prints, release
from ptrainx.ops.loop.function import run_loop
from ptrainx.ops.loop.joint import Body, make_plan

__all__ = ["scan"]


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Runs `carry, y = body(carry, x)` over the leading dim of `xs`.

    Args:
        body: pure; `x` is `xs` without its leading dim. The carry it returns has the structure, shapes and dtypes of
            the one it gets.
        init: the first carry, any pytree.
        xs: a pytree of tensors with one leading dim in common, not sharded there; None with `length`.
        length: the number of steps, if `xs` does not tell.
        reverse: from the last slice to the first; `ys` stay in the order of `xs`.

    Returns:
        (last carry, ys): each leaf of ys is stacked along a new leading dim.

    Placements: the carry's are a fixed point. A replicated leaf that the body returns sharded starts sharded; a sum
    that the body leaves owed, where the carry owes none, is paid in each step.

    Raises:
        InputError: leading dims that differ, no length, a carry whose shape or dtype changes.
        TreeError: a carry whose structure changes.
        SpecError: `xs` sharded on the leading dim, a carry whose placement changes otherwise.

    >>> carry, ys = scan(lambda c, x: (c + x, c), torch.tensor(0), torch.tensor([1, 2, 3]))
    >>> carry, ys
    (tensor(6), tensor([0, 1, 3]))
    """
    steps = _length(xs, length)
    trace = current_trace()
    if trace is not None and tc.proxy_mode() is not None and steps > 1 and open_grads() < 2:
        return _as_operator(body, init, xs, steps, reverse, trace)
    order = range(steps - 1, -1, -1) if reverse else range(steps)
    carry = px_tree.map(_global, init)
    ys: list[Any] = [None] * steps
    for count, i in enumerate(order):
        x = px_tree.map(lambda leaf, i=i: leaf[i], xs)
        if count == 0:
            carry, new, ys[i] = _settle(body, carry, x)
        else:
            new, ys[i] = _pair(body(carry, x))
        carry = _keep_placement(_checked(new, carry), carry)
    if not steps:
        # One step over a made-up slice tells what the ys would be like.
        with held_prints():
            _, y = _pair(body(carry, px_tree.map(lambda leaf: leaf.new_zeros(leaf.shape[1:]), xs)))
        return carry, px_tree.map(lambda leaf: torch.stack([as_tensor(leaf)])[:0], y)
    return carry, px_tree.map(lambda *leaves: torch.stack([as_tensor(leaf) for leaf in leaves]), *ys)


def _as_operator(body: Any, init: Any, xs: Any, steps: int, reverse: bool, trace: TraceContext) -> tuple[Any, Any]:
    """The loop as one node of the graph."""
    source = user_source()
    carry, carry_tree = px_tree.flatten(px_tree.map(_global, init))
    slices, x_tree = px_tree.flatten(px_tree.map(_global, xs))
    y_tree: Any = None

    def call(now: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal y_tree
        before = px_tree.unflatten(carry_tree, now)
        new, y = _pair(body(before, px_tree.unflatten(x_tree, x)))
        ys, y_tree = px_tree.flatten(px_tree.map(_global, y))
        return px_tree.leaves(_checked(new, before)), ys

    def keep(new: list[Any], old: list[Any]) -> list[Any]:
        unflatten = px_tree.unflatten
        return px_tree.leaves(_keep_placement(unflatten(carry_tree, new), unflatten(carry_tree, old)))

    with trace.marked(source=source):
        plan = make_plan(Body(call, _promotion, keep), carry, slices, trace)
        start = [
            c if tuple(c.placements) == tuple(s.placements) else c.redistribute(c.device_mesh, s.placements)
            for c, s in zip(carry, plan.carry_specs)
        ]
        last, ys = run_loop(plan, start, slices, steps, reverse, trace)
    return px_tree.unflatten(carry_tree, last), px_tree.unflatten(y_tree, ys)


def _global(leaf: Any) -> Any:
    trace = current_trace()
    return as_tensor(leaf) if trace is None else trace.as_global(leaf)


def _length(xs: Any, length: int | None) -> int:
    pairs, _ = px_tree.flatten_with_path(xs)
    sizes: dict[str, int] = {}
    for path, leaf in pairs:
        where = px_tree.path_expr(path, "xs")
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            raise InputError(f"scan: {where} has no leading dim", got=describe(leaf), fix="close over it instead")
        if isinstance(leaf, DTensor) and any(p.is_shard(0) for p in leaf.placements):
            raise SpecError(
                f"scan: {where} is sharded on its leading dim, which the loop runs over",
                got=str(spec_of_placements(leaf.placements, leaf.device_mesh.mesh_dim_names or (), leaf.ndim)),
                fix="shard another dim, or px.reshard it first",
                source=user_source(),
            )
        sizes[where] = leaf.shape[0]
    if length is not None:
        sizes["length"] = length
    if not sizes:
        raise InputError("scan has no xs and no length", fix="pass length=")
    if len(set(sizes.values())) > 1:
        raise InputError("scan: leading dims differ", got=str(sizes), expected="one number of steps")
    return next(iter(sizes.values()))


def _settle(body: Any, carry: Any, x: Any) -> tuple[Any, Any, Any]:
    """(carry to start from, carry after one step, y), with the start's placements a fixed point."""
    for _ in range(8):
        # A trial: what it prints counts only if its start is the one.
        with held_prints() as prints:
            new, y = _pair(body(carry, x))
        moved = px_tree.map(_promoted, carry, _checked(new, carry))
        if all(a is b for a, b in zip(px_tree.leaves(moved), px_tree.leaves(carry))):
            break
        carry = moved
    release(prints)
    return carry, new, y


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TreeError(
            "scan: the body does not return a pair (carry, y)",
            got=type(result).__name__,
            fix="return (carry, None) if there is nothing to stack",
            source=user_source(),
        )
    return result


def _promoted(old: Any, new: Any) -> Any:
    """The carry at the placement that it takes on by itself: replicated becomes sharded where the body shards it.

    A sum that is owed at first and not by what follows is paid at the start.
    """
    if not (isinstance(old, DTensor) and isinstance(new, DTensor)):
        return old
    wanted = _promotion(new, old)
    return old if wanted == tuple(old.placements) else old.redistribute(old.device_mesh, wanted)


def _promotion(new: DTensor, old: DTensor) -> tuple[Any, ...]:
    def promoted(p: Any, q: Any) -> Any:
        if p.is_replicate() and isinstance(q, (Shard, Varying)):
            return q
        if p.is_partial() and q != p and not isinstance(q, Varying):
            return q if isinstance(q, Shard) else Replicate()
        return p

    return tuple(promoted(p, q) for p, q in zip(old.placements, new.placements))


def _checked(new: Any, carry: Any) -> Any:
    if px_tree.structure(new) != px_tree.structure(carry):
        raise TreeError(
            "scan: the carry's structure changes",
            got=str(px_tree.structure(new)),
            expected=str(px_tree.structure(carry)),
            fix="return a carry like the one that body gets",
        )

    def check(path: Any, after: Any, before: Any) -> Any:
        after = _global(after)
        if after.shape != before.shape or after.dtype != before.dtype:
            raise InputError(
                f"scan: {px_tree.path_expr(path, 'carry')} changes its type",
                got=describe(after),
                expected=describe(before),
                fix="start from an init of that shape and dtype, or convert in the body",
                source=user_source(),
            )
        return after

    return px_tree.map_with_path(check, new, carry)


def _keep_placement(new: Any, carry: Any) -> Any:
    def keep(path: Any, after: Any, before: Any) -> Any:
        if not isinstance(after, DTensor) or not isinstance(before, DTensor):
            return after
        if after.placements == before.placements:
            return after
        if is_per_shard(after):
            return after.redistribute(after.device_mesh, before.placements)
        names = after.device_mesh.mesh_dim_names or ()
        for p, q in zip(before.placements, after.placements):
            if p != q and not q.is_partial() and not q.is_replicate():
                raise SpecError(
                    f"scan: {px_tree.path_expr(path, 'carry')} changes its placement",
                    got=f"{spec_of_placements(after.placements, names, after.ndim)} after a step",
                    expected=f"{spec_of_placements(before.placements, names, before.ndim)}, as before it",
                    fix="px.reshard it at the end of the body, or init to the other placement",
                    source=user_source(),
                )
        trace = current_trace()
        if trace is None:
            return after.redistribute(after.device_mesh, before.placements)
        with trace.marked(asked=False, reason="a scan's carry keeps its placement"):
            return after.redistribute(after.device_mesh, before.placements)

    return px_tree.map_with_path(keep, new, carry)
