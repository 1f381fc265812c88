"""Functions of global values that compute on each rank's part: what their modules have in common.

In: a call by the user. Out: the running trace with a label for reports, and global values over ranks' parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import GradientError, SpecError, TraceError
from ptrainx.core.trace_context import TraceContext, current_trace, user_source
from ptrainx.mesh.placement import contiguous_strides

__all__ = [
    "Call",
    "check_no_empty_parts",
    "local_of",
    "on_parts",
    "open_call",
    "refuse_second_derivative",
    "strides_like",
    "wrap",
]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one of the functions: the running trace, how it is called in reports, and the user's line."""

    trace: TraceContext
    label: str
    source: str

    def marked(self, asked: bool, what: str = "") -> AbstractContextManager[None]:
        """Inside, communication belongs to this call."""
        reason = f"{self.label}{': ' if what else ''}{what}"
        return self.trace.marked(asked=asked, reason=reason, source=self.source)


def open_call(label: str, values: Sequence[Any]) -> Call | None:
    """The call, where its values are global ones; None where they are plain, or a rank's own.

    Raises:
        TraceError: a value is placed, and no step is traced.
    """
    trace, source = current_trace(), user_source()
    if trace is None and any(isinstance(x, DTensor) for x in values):
        raise TraceError(
            f"{label} of a placed value, outside of a step",
            fix="call it inside px.jit: px.jit(lambda x: ...)(x)",
            source=source,
        )
    return None if trace is None or trace.region is not None else Call(trace, label, source)


def local_of(x: torch.Tensor) -> torch.Tensor:
    """A rank's part of a value; of a plain one, the value."""
    return x._local_tensor if isinstance(x, DTensor) else x


@contextlib.contextmanager
def on_parts(call: Call | None) -> Iterator[None]:
    """Inside, operators are on ranks' parts, which user code's mode would take for global values."""
    with tc.DisableTorchFunction():
        with contextlib.nullcontext() if call is None else call.trace.marked(source=call.source):
            yield


def wrap(local: torch.Tensor, device_mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    """A global value over a rank's part of it."""
    spec = tc.make_spec(device_mesh, tuple(placements), torch.Size(shape), strides_like(local, shape), local.dtype)
    return tc.wrap_local(local, spec)


def check_no_empty_parts(call: Call, what: str, size: int, parts: Sequence[int]) -> None:
    """Refuses a dim that is cut so unevenly, axis by axis, that a rank would have nothing of it.

    Raises:
        SpecError: it is.
    """
    left = size
    for n in parts:
        chunk = -(-left // n)
        if chunk * (n - 1) >= left:
            raise SpecError(
                f"{call.label}: {what} of size {size} leaves a rank without any",
                got=f"{' x '.join(map(str, parts))} parts",
                expected="at least one on every rank",
                fix=f"pad it to {math.prod(parts) * -(-size // math.prod(parts))}",
                source=call.source,
            )
        left = chunk


def strides_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a global value whose parts are laid out as this one is."""
    if local.is_contiguous():
        return contiguous_strides(shape)
    order = sorted(range(local.ndim), key=lambda dim: -local.stride()[dim])
    dense = contiguous_strides([shape[dim] for dim in order])
    return tuple(dense[order.index(dim)] for dim in range(local.ndim))


def refuse_second_derivative(operands: Sequence[torch.Tensor], label: str, source: str) -> None:
    """Refuses to differentiate a gradient that is computed on ranks' parts.

    Args:
        operands: what the gradient is computed from.
        label: how the call is called.
        source: the user's line.

    Raises:
        GradientError: the gradient is being differentiated.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        raise GradientError(
            f"{label} is differentiated twice, and has one derivative only",
            fix="write it with torch.nn.functional where second derivatives are needed",
            source=source,
        )
