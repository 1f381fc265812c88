"""`chunked_cross_entropy`: the last matrix product and the loss of it in one, a few rows at a time.

The forward keeps one number a row; the backward computes the logits of each chunk once more, and with them the
gradients. So there are never more logits than those of one chunk, and of the rank's part of the vocabulary.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError
from ptrainx.core.remat_policies import nothing_saveable
from ptrainx.core.trace_context import current_trace
from ptrainx.ops.constrain import constrain
from ptrainx.ops.losses.cross_entropy import at, place_rows, reduced, settings_of, together
from ptrainx.ops.losses.vocabulary import Settings, Vocabulary, wide
from ptrainx.ops.parts import Call, local_of, on_parts, open_call, refuse_second_derivative, wrap

__all__ = ["chunked_cross_entropy"]


def chunked_cross_entropy(
    x: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk: int = 1024,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """`cross_entropy(x @ head, targets)` without ever holding all logits.

    The backward computes the logits again, chunk by chunk: a third more work in this layer, for memory of
    `chunk * V / n` logits instead of `rows * V / n` and their gradient, on n ranks that split the vocabulary.

    Args:
        x: [..., D], what the last layer is given. Split over the vocabulary's axis (along the sequence, say), it is
            gathered, and its gradient is scattered.
        head: [D, V]; its columns may be split. Split otherwise, it is gathered over those axes.
        targets: int64 [...], in 0 .. V - 1, or `ignore_index`.
        chunk: how many of a rank's rows at a time. Each chunk is some ten operators in the step's graph.
        ignore_index, label_smoothing, z_loss, reduction: as for `cross_entropy`.

    Returns:
        0-d, or [...]; in float32 at least. The head's gradient is summed over chunks in float32 at least.

    Raises:
        InputError: shapes that do not fit, a setting out of range.
        GradientError: a second derivative.

    Bytes: as `cross_entropy`; and over the axes that split the vocabulary, the sum of x's gradient.

    Source: the recomputation is that of Chen et al. 2016, https://arxiv.org/abs/1604.06174; of losses in chunks,
    Hsu et al. 2024, "Liger Kernel", https://arxiv.org/abs/2410.10989.

    >>> x, head, targets = torch.ones(4, 2), torch.zeros(2, 8), torch.tensor([0, 1, 2, 3])
    >>> chunked_cross_entropy(x, head, targets, chunk=2)
    tensor(2.0794)
    """
    label = "px.ops.chunked_cross_entropy"
    settings = settings_of(label, ignore_index, label_smoothing, z_loss, reduction)
    fits = head.ndim == 2 and x.ndim >= 1 and x.shape[-1] == head.shape[0]
    if not fits or tuple(targets.shape) != tuple(x.shape[:-1]) or chunk < 1:
        raise InputError(
            f"{label}: the operands do not fit",
            got=f"x {describe(x)}, head {describe(head)}, targets {describe(targets)}, chunk={chunk}",
            expected="x [..., D], head [D, V], targets [...], chunk >= 1",
            source=settings.source,
        )
    call = open_call(label, [x, head, targets])
    if call is None:
        x, head, targets = together(x, head, targets)
    else:
        x, head, targets = _placed(x, head, targets, call)
    losses = _Rows.apply(x, head, targets, chunk, settings, call)
    return reduced(losses, targets, reduction, settings, call)


def _placed(x: Any, head: Any, targets: Any, call: Call) -> tuple[Any, Any, Any]:
    """The operands where each rank can do its part: rows split by some axes, the vocabulary by others."""
    hidden, weights = call.trace.as_global(x), call.trace.as_global(head)
    columns = [p if p == Shard(1) else Replicate() for p in weights.placements]
    rows = [
        p if isinstance(p, Shard) and p.dim < x.ndim - 1 and split != Shard(1) else Replicate()
        for p, split in zip(hidden.placements, columns)
    ]
    with call.marked(True, "hidden values"):
        x = constrain(x, hidden, rows, call.trace, f"{call.label}: hidden values")
    if columns == list(weights.placements):
        head = weights  # and goes on owing the sums of its gradient
    else:
        with call.marked(False, "head"):
            head = constrain(head, weights, columns, call.trace, f"{call.label}: head")
    return x, head, place_rows(targets, rows, call)


class _Rows(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(ctx: Any, x: Any, head: Any, targets: Any, chunk: int, settings: Settings, call: Call | None) -> Any:
        placements = head.placements if isinstance(head, DTensor) else ()
        part = Vocabulary(head.shape[1], placements, 1, settings, call)
        ctx.part, ctx.chunk = part, chunk
        ctx.save_for_backward(x, head, targets)
        with on_parts(call):
            weights, goal = local_of(head), local_of(targets).reshape(-1)
            found, ctx.logits = [], []
            for rows, own in zip(_rows_of(x).split(chunk), goal.split(chunk)):
                with _not_kept():
                    logits = rows @ weights
                    found.append(part.statistics(logits, own))
                ctx.logits.append(logits if _in_a_graph() else None)
            losses, ctx.lse = part.losses(torch.cat(found, 1), goal)
            losses = losses.reshape(local_of(targets).shape)
        return wrap(losses, x.device_mesh, x.placements, targets.shape) if isinstance(x, DTensor) else losses

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, head, targets = ctx.saved_tensors
        part, chunk = ctx.part, ctx.chunk
        refuse_second_derivative([grad, x, head], part.settings.label, part.settings.source)
        grad = at(grad, list(x.placements), part.call) if isinstance(x, DTensor) else grad
        with on_parts(part.call):
            weights = local_of(head)
            of_head = torch.zeros_like(weights, dtype=wide(weights[:0]).dtype)
            of_x = []
            columns = (local_of(targets).reshape(-1), ctx.lse, local_of(grad).reshape(-1))
            for rows, logits, *own in zip(_rows_of(x).split(chunk), ctx.logits, *(c.split(chunk) for c in columns)):
                of_logits = part.gradient(rows @ weights if logits is None else logits, *own)
                of_x.append(of_logits @ weights.t())
                of_head = of_head + rows.t() @ of_logits
            out_x, out_head = torch.cat(of_x).reshape(local_of(x).shape), of_head.to(weights.dtype)
        if isinstance(x, DTensor):
            split_rows = [isinstance(p, Shard) for p in x.placements]
            owed_x = [Partial("sum") if i in part.dims else p for i, p in enumerate(x.placements)]
            owed_head = [Partial("sum") if split else p for split, p in zip(split_rows, head.placements)]
            out_x = wrap(out_x, x.device_mesh, owed_x, x.shape)
            out_head = wrap(out_head, head.device_mesh, owed_head, head.shape)
        return out_x, out_head, None, None, None, None


def _in_a_graph() -> bool:
    return current_trace() is not None and tc.proxy_mode() is not None


def _not_kept() -> AbstractContextManager[None]:
    """Inside, what is computed is computed again where the backward reads it; in a graph, a pass does that."""
    trace = current_trace()
    if trace is None or not _in_a_graph():
        return contextlib.nullcontext()
    return trace.rematerialized(nothing_saveable)


def _rows_of(x: Any) -> torch.Tensor:
    own = local_of(x)
    return own.reshape(-1, own.shape[-1])
