"""An operator that prints when the step runs, and its public face `px.debug.print`."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import InputError
from ptrainx.core.trace_context import TraceContext, current_trace, refuse_aside, user_source

__all__ = ["debug_print", "held_prints", "release"]

_held: contextvars.ContextVar[list[Callable[[], None]] | None] = contextvars.ContextVar("ptrainx_prints", default=None)

_library = torch.library.Library("ptrainx", "FRAGMENT")
_library.define("debug_print(str template, str[] names, Tensor[] values, int rank) -> ()")


def _print_now(template: str, names: list[str], values: list[torch.Tensor], rank: int = 0) -> None:
    if rank != 0:
        return
    shown = {n: (v.item() if v.ndim == 0 else v) for n, v in zip(names, values)}
    positional = [shown.pop(n) for n in names if n.startswith("_")]
    print(template.format(*positional, **shown), file=sys.stdout, flush=True)


_library.impl("debug_print", _print_now, "CompositeExplicitAutograd")
_library.impl("debug_print", lambda template, names, values, rank: None, "Meta")


def debug_print(template: str, *args: Any, **kwargs: Any) -> None:
    """Prints values when the step runs, on the first rank, in program order.

    Args:
        template: as for `str.format`: `"loss {loss:.3f}"`, `"{} and {}"`.
        args: tensors or numbers for positional fields. A sharded value is gathered for it.
        kwargs: for named fields.

    Raises:
        InputError: the template does not fit its arguments.
    """
    refuse_aside("px.debug.print", "print the batch, before or after px.vmap")
    named = {**{f"_{i}": a for i, a in enumerate(args)}, **kwargs}
    try:
        template.format(*[0.0] * len(args), **dict.fromkeys(kwargs, 0.0))
    except (IndexError, KeyError) as error:
        raise InputError(
            f"px.debug.print: the template {template!r} has a field without a value",
            got=f"{len(args)} values and names {sorted(kwargs)}",
            fix="pass a value for each {} and a name for each {name}; write {{ and }} for braces",
        ) from error
    except ValueError:
        pass  # a format that fits a tensor's value, not 0.0
    held = _held.get()
    if held is None:
        _emit(template, named, current_trace())
    else:
        held.append(functools.partial(_emit, template, named, current_trace(), user_source()))


def _emit(template: str, named: dict[str, Any], trace: TraceContext | None, source: str | None = None) -> None:
    if trace is None:
        if not any(tc.is_fake(value) for value in named.values()):
            _print_now(template, list(named), [_whole(value) for value in named.values()])
        return
    values: list[Any]
    with trace.marked(asked=True, reason="px.debug.print", source=source or trace.origin.source):
        values = [_replicated(trace.as_global(v)) for v in named.values()]
    # Every rank holds the operator, so that every rank takes part in what it gathers; one prints.
    with tc.DisableTorchFunction():
        local = [_one_rank(v.detach()._local_tensor) for v in values]
        torch.ops.ptrainx.debug_print(template, list(named), local, trace.rank)


@contextlib.contextmanager
def held_prints() -> Iterator[list[Callable[[], None]]]:
    """Inside, prints are kept in the list that this gives, to be called later, or not."""
    held: list[Callable[[], None]] = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)


def release(held: list[Callable[[], None]]) -> None:
    """Prints what was held, or hands it to whoever holds prints now."""
    outer = _held.get()
    if outer is not None:
        outer.extend(held)
        return
    for emit in held:
        emit()


def _one_rank(local: torch.Tensor) -> torch.Tensor:
    # Run eagerly, a simulated mesh holds all ranks' equal values.
    return local._local_tensors[0] if isinstance(local, tc.LocalTensor) else local


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)


def _replicated(value: DTensor) -> DTensor:
    return value.redistribute(value.device_mesh, (Replicate(),) * value.device_mesh.ndim)
