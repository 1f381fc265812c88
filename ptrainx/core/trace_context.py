"""What is being traced now, for the functions that behave differently inside a step.

A `TraceContext` is active while a jitted function's Python runs. Transforms announce phases to it, `reshard` and
gradient reductions mark the communication that the user asked for, and every node of the graph gets the `Origin` that
was current when it was made.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import einops
import optree
import torch

from ptrainx.core.errors import TraceError
from ptrainx.core.remat_policies import Policy

__all__ = [
    "Aside",
    "Origin",
    "Remat",
    "TraceContext",
    "called_by_library",
    "current_trace",
    "defined_at",
    "no_open_grads",
    "one_more_grad",
    "open_grads",
    "refuse_aside",
    "running_aside",
    "user_source",
]

_HERE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_ROOT = os.path.dirname(_HERE)
_LIBRARY = (
    _HERE + os.sep,
    os.path.join(_ROOT, "mesh") + os.sep,
    os.path.join(_ROOT, "ops") + os.sep,
    *(os.path.dirname(os.path.realpath(str(module.__file__))) + os.sep for module in (torch, optree, einops)),
    *(os.path.realpath(str(module.__file__)) for module in (contextlib, functools)),
)
"""Code that is not the user's: lines in it explain nothing."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a node of the graph comes from.

    Attributes:
        source: `file:line` of the user's code.
        phase: "forward", "backward" or "update".
        asked: of communication: whether the user asked for it (a reshard, an output spec, a gradient's reduction) or
            DTensor implied it, to bring an operator's operands together.
        reason: why there is communication here.
        layer: the path of the parameter that it serves, or the loop that it runs in.
        role: what a value is to the step: "parameter", "gradient", "activation", or "" if nobody has said.
        remat: the call of a `remat`ed function that it belongs to, counted from 1; 0 outside.
        name: what `checkpoint_name` calls it.
        cut: the mesh axis along which a rank takes its own part here of a value that every rank holds; "" elsewhere.
        call: the call of a torch function that it belongs to, counted from 1: what the backward of an operation has in
            common with its forward.
    """

    source: str = "?"
    phase: str = "forward"
    asked: bool = False
    reason: str = ""
    layer: str = ""
    role: str = ""
    remat: int = 0
    name: str = ""
    cut: str = ""
    call: int = 0


@dataclasses.dataclass(frozen=True)
class Remat:
    """One call of a `remat`ed function.

    Attributes:
        policy: what of it is saved.
        parent: the call that it is part of, 0 for none.
    """

    policy: Policy
    parent: int


_open_grads: contextvars.ContextVar[int] = contextvars.ContextVar("ptrainx_open_grads", default=0)


def open_grads() -> int:
    """How many `grad`s are differentiating what runs now, one inside the other."""
    return _open_grads.get()


@contextlib.contextmanager
def one_more_grad() -> Iterator[None]:
    """Inside, one more `grad` is differentiating."""
    token = _open_grads.set(_open_grads.get() + 1)
    try:
        yield
    finally:
        _open_grads.reset(token)


@contextlib.contextmanager
def no_open_grads() -> Iterator[None]:
    """Inside, no `grad` is differentiating: for a program of its own that one of them calls."""
    token = _open_grads.set(0)
    try:
        yield
    finally:
        _open_grads.reset(token)


_current: contextvars.ContextVar[TraceContext | None] = contextvars.ContextVar("ptrainx_trace", default=None)


class TraceContext:
    """The state of one trace.

    Attributes:
        mesh: the mesh that the step is jitted for.
        view: the torch DeviceMesh of the rank that is traced; the one that DTensors inside the trace live on.
        rank: that rank.
        origin: what the next node's origin will be.
        as_global: makes a global value of any leaf: a plain tensor, a number, a captured value.
        closures: the bodies of loops that are being traced, outermost first.
        remats: the calls of `remat`ed functions so far, by number.
        region: the body of a `shard_map` that is running, None outside of any.
        joint_groups: name of a group over several axes -> `data*model`, for those that the trace has asked for.
        clean_body: tidies the graph of a loop's body, without writes in it afterwards.
    """

    def __init__(self, mesh: Any, view: Any, rank: int, name: str):
        self.mesh, self.view, self.rank, self.name = mesh, view, rank, name
        self.as_global: Callable[[Any], Any] = lambda value: value
        self.origin = Origin()
        self.closures: list[Any] = []
        self.remats: dict[int, Remat] = {}
        self.region: Any = None
        self.joint_groups: dict[str, str] = {}
        self.clean_body: Callable[[Any], Any] = lambda module: module
        self._calls = 0

    def inside(self, value: Any) -> Any:
        """A global value as the innermost body may use it: one from around it becomes an operand of the loop."""
        return self._inside(value, len(self.closures) - 1)

    def _inside(self, value: Any, level: int) -> Any:
        if level < 0 or self.closures[level].owns(value):
            return value
        return self.closures[level].replica(self._inside(value, level - 1))

    @contextlib.contextmanager
    def active(self) -> Iterator[TraceContext]:
        """Makes this the current trace."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def marked(self, **changes: Any) -> Iterator[None]:
        """Inside, nodes have these origin fields."""
        before = self.origin
        self.set_origin(dataclasses.replace(before, **changes))
        try:
            yield
        finally:
            self.set_origin(before)

    @contextlib.contextmanager
    def rematerialized(self, policy: Policy) -> Iterator[None]:
        """Inside, nodes belong to a new call of a `remat`ed function."""
        call = len(self.remats) + 1
        self.remats[call] = Remat(policy, self.origin.remat)
        with self.marked(remat=call):
            yield

    def set_origin(self, origin: Origin) -> None:
        """Gives the nodes to come this origin."""
        self.origin = origin
        torch.fx.traceback.get_current_meta()["custom"] = {"origin": origin}

    def at_source(self, source: str) -> None:
        """The user's line that is running."""
        if source != self.origin.source:
            self.set_origin(dataclasses.replace(self.origin, source=source))

    def at_call(self, source: str, call: int | None = None) -> None:
        """A call of a torch function on the user's line begins; one that `call` counts comes back, backwards."""
        if call is None:
            self._calls += 1
            call = self._calls
        self.set_origin(dataclasses.replace(self.origin, source=source, call=call))


@dataclasses.dataclass(eq=False)
class Aside:
    """A function that a transform runs by itself, on fake tensors of its own: to the function no trace is running.

    Attributes:
        transform: that does so, as users call it.
    """

    transform: str

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, it runs."""
        trace, aside = _current.set(None), _aside.set(self)
        try:
            yield
        finally:
            _current.reset(trace)
            _aside.reset(aside)


_aside: contextvars.ContextVar[Aside | None] = contextvars.ContextVar("ptrainx_aside", default=None)


def running_aside() -> Aside | None:
    """The innermost function that runs by itself, or None."""
    return _aside.get()


def refuse_aside(name: str, fix: str) -> None:
    """Raises TraceError if a function that runs by itself calls what it can't."""
    aside = _aside.get()
    if aside is not None:
        raise TraceError(f"{name} inside {aside.transform}", source=user_source(2), fix=fix)


def current_trace() -> TraceContext | None:
    """The trace that is running, or None outside a jitted step."""
    return _current.get()


def user_source(depth: int = 1) -> str:
    """`file:line` of the innermost frame that is neither this library's nor torch's."""
    frame: Any = sys._getframe(depth)
    while frame is not None:
        if not called_by_library(frame):
            return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def defined_at(fn: Any) -> str | None:
    """`file:line` of a function's definition, if it has one."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return None if code is None else f"{_short(code.co_filename)}:{code.co_firstlineno}"


@functools.cache
def _is_library(filename: str) -> bool:
    return os.path.realpath(filename).startswith(_LIBRARY) or filename == "<string>"


def called_by_library(frame: Any) -> bool:
    """Whether a frame is this library's or torch's code."""
    return _is_library(frame.f_code.co_filename)


def _short(name: str) -> str:
    cell = _notebook_cell(name)
    if cell is not None:
        return cell
    relative = os.path.relpath(name) if os.path.isabs(name) else name
    return relative if len(relative) < len(name) and not relative.startswith("..") else name


def _notebook_cell(name: str) -> str | None:
    """`In[7]` for the file that a notebook keeps a cell in."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    formatted = getattr(getattr(shell, "compile", None), "format_code_name", lambda name: None)(name)
    return str(formatted[1]) if formatted else None
