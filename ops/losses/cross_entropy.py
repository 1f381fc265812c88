"""`cross_entropy`: of logits whose vocabulary, rows or both are split."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ptrainx.core.avals import describe
from ptrainx.core.errors import InputError
from ptrainx.core.trace_context import current_trace, user_source
from ptrainx.mesh.per_shard import is_per_shard
from ptrainx.ops.collectives.linear import varying
from ptrainx.ops.collectives.relate import vary_over
from ptrainx.ops.constrain import constrain
from ptrainx.ops.losses.vocabulary import Settings, Vocabulary, wide
from ptrainx.ops.parts import Call, local_of, on_parts, open_call, refuse_second_derivative, wrap

__all__ = ["at", "cross_entropy", "place_rows", "reduced", "settings_of", "together"]

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross-entropy of logits whose last dim is the vocabulary; where it is split over ranks, it is not gathered.

    Each rank computes with its own part of the vocabulary, and ranks exchange three numbers a row: the largest logit,
    the sum of the exponentials, and the target's logit (a fourth with label smoothing). The backward sends nothing.

    Args:
        logits: [..., V], unnormalised log-probabilities; bfloat16 and float16 are computed in float32.
        targets: int64 [...], in 0 .. V - 1, or `ignore_index`.
        ignore_index: targets that count for nothing.
        label_smoothing: the weight, in [0, 1], of the uniform distribution in the targets.
        z_loss: adds this times the squared logarithm of the normaliser.
        reduction: "mean" over the targets that count, of all ranks; "sum"; "none".

    Returns:
        0-d, or [...]; in float32 at least.

    Raises:
        InputError: shapes that do not fit, a setting out of range.
        GradientError: a second derivative.

    Bytes: over each axis that splits the vocabulary, all-reduces of [rows] and of [2, rows] of the rank's own rows;
    with "mean", over each axis that splits the rows, the number of targets that count.

    In the body of a `px.shard_map` the loss is of the rank's own part, with its own vocabulary.

    Source: Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor(1.3863)
    """
    settings = settings_of("px.ops.cross_entropy", ignore_index, label_smoothing, z_loss, reduction)
    if logits.ndim < 1 or tuple(targets.shape) != tuple(logits.shape[:-1]):
        raise InputError(
            "px.ops.cross_entropy: targets and logits do not fit",
            got=f"logits {describe(logits)}, targets {describe(targets)}",
            expected="logits [..., V], targets [...]",
            source=settings.source,
        )
    call = open_call(settings.label, [logits, targets])
    if call is None:
        logits, targets = together(logits, targets)
    else:
        last = logits.ndim - 1
        value = call.trace.as_global(logits)
        kept = [p if isinstance(p, Shard) else Replicate() for p in value.placements]
        with call.marked(False, "logits"):
            logits = constrain(logits, value, kept, call.trace, f"{settings.label}: logits")
        rows = [Replicate() if p == Shard(last) else p for p in kept]
        targets = place_rows(targets, rows, call)
    losses = _Rows.apply(logits, targets, settings, call)
    return reduced(losses, targets, reduction, settings, call)


class _Rows(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any, settings: Settings, call: Call | None) -> Any:
        placements = logits.placements if isinstance(logits, DTensor) else ()
        part = Vocabulary(logits.shape[-1], placements, logits.ndim - 1, settings, call)
        ctx.part, ctx.rows = part, [Replicate() if i in part.dims else p for i, p in enumerate(placements)]
        ctx.save_for_backward(logits, targets)
        with on_parts(call):
            own, goal = local_of(logits), local_of(targets).reshape(-1)
            own = own.reshape(-1, own.shape[-1])
            losses, ctx.lse = part.losses(part.statistics(own, goal), goal)
            losses = losses.reshape(local_of(targets).shape)
        return wrap(losses, logits.device_mesh, ctx.rows, targets.shape) if isinstance(logits, DTensor) else losses

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        logits, targets = ctx.saved_tensors
        part = ctx.part
        refuse_second_derivative([grad, logits], part.settings.label, part.settings.source)
        grad = at(grad, ctx.rows, part.call)
        with on_parts(part.call):
            own = local_of(logits)
            flat = own.reshape(-1, own.shape[-1])
            out = part.gradient(flat, local_of(targets).reshape(-1), ctx.lse, local_of(grad).reshape(-1))
            out = out.reshape(own.shape)
        if isinstance(logits, DTensor):
            out = wrap(out, logits.device_mesh, logits.placements, logits.shape)
        return out, None, None, None


def at(grad: Any, placements: list[Any], call: Call | None) -> Any:
    """The cotangent of rows at the rows' placements."""
    if call is None or list(grad.placements) == placements:
        return grad
    with call.marked(True, "gradient of the rows"):
        return grad.redistribute(grad.device_mesh, placements)


def settings_of(label: str, ignore_index: int, label_smoothing: float, z_loss: float, reduction: str) -> Settings:
    """The settings, checked.

    Raises:
        InputError: one is out of range.
    """
    source = user_source()
    problems = []
    if not 0 <= label_smoothing <= 1:
        problems.append(f"label_smoothing={label_smoothing}, not in [0, 1]")
    if z_loss < 0:
        problems.append(f"z_loss={z_loss}, less than 0")
    if reduction not in REDUCTIONS:
        problems.append(f"no reduction={reduction!r}")
    if problems:
        raise InputError(
            f"{label}: {'; '.join(problems)}",
            expected=f"a label_smoothing in [0, 1], a z_loss of at least 0, reduction one of {', '.join(REDUCTIONS)}",
            source=source,
        )
    return Settings(label_smoothing, ignore_index, z_loss, label, source)


def place_rows(value: Any, placements: list[Any], call: Call) -> Any:
    """An integer value for each row, where the rows are."""
    value = call.trace.as_global(value)
    if list(value.placements) == placements:
        return value
    with call.marked(False, "targets"):
        return value.redistribute(value.device_mesh, placements)


def together(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operands of the body of a `shard_map`, each varying along every axis along which one of them does.

    So the gradient of one that is the same on every rank is summed over the ranks. Plain values stay as they are.
    """
    trace = current_trace()
    if trace is None:
        return values
    values = tuple(trace.as_global(x) for x in values)
    if trace.region is None or not any(is_per_shard(x) for x in values):
        return values
    axes = vary_over(trace.region, list(values))
    return tuple(varying(x, trace.region, axes, user_source()) for x in values)


def reduced(losses: Any, targets: Any, reduction: str, settings: Settings, call: Call | None) -> Any:
    """The rows' losses, reduced; a mean is over the targets of all ranks that count."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    counted: Any = wide((targets != settings.ignore_index).sum().to(losses.dtype))
    if call is not None and any(p.is_partial() for p in counted.placements):
        with call.marked(True, "targets that count"):
            placements = [Replicate() if isinstance(p, Partial) else p for p in counted.placements]
            counted = counted.redistribute(counted.device_mesh, placements)
    return total / counted
