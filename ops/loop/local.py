"""A loop over local tensors, of which no gradient is taken: for operations that bring their own.

In: one step as a function of local tensors. Out: in a graph one loop operator, elsewhere the steps in turn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import TraceContext
from ptrainx.ops.loop.body import trace_body
from ptrainx.ops.loop.operator import LoopForm, trace_loop
from ptrainx.ops.loop.partition import separate_outputs

__all__ = ["local_loop"]

T = torch.Tensor


def local_loop(
    step: Callable[[list[T], list[T], T], list[T]],
    carry: list[T],
    constants: list[T],
    steps: range,
    trace: TraceContext,
) -> list[T]:
    """Runs `carry = step(carry, constants, i)` for each i, a 0-d tensor; the carry keeps its shapes and dtypes.

    Args:
        step: uses no other tensor than those it is given and those it makes.
        carry, constants: local tensors.
        steps: the numbers of the steps.
        trace: the running one.

    Returns:
        the last carry.
    """
    if tc.proxy_mode() is None or len(steps) < 2:
        for i in steps:
            carry = step(carry, constants, torch.tensor(i, device=carry[0].device))
        return carry
    carry = [x.contiguous() for x in carry]
    numbers = torch.arange(steps.start, steps.stop, steps.step, device=carry[0].device)
    n = len(carry)

    def body(*local: T) -> list[T]:
        now, i, constants = list(local[:n]), local[n], list(local[n + 1 :])
        return [x.contiguous() for x in step(now, constants, i)]

    with tc.no_proxy(), torch.no_grad():
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in carry]
        fakes.append(torch.empty((), dtype=torch.int64, device=carry[0].device))
        fakes += [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in constants]
    module = trace.clean_body(trace_body(body, fakes))
    separate_outputs(module, n)
    return list(trace_loop(module, LoopForm(n, 1, len(steps), False), *carry, numbers, *constants))
