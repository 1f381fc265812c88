"""Rules for the operators that run underneath user code while a step is traced, or run eagerly.

`LocalRules` sees every ATen operator, first on global values, then on the local tensors inside. It refuses writes into
arguments, randomness without a key, reads of values and collectives that user code calls itself; it finds a way for
operators that DTensor refuses, and makes views safe on local strides. `guard_methods` does the like for the methods of
DTensor that are no operators.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptrainx.compile.convolution import CONVOLUTIONS, convolve
from ptrainx.compile.fallback import run_somewhere
from ptrainx.compile.lookups import LOOKUPS, look_up
from ptrainx.compile.per_shard import per_shard_mesh_of, recast, run_per_shard
from ptrainx.compile.reduced_dims import with_all_dims
from ptrainx.compile.shapes_in_place import NEW_SHAPE, change_shape
from ptrainx.core import torch_compat as tc
from ptrainx.core.avals import describe
from ptrainx.core.errors import HostReadError, MutationError, RandomnessError, TraceError
from ptrainx.core.torch_compat_cuts import announce_cuts
from ptrainx.core.torch_compat_partial import make_addends_exact
from ptrainx.core.torch_compat_strided import make_strided_shards_traceable
from ptrainx.core.torch_compat_uneven import pad_alike
from ptrainx.core.trace_context import TraceContext, called_by_library, current_trace, user_source
from ptrainx.mesh.per_shard import is_per_shard
from ptrainx.mesh.placement import replicate

__all__ = ["READ_FIX", "LocalRules", "guard_methods", "refuse_randomness", "storages"]

READ_FIX = "return the value from the step and read it outside, or print it with px.debug.print"
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class LocalRules(TorchDispatchMode):
    """The dispatch mode of a trace, and of the eager backend.

    Args:
        trace: the running trace.
        frozen: identity of a storage -> how the argument or captured value is called that lives there, or None.
        readable: whether values can be read on the host: in the eager backend they are there.
    """

    def __init__(self, trace: TraceContext, frozen: Callable[[int], str | None], readable: bool = False):
        super().__init__()
        self.trace, self.frozen, self.readable = trace, frozen, readable
        self._passing = False
        # Storages of views that could not stay views, with the tensors that keep them alive.
        self._copies: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        placed = any(issubclass(t, DTensor) for t in types)
        if placed and self._passing:
            self._passing = False
            return NotImplemented
        traits = _traits(func)
        if traits:
            self._refuse(func, traits, placed, args, kwargs)
        if placed and func in NEW_SHAPE:
            with self:
                return change_shape(func, args, kwargs)
        if placed and (mesh := per_shard_mesh_of(args, kwargs)) is not None:
            with self:
                return run_per_shard(func, args, kwargs, mesh, self.trace)
        if placed and func in CONVOLUTIONS:
            with self:
                return convolve(func, args, self.trace)
        if placed and func in LOOKUPS:
            with self:
                return look_up(args[0], args[1], self.trace)
        if placed:
            args, kwargs = with_all_dims(func, args, self._settled(func, kwargs))
            out = run_somewhere(self._pass_on, func, args, kwargs, self.trace)
            if "view" in traits:
                self._note_copies(args[0], out)
            return out
        if func is torch.ops.aten.view.default and not _viewable(args[0], args[1]):
            return torch.ops.aten.view.default(args[0].contiguous(), args[1])
        return func(*args, **kwargs)

    def _settled(self, func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments as DTensor needs them: it moves operands, but not those that are passed by keyword."""
        moving = {k: x for k, x in kwargs.items() if isinstance(x, DTensor) and k not in ("attn_mask", "out")}
        if all(p.is_replicate() for x in moving.values() for p in x.placements):
            return kwargs
        with self, self.trace.marked(asked=False, reason=f"operands of {func}"):
            return {**kwargs, **{k: replicate(x) for k, x in moving.items()}}

    def _pass_on(self, func: Any, args: Any, kwargs: Any) -> Any:
        """DTensor's dispatch, with these rules for the local operators inside."""
        self._passing = True
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            self._passing = False

    def _refuse(self, func: Any, traits: frozenset[str], placed: bool, args: Any, kwargs: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        shapes = "shapes" in traits and (name != "index" or any(_selects(i) for i in args[1]))
        if not self.readable and ("reads" in traits or shapes):
            what = "reads a value on the host" if "reads" in traits else "gives a shape that depends on values"
            raise HostReadError(
                f"{self.trace.name} calls {name}, which {what}",
                source=self.trace.origin.source,
                fix=f"{READ_FIX}; for shapes, mask with torch.where instead of selecting",
            )
        if "random" in traits and _argument(func, args, kwargs, "dropout_p", 1.0) > 0:
            refuse_randomness(self.trace, name)
        if placed and "collective" in traits:
            raise TraceError(
                f"{self.trace.name} calls a collective: {func._schema.name}",
                source=self.trace.origin.source,
                fix="inside jit values are global, and communication follows from placements (px.reshard)",
            )
        if "writes" in traits:
            self._check_write(func, args, kwargs)

    def _note_copies(self, base: Any, out: Any) -> None:
        """Remembers what a view of a global value gave as a copy: its placement had to change."""
        own = set(storages(base))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            found = storages(value)
            if own.isdisjoint(found) or any(s in self._copies for s in own):
                self._copies.update(dict.fromkeys(found, value))

    def _frozen(self, storage: int) -> str | None:
        """How a value is called that may not be written into: an argument of the step or of a running body."""
        region = self.trace.region
        return self.frozen(storage) or (None if region is None else region.given.get(storage))

    def _check_write(self, func: Any, args: Any, kwargs: Any) -> None:
        for i, formal in enumerate(func._schema.arguments):
            if formal.alias_info is None or not formal.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(formal.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if any(s in self._copies for s in storages(tensor)):
                    raise MutationError(
                        f"{self.trace.name} writes in place into a view of a sharded dim, and the view is a copy",
                        got=f"{func._schema.name.removeprefix('aten::')} on {describe(tensor)}",
                        source=self.trace.origin.source,
                        fix="assign (x[i] = y), make a new value (torch.where, torch.cat), or px.reshard the dim first",
                    )
                called = next((c for s in storages(tensor) if (c := self._frozen(s)) is not None), None)
                if called is not None:
                    raise MutationError(
                        f"{self.trace.name} writes in place into {called}",
                        got=f"{func._schema.name.removeprefix('aten::')} on {describe(tensor)}",
                        source=self.trace.origin.source,
                        fix="make a new value (x = x + 1 instead of x += 1), or write into a clone()",
                    )


def refuse_randomness(trace: TraceContext, name: str) -> None:
    """Raises the error for a draw without a key."""
    raise RandomnessError(
        f"{trace.name} draws random numbers without a key: {name}",
        source=trace.origin.source,
        fix="pass a key and draw with px.random: px.random.normal(key, shape), px.random.dropout(key, x, rate)",
    )


@functools.cache
def _traits(func: Any) -> frozenset[str]:
    """What of an operator the rules are about."""
    tags = func.tags
    reads = torch.Tag.data_dependent_output in tags
    checks = {
        "reads": reads or func._schema.name in ("aten::_local_scalar_dense", "aten::equal"),
        "shapes": torch.Tag.dynamic_output_shape in tags,
        "random": torch.Tag.nondeterministic_seeded in tags,
        "collective": func.namespace in _COLLECTIVES,
        "writes": func._schema.is_mutable,
        "view": func.is_view,
    }
    return frozenset(name for name, holds in checks.items() if holds)


def _selects(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _argument(func: Any, args: Any, kwargs: Any, name: str, absent: Any) -> Any:
    for i, formal in enumerate(func._schema.arguments):
        if formal.name == name:
            return args[i] if i < len(args) else kwargs.get(name, formal.default_value)
    return absent


def storages(value: Any) -> list[int]:
    """The storages of a tensor's local parts."""
    if isinstance(value, DTensor):
        value = value._local_tensor
    if isinstance(value, tc.LocalTensor):
        return [tc.storage_id(part) for part in value._local_tensors.values()]
    return [tc.storage_id(value)] if isinstance(value, torch.Tensor) else []


def _viewable(value: torch.Tensor, size: Any) -> bool:
    try:
        with tc.no_dispatch():
            torch.empty_strided(value.shape, value.stride(), device="meta").view(size)
        return True
    except RuntimeError:
        return False


def guard_methods(trace: TraceContext, refuse: bool = True) -> Callable[[], None]:
    """Replaces DTensor's methods that bypass `__torch_function__`, for as long as a step is traced; returns the undo.

    `redistribute` works on local tensors, so our mode must not see its inside; `to_local` and `full_tensor` take a
    global value apart, and `from_local` puts one together, which user code may not do (`refuse`). Other threads, which
    trace nothing, get the original methods.
    """
    names = ("redistribute", "to_local", "full_tensor", "from_local")
    originals = {name: DTensor.__dict__[name] for name in names}

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        original = originals[name]
        function = original.__func__ if isinstance(original, staticmethod) else original
        if current_trace() is not trace:
            return function(*args, **kwargs)
        with tc.DisableTorchFunction():
            if trace.closures and isinstance(args[0], DTensor):
                args = (trace.inside(args[0]), *args[1:])
            return function(*args, **kwargs)

    def refusing(name: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            ours = current_trace() is trace and refuse
            if not ours or called_by_library(sys._getframe(1)):
                return call(name, *args, **kwargs)
            what = "puts a global value together" if name == "from_local" else "takes a global value apart"
            raise TraceError(
                f"{trace.name} {what}: .{name}()",
                source=user_source(2),
                fix="use px.reshard to change its placement; per-shard code belongs in shard_map",
            )

        return staticmethod(method) if isinstance(originals[name], staticmethod) else method

    def redistribute(*args: Any, **kwargs: Any) -> Any:
        if current_trace() is trace and is_per_shard(args[0]):
            return recast(trace, *args, **kwargs)
        return call("redistribute", *args, **kwargs)

    DTensor.redistribute = redistribute  # type: ignore[method-assign]
    for name in names[1:]:
        setattr(DTensor, name, refusing(name))
    undo_strided = make_strided_shards_traceable()
    undo_addends = make_addends_exact()
    undo_pads = pad_alike()
    undo_cuts = announce_cuts(lambda mesh, dim: trace.marked(cut=mesh.mesh_dim_names[dim]))

    def undo() -> None:
        undo_strided()
        undo_addends()
        undo_pads()
        undo_cuts()
        for name, original in originals.items():
            setattr(DTensor, name, original)

    return undo
