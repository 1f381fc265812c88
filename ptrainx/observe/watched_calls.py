"""What every call of a torch function gives, while a function runs: on one device, and inside a trace alike.

In: user code that runs inside `WatchedCalls`. Out: its calls in order, each with copies of the values that it gave, and
copies of the gradients of those values where something differentiates. Inside a trace the copies are global values like
any other, so they can be returned from the step: `invariance` compares them with those of one device.

Calls inside a loop's body (`px.scan`) are left out: a trace runs a body once for all steps.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import current_trace, user_source

__all__ = ["Watched", "WatchedCalls"]


@dataclasses.dataclass(frozen=True)
class Watched:
    """A value, or the gradient of one.

    Attributes:
        name: of the function that gave it, or of an argument.
        source: `file:line` of the call.
        part: which of the results it is, for a function with several.
        backward: whether it is the gradient of the value.
        value: a copy.
        readers: (name, source) of the calls that took the value, for a gradient: the backward of one of them made it.
    """

    name: str
    source: str
    part: int
    backward: bool
    value: torch.Tensor
    readers: Sequence[tuple[str, str]] = ()

    @property
    def place(self) -> tuple[str, str, int, bool]:
        """What the same value has in common in two runs of one function."""
        return self.name, self.source, self.part, self.backward


class WatchedCalls(TorchFunctionMode):
    """Inside, every torch function that user code calls leaves copies of its results.

    Attributes:
        watched: them, in the order in which they were made.
        differentiates: whether the code differentiates something itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[Watched] = []
        self.differentiates = False
        self._readers: dict[int, list[tuple[str, str]]] = {}
        self._alive: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "__name__", func))
        if name == "__get__":
            return func(*args, **(kwargs or {}))
        self.differentiates |= func is torch.autograd.grad or func is torch.Tensor.backward
        trace, source = current_trace(), user_source(2)
        out = func(*args, **(kwargs or {}))
        if func is torch.autograd.grad or (trace is not None and trace.closures):
            return out
        arguments: Any = (args, kwargs or {})
        with tc.DisableTorchFunction():
            for leaf in optree.tree_leaves(arguments):
                if id(leaf) in self._readers and (name, source) not in self._readers[id(leaf)]:
                    self._readers[id(leaf)].append((name, source))
            # What gives nothing writes into its first operand (`x[0] = 1`).
            for part, value in enumerate(_tensors(args[0] if out is None and args else out)):
                self._watch(name, source, part, value)
        return out

    def argument(self, name: str, value: torch.Tensor) -> None:
        """Watches the gradient of an argument."""
        self._follow(name, "", 0, value)

    def _watch(self, name: str, source: str, part: int, value: torch.Tensor) -> None:
        self.watched.append(Watched(name, source, part, False, _copy(value)))
        self._follow(name, source, part, value)

    def _follow(self, name: str, source: str, part: int, value: torch.Tensor) -> None:
        """Leaves a copy of the value's gradient, once there is one."""
        if not value.requires_grad or id(value) in self._readers:
            return
        self._alive.append(value)
        readers = self._readers[id(value)] = []

        def seen(gradient: torch.Tensor) -> None:
            with tc.DisableTorchFunction():
                self.watched.append(Watched(name, source, part, True, _copy(gradient), readers))

        value.register_hook(seen)

    def matched(self, others: Sequence[Watched]) -> list[tuple[int, Watched]]:
        """(index of a value of this run, the same value of another run), where both runs made it equally often."""
        ours, theirs = Counter(w.place for w in self.watched), Counter(w.place for w in others)
        queues: dict[Any, list[Watched]] = {}
        for other in reversed(others):
            queues.setdefault(other.place, []).append(other)
        alike = {place for place, n in ours.items() if theirs[place] == n}
        return [(i, queues[w.place].pop()) for i, w in enumerate(self.watched) if w.place in alike]


def _tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, (tuple, list)) and not isinstance(out, torch.Size):
        several: Any = out
        return [leaf for leaf in optree.tree_leaves(several) if isinstance(leaf, torch.Tensor)]
    return []


def _copy(value: torch.Tensor) -> torch.Tensor:
    """A copy that later writes into the value do not reach. DTensor's own clone would pay sums that are owed."""
    with torch.no_grad():
        if not isinstance(value, DTensor):
            return value.detach().clone()
        local: Any = value.detach()._local_tensor  # type: ignore[attr-defined]
        return tc.wrap_local(local.clone(), value._spec)
