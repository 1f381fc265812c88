"""`pipeline`: a loss over microbatches, each through a prologue, layers and an epilogue.

The meaning is a loop over microbatches and layers, which is what runs outside of a step. In a step the layers lie in
stages on the ranks of an axis, and each rank runs its actions of a schedule's table (`rank_program`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor, describe
from ptrainx.core.errors import InputError, TreeError
from ptrainx.core.trace_context import TraceContext, current_trace, open_grads, user_source
from ptrainx.mesh.logical import LogicalMesh
from ptrainx.ops.accumulate import microbatches
from ptrainx.ops.pipeline.function import run_pipeline
from ptrainx.ops.random import fold_in
from ptrainx.ops.schedules import OneFOneB, Schedule

__all__ = ["pipeline"]


def pipeline(
    stage_fn: Callable[..., Any],
    *,
    prologue: Callable[..., Any],
    epilogue: Callable[..., Any],
    num_microbatches: int,
    axis: str = "pipe",
    schedule: Schedule | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """A loss function whose layers are spread in stages over a mesh axis.

    Args:
        stage_fn: `(layer, x, microbatch) -> x`: one layer. `layer` is a slice of `stacked`; `x` any pytree of tensors
            whose structure, shapes and dtypes every layer keeps.
        prologue: `(shared, microbatch) -> x`, such as an embedding; computed with the first stage.
        epilogue: `(shared, x, microbatch) -> loss`, a floating-point scalar; computed with the last stage.
        num_microbatches: M. Microbatch i takes rows i, i + M, i + 2M, ... of the batch.
        axis: of the mesh. Where the mesh has no such axis, each rank runs all layers.
        schedule: in which order the ranks work; `px.schedules.OneFOneB()` if None.
        has_aux: `stage_fn` returns (x, aux) and `epilogue` (loss, aux), pytrees of floating-point tensors that do not
            count in the gradient. What layers add to the loss travels in `x`.

    Returns:
        `loss_fn(stacked, shared, batch, key=None)`: the mean of the microbatches' losses, or (loss, aux) with
        `has_aux`, where aux is `{"stages": layers' aux stacked, "epilogue": aux}`, means over microbatches. `stacked`
        has one layer's parameters per index of its leaves' leading dim, placed `P(axis, ...)`; `shared` is seen by
        prologue and epilogue. With a key, the functions get `key=`: one for each layer and microbatch.

    Raises:
        InputError: microbatches that do not divide the batch, a layer that changes `x`, a loss that is no scalar.
        SpecError: `stacked` not placed on the axis, or anything else placed there.

    >>> loss_fn = pipeline(lambda w, x, mb: x * w, prologue=lambda s, mb: mb * s,
    ...                    epilogue=lambda s, x, mb: x.mean(), num_microbatches=2)
    >>> loss_fn(torch.tensor([2.0, 3.0]), torch.tensor(1.0), torch.arange(4.0))
    tensor(9.)
    """
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise InputError(f"pipeline: num_microbatches={num_microbatches!r}", expected="a positive integer")
    given = OneFOneB() if schedule is None else schedule
    if not isinstance(given, Schedule):
        raise InputError(
            "pipeline: schedule is none",
            got=repr(schedule),
            expected="a px.schedules.Schedule",
            fix='px.schedules.OneFOneB(), or px.schedules.get("zb")',
        )
    functions = Functions(stage_fn, prologue, epilogue, has_aux)

    def loss_fn(stacked: Any, shared: Any, batch: Any, key: Any = None) -> Any:
        layers = _number_of_layers(stacked)
        rows = microbatches(batch, num_microbatches, 2, "pipeline")
        trace = current_trace()
        if trace is not None and _in_stages(trace):
            return run_pipeline(functions, given, axis, num_microbatches, (stacked, shared, rows, key), layers, trace)
        return _in_turn(functions, num_microbatches, (stacked, shared, rows, key), layers)

    functools.update_wrapper(loss_fn, stage_fn, updated=())
    loss_fn.__wrapped__ = stage_fn  # type: ignore[attr-defined]
    return loss_fn


def _in_stages(trace: TraceContext) -> bool:
    """Whether a schedule runs it: not where it is differentiated twice, per shard, or with reductions in order."""
    plain = open_grads() > 1 or trace.region is not None or isinstance(trace.mesh, LogicalMesh)
    return tc.proxy_mode() is not None and not plain


@dataclasses.dataclass(frozen=True)
class Functions:
    """A user's functions, with what they return checked.

    Attributes:
        stage_fn, prologue, epilogue, has_aux: as `pipeline` takes them.
    """

    stage_fn: Callable[..., Any]
    prologue: Callable[..., Any]
    epilogue: Callable[..., Any]
    has_aux: bool

    def first(self, shared: Any, microbatch: Any, key: Any) -> Any:
        """The prologue's x."""
        return self.prologue(shared, microbatch, **_keyword(key, 0))

    def layer(self, layer: Any, x: Any, microbatch: Any, key: Any, index: Any) -> tuple[Any, Any]:
        """(x, aux) of a layer."""
        out = self.stage_fn(layer, x, microbatch, **_keyword(key, index + 1 if key is not None else 0))
        new, aux = self._pair(out, "stage_fn", "x")
        return self._kept(new, x), aux

    def last(self, shared: Any, x: Any, microbatch: Any, key: Any, layers: int) -> tuple[Any, Any]:
        """(loss, aux) of the epilogue."""
        loss, aux = self._pair(self.epilogue(shared, x, microbatch, **_keyword(key, layers + 1)), "epilogue", "loss")
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.is_floating_point():
            raise InputError(
                "pipeline: the epilogue's loss is no scalar",
                got=describe(loss) if isinstance(loss, torch.Tensor) else type(loss).__name__,
                expected="a 0-d floating-point tensor",
                fix="reduce it with .mean() or .sum(), or use has_aux=True for what else it returns",
                source=user_source(),
            )
        return loss, aux

    def _pair(self, out: Any, name: str, first: str) -> tuple[Any, Any]:
        if not self.has_aux:
            return out, None
        if not isinstance(out, tuple) or len(out) != 2:
            raise TreeError(
                f"pipeline: {name} does not return a pair ({first}, aux), as has_aux says",
                got=type(out).__name__,
                fix=f"return ({first}, aux), or leave out has_aux",
                source=user_source(),
            )
        return out

    def _kept(self, new: Any, old: Any) -> Any:
        if px_tree.structure(new) != px_tree.structure(old):
            raise TreeError(
                "pipeline: stage_fn changes the structure of x",
                got=str(px_tree.structure(new)),
                expected=str(px_tree.structure(old)),
                fix="return an x like the one that it gets, which is the prologue's",
                source=user_source(),
            )

        def check(path: Any, after: Any, before: Any) -> Any:
            if not isinstance(after, torch.Tensor) or (after.shape, after.dtype) != (before.shape, before.dtype):
                raise InputError(
                    f"pipeline: stage_fn changes {px_tree.path_expr(path, 'x')}",
                    got=describe(after) if isinstance(after, torch.Tensor) else type(after).__name__,
                    expected=describe(before),
                    fix="every layer keeps the shapes and dtypes of x; change them in the prologue or the epilogue",
                    source=user_source(),
                )
            return after

        return px_tree.map_with_path(check, new, old)


def _keyword(key: Any, index: Any) -> dict[str, Any]:
    return {} if key is None else {"key": fold_in(key, index)}


def _in_turn(functions: Functions, m: int, args: tuple[Any, Any, Any, Any], layers: int) -> Any:
    """The meaning: one microbatch after the other, through one layer after the other."""
    stacked, shared, rows, key = args
    total: Any = None
    for i in range(m):
        batch = px_tree.map(lambda leaf, i=i: leaf[i], rows)
        own = None if key is None else fold_in(key, i)
        x = functions.first(shared, batch, own)
        found = []
        for n in range(layers):
            layer = px_tree.map(lambda leaf, n=n: leaf[n], stacked)
            x, aux = functions.layer(layer, x, batch, own, n)
            found.append(px_tree.map(_detached, aux))
        loss, last = functions.last(shared, x, batch, own, layers)
        stages = px_tree.map(lambda *leaves: torch.stack(leaves), *found) if found else None
        one = loss, {"stages": stages, "epilogue": px_tree.map(_detached, last)}
        total = one if total is None else px_tree.map(lambda a, b: a + b, total, one)
    loss, aux = px_tree.map(lambda t: t / m, total)
    return (loss, aux) if functions.has_aux else loss


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _number_of_layers(stacked: Any) -> int:
    pairs, _ = px_tree.flatten_with_path(stacked)
    trace = current_trace()
    sizes = {}
    for path, leaf in pairs:
        where = px_tree.path_expr(path, "stacked")
        x = as_tensor(leaf, where) if trace is None or isinstance(leaf, DTensor) else leaf
        if not isinstance(x, torch.Tensor) or x.ndim == 0:
            raise InputError(
                f"pipeline: {where} has no leading dim of layers",
                got=describe(x) if isinstance(x, torch.Tensor) else type(x).__name__,
                fix="stack the layers' parameters, or put it into shared",
            )
        sizes[where] = x.shape[0]
    if len(set(sizes.values())) != 1:
        raise InputError("pipeline: no one number of layers", got=str(sizes), expected="one leading dim in all leaves")
    return next(iter(sizes.values()))
