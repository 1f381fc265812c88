"""`jit`: a pure function of global values, partitioned over a mesh, as one graph.

A call finds its compiled program by the structure, shapes, dtypes and placements of its arguments; only a new one is
traced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ptrainx.compile.agreement import Agreement
from ptrainx.compile.comms import CommReport
from ptrainx.compile.donation import is_donated, refuse
from ptrainx.compile.eager import EagerProgram
from ptrainx.compile.stages import Compiled, Lowered, Traced, compile_program, plain_hashes
from ptrainx.compile.trace import Argument, Program
from ptrainx.core import flags
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor, describe
from ptrainx.core.errors import BackendError, InputError, MeshError, SpecError, TraceError, TreeError
from ptrainx.core.trace_context import current_trace
from ptrainx.mesh.mesh import AbstractMesh, Mesh
from ptrainx.mesh.partition_spec import P, PartitionSpec
from ptrainx.mesh.placement import check_spec, spec_of
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.transfer import default_mesh, same_mesh

__all__ = ["BACKENDS", "JitFunction", "jit"]

BACKENDS = ("graph", "eager")


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: AbstractMesh | None = None,
    in_specs: SpecTree = None,
    out_specs: SpecTree = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    backend: str = "graph",
    max_implicit_bytes: int | None = None,
) -> Any:
    """Compiles a pure function for a mesh; usable as a decorator, with or without arguments.

    Args:
        fn: a function of pytrees, without side effects. Inside it values are global: shapes are those of the whole
            value, whatever a device holds.
        mesh: by default the arguments' own, else that of `with mesh:`, else one device in a world of one.
        in_specs: a spec tree for the positional arguments that are not static: a tuple with one entry each, or a lone
            spec for all. None keeps an argument's own placement (a plain one is replicated). Keyword arguments keep
            their own.
        out_specs: a spec tree for the result; None leaves a value as propagated, with owed sums paid.
        donate_argnums: positional arguments whose memory the results may use; they can't be used afterwards.
        static_argnums: positional arguments that are hashable Python values and part of the program.
        backend: "graph": one graph, generated Python over ATen. "eager": operator by operator on DTensors, for
            debugging.
        max_implicit_bytes: refuse a program whose ranks send more than this for communication that nobody asked for.

    Returns:
        a function with `trace(*args)`, `lower(*args)`, `comms(*args)` and `clear_cache()`.

    >>> mesh = make_mesh(data=2, simulate=True)                           # doctest: +SKIP
    >>> jit(lambda x: x.sum(), mesh=mesh, in_specs=P("data"))(torch.ones(4))  # doctest: +SKIP
    tensor(4.)
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "in_specs": in_specs,
        "out_specs": out_specs,
        "donate_argnums": donate_argnums,
        "static_argnums": static_argnums,
        "backend": backend,
        "max_implicit_bytes": max_implicit_bytes,
    }
    if fn is None:
        return lambda fn: JitFunction(fn, **options)
    return JitFunction(fn, **options)


class JitFunction:
    """What `jit` returns."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        mesh: AbstractMesh | None,
        in_specs: SpecTree,
        out_specs: SpecTree,
        donate_argnums: int | Sequence[int],
        static_argnums: int | Sequence[int],
        backend: str,
        max_implicit_bytes: int | None,
    ):
        if backend not in BACKENDS:
            raise BackendError(f"jit has no backend {backend!r}", expected=f"one of {', '.join(map(repr, BACKENDS))}")
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.mesh, self.in_specs, self.out_specs, self.backend = fn, mesh, in_specs, out_specs, backend
        self.name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
        self.name = self.name.rsplit("<locals>.", 1)[-1]
        self.static = frozenset(_numbers(static_argnums, "static_argnums"))
        self.donate = frozenset(_numbers(donate_argnums, "donate_argnums"))
        self.max_implicit_bytes = max_implicit_bytes
        if self.static & self.donate:
            raise InputError(f"{self.name}: argument {min(self.static & self.donate)} is both static and donated")
        self._cache: dict[Any, Any] = {}
        self._parameters = _parameter_names(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_trace() is not None:
            return self.fn(*args, **kwargs)
        key, leaves, mesh = self._key(args, kwargs)
        compiled = self._cache.get(key)
        if compiled is None:
            compiled = self._compile(key, args, kwargs, mesh, leaves)
        elif flags.check_inputs() and isinstance(mesh, Mesh) and not mesh.simulated and mesh.size > 1:
            self._check_inputs(compiled, mesh, leaves)
        if isinstance(mesh, Mesh):
            mesh.check_alive()
        return compiled(leaves)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The graph of a call with arguments like these (values, or `ShapeDtypeStruct`s), before any pass."""
        return Traced(self._program(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The graph after all passes; as `trace(...).lower()`."""
        return self.trace(*args, **kwargs).lower()

    def comms(self, *args: Any, **kwargs: Any) -> CommReport:
        """Every collective of a call with arguments like these, with source lines. Runs nothing.

        A program that has been compiled is not traced again.
        """
        compiled = self._cache.get(self._key(args, kwargs)[0])
        return compiled.comms() if isinstance(compiled, Compiled) else self.lower(*args, **kwargs).comms()

    def clear_cache(self) -> None:
        """Forgets every compiled program."""
        self._cache.clear()

    def _key(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Any], Any]:
        """(what the program of a call is found by, the dynamic leaves of its arguments, its mesh)."""
        dynamic, static = self._partition(args)
        leaves, treedef = px_tree.flatten((dynamic, kwargs))
        mesh = self.mesh or default_mesh(leaves)
        return (treedef, tuple([_leaf_key(leaf) for leaf in leaves]), static, mesh), leaves, mesh

    def _partition(self, args: tuple) -> tuple[tuple, tuple]:
        if not self.static:
            return args, ()
        static = tuple((i, args[i]) for i in sorted(self.static) if i < len(args))
        for i, value in static:
            try:
                hash(value)
            except TypeError:
                raise InputError(
                    f"{self.name}: static argument {self._called(i)} is not hashable",
                    got=type(value).__name__,
                    fix="pass a tuple, a string, a number or a frozen dataclass, or don't make it static",
                ) from None
        return tuple(a for i, a in enumerate(args) if i not in self.static), static

    def _called(self, position: int) -> str:
        return self._parameters[position] if position < len(self._parameters) else f"argument {position}"

    def _program(self, args: tuple, kwargs: dict[str, Any], mesh: AbstractMesh | None = None) -> Program:
        dynamic, static = self._partition(args)
        positions = [i for i in range(len(args)) if i not in self.static]
        leaves, treedef = px_tree.flatten((dynamic, kwargs))
        mesh = mesh or self.mesh or default_mesh(leaves)
        arguments = self._arguments(dynamic, kwargs, positions, mesh)
        values = dict(static)

        def call(traced: list[Any]) -> Any:
            moving, named = px_tree.unflatten(treedef, traced)
            rest = iter(moving)
            return self.fn(*[values[i] if i in values else next(rest) for i in range(len(args))], **named)

        device = mesh.device if isinstance(mesh, Mesh) else torch.device("cpu")
        return Program(self.name, call, tuple(arguments), self.out_specs, mesh, device)

    def _arguments(self, dynamic: tuple, kwargs: dict, positions: list[int], mesh: AbstractMesh) -> list[Argument]:
        specs = self._positional_specs(dynamic)
        found = []
        for position, value, spec in zip(positions, dynamic, specs):
            found += self._tree_arguments(value, spec, self._called(position), position in self.donate, mesh)
        # optree orders the keys of a dict: so do we
        for name in sorted(kwargs):
            found += self._tree_arguments(kwargs[name], None, name, False, mesh)
        return found

    def _positional_specs(self, dynamic: tuple) -> tuple:
        if not isinstance(self.in_specs, tuple):
            return (self.in_specs,) * len(dynamic)
        if len(self.in_specs) != len(dynamic):
            raise TreeError(
                f"{self.name} was called with {len(dynamic)} positional arguments (static ones apart)",
                got=f"in_specs for {len(self.in_specs)}",
                fix="give in_specs one entry an argument; None keeps an argument's own placement",
            )
        return self.in_specs

    def _tree_arguments(
        self, value: Any, specs: SpecTree, name: str, donated: bool, mesh: AbstractMesh
    ) -> list[Argument]:
        pairs, _ = px_tree.flatten_with_path(value)
        chosen = spread(specs, value, name)
        return [
            self._argument(leaf, px_tree.path_expr(path, name), spec, donated, mesh)
            for (path, leaf), spec in zip(pairs, chosen)
        ]

    def _argument(
        self, leaf: Any, path: str, spec: PartitionSpec | None, donated: bool, mesh: AbstractMesh
    ) -> Argument:
        where = f"{self.name}: argument {path}"
        if isinstance(leaf, DTensor):
            if is_donated(leaf):
                refuse(leaf)
            own = self._own_spec(leaf, where, mesh)
            wanted = own if spec is None else spec
            check_spec(wanted, mesh, leaf.shape, where)
            if leaf.ndim and own != wanted:
                raise SpecError(
                    f"{where} is placed otherwise than in_specs says",
                    got=f"{describe(leaf)} at {own}",
                    expected=str(wanted),
                    fix=f"move it with px.reshard({path}, {wanted}), or change in_specs",
                )
            return Argument(path, tuple(leaf.shape), leaf.dtype, own, plain=False, donated=donated)
        if isinstance(leaf, ShapeDtypeStruct):
            value: Any = leaf
        else:
            value = as_tensor(leaf, where)
        wanted = spec or P()
        if len(value.shape) == 0 and wanted.axes:
            wanted = P()
        check_spec(wanted, mesh, value.shape, where)
        if wanted.unreduced:
            raise SpecError(
                f"{where} is a plain value, which owes no sum",
                got=str(wanted),
                fix="leave unreduced= out of its spec, or pass a placed value",
            )
        return Argument(path, tuple(value.shape), value.dtype, wanted, plain=True, donated=donated)

    def _own_spec(self, leaf: DTensor, where: str, mesh: AbstractMesh) -> PartitionSpec:
        if isinstance(mesh, Mesh) and not same_mesh(leaf, mesh):
            raise MeshError(
                f"{where} lives on another mesh than the step",
                got=str(leaf.device_mesh),
                expected=str(mesh),
                fix="px.device_put(px.device_get(value), spec, mesh) moves it between meshes",
            )
        return spec_of(leaf)

    def _compile(self, key: Any, args: tuple, kwargs: dict, mesh: AbstractMesh, leaves: list[Any]) -> Any:
        if self._cache:
            flags.log("retrace", f"{self.name} is traced again: {_what_changed(key, self._cache, self)}")
        else:
            flags.log("retrace", f"{self.name} is traced for the first time")
        if not isinstance(mesh, Mesh):
            raise MeshError(
                f"{self.name} is jitted for {mesh}, which has no devices to run on",
                fix="use .trace(...).lower() for planning, or make the mesh with px.make_mesh",
            )
        mesh.check_alive()
        program = self._program(args, kwargs, mesh)
        if self.backend == "eager":
            compiled: Any = EagerProgram(program)
        else:
            compiled = compile_program(program, leaves, self._check_implicit)
        for old in [k for k in self._cache if k[3].epoch != mesh.epoch and not getattr(k[3], "simulated", False)]:
            if not getattr(mesh, "simulated", False):
                del self._cache[old]
        self._cache[key] = compiled
        return compiled

    def _check_implicit(self, lowered: Lowered) -> None:
        if self.max_implicit_bytes is None:
            return
        implied = CommReport(c for c in lowered.comms() if not c.asked)
        if implied.total_bytes > self.max_implicit_bytes:
            raise TraceError(
                f"{self.name} implies communication of {implied.total_bytes:,} bytes a rank and call",
                got=str(implied),
                expected=f"at most {self.max_implicit_bytes:,} bytes (max_implicit_bytes)",
                fix="reshard an operand where the cost is wanted, change the specs, or raise max_implicit_bytes",
            )

    def _check_inputs(self, compiled: Compiled, mesh: Mesh, leaves: list[Any]) -> None:
        meeting = Agreement(mesh, self.name)
        meeting.post([], plain_hashes(compiled.executable.program, leaves))
        meeting.settle()


_SCALARS: dict[type, Any] = {bool: ((), torch.bool), int: ((), torch.int64)}


def _leaf_key(leaf: Any) -> Any:
    """What of a leaf a compiled program depends on. Placed values: their spec; others: shape and dtype."""
    if isinstance(leaf, DTensor):
        if is_donated(leaf):
            refuse(leaf)
        return leaf._spec
    if isinstance(leaf, torch.Tensor):
        if is_donated(leaf):
            refuse(leaf)
        return tuple(leaf.shape), leaf.dtype
    kind = type(leaf)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if kind is float:
        return (), torch.get_default_dtype()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return tuple(leaf.shape), leaf.dtype
    return kind


def _what_changed(key: Any, cache: dict, jitted: JitFunction) -> str:
    old = next(reversed(cache))
    if key[0] != old[0]:
        return f"the structure of its arguments, from {old[0]} to {key[0]}"
    if key[2] != old[2]:
        return f"static arguments, from {old[2]} to {key[2]}"
    if key[3] != old[3]:
        return f"the mesh, from {old[3]} to {key[3]}"
    changes = [f"leaf {i} from {a} to {b}" for i, (a, b) in enumerate(zip(old[1], key[1])) if a != b]
    return "; ".join(changes) or "nothing that is known"


def _numbers(value: int | Sequence[int], name: str) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if any(not isinstance(n, int) or n < 0 for n in numbers):
        raise InputError(f"{name}={value!r}", expected="positions of arguments, counted from 0")
    return numbers


def _parameter_names(fn: Callable) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
