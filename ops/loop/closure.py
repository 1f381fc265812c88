"""What a loop's body uses without being given it: values of the step around the loop.

The body is traced as a graph of its own, in which such a value must not appear. A `Closure` stands in the running
trace while the body's Python runs and gives a replica of each foreign value: a leaf of the body's own differentiation,
which becomes an operand of the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import TraceContext

__all__ = ["Closure"]


class Closure:
    """The foreign values of one body.

    Args:
        trace: the running trace.
        values: foreign values that are known already.
        replicas: what stands for them inside.

    Attributes:
        values: the foreign values met so far, in order.
    """

    def __init__(self, trace: TraceContext, values: list[Any], replicas: list[Any]):
        self.trace, self.values = trace, list(values)
        self.tracer: Any = None
        self._replicas = {id(value): replica for value, replica in zip(values, replicas)}
        self._own = {id(replica._local_tensor): replica for replica in replicas}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, which is inside the body's own trace, foreign values are replaced."""
        self.tracer = tc.proxy_tracer()
        self.trace.closures.append(self)
        try:
            yield
        finally:
            self.trace.closures.pop()

    def owns(self, value: Any) -> bool:
        """Whether a value was made in the body."""
        local = value._local_tensor
        return id(local) in self._own or tc.is_traced_by(local, self.tracer)

    def replica(self, value: Any) -> Any:
        """What stands for a foreign value."""
        found = self._replicas.get(id(value))
        if found is None:
            local = value._local_tensor
            with tc.no_proxy(), tc.DisableTorchFunction():
                twin = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=local.device)
            wanted = value.requires_grad and torch.is_grad_enabled()
            found = tc.wrap_local(twin, value._spec, requires_grad=wanted)
            self.values.append(value)
            self._replicas[id(value)], self._own[id(twin)] = found, found
        return found
