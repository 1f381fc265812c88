"""`jit`: a pure function of global values, partitioned over a mesh, as one graph.

A call finds its compiled program by the structure, shapes, dtypes and placements of its arguments; only a new one is
traced.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ptrainx.compile.agreement import is_shared, meeting_of
from ptrainx.compile.comms import CommReport
from ptrainx.compile.donation import is_donated, refuse
from ptrainx.compile.eager import EagerProgram
from ptrainx.compile.stages import Compiled, Lowered, Traced, compile_program, plain_hashes
from ptrainx.compile.trace import Argument, Program
from ptrainx.core import flags
from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor, describe
from ptrainx.core.errors import GradientError, InputError, MeshError, SpecError, TraceError, TreeError
from ptrainx.core.trace_context import current_trace, defined_at
from ptrainx.mesh.mesh import AbstractMesh, Mesh
from ptrainx.mesh.partition_spec import P, PartitionSpec
from ptrainx.mesh.placement import check_spec, spec_of, trace_placements
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.transfer import default_mesh, same_mesh
from ptrainx.transforms.cache_key import ProgramCache, leaf_keys, parameter_names, positions_of, typed, what_changed
from ptrainx.transforms.grad import any_differentiated
from ptrainx.transforms.ordered import LOGICAL_SHARDS, check_inside, check_options, ordered_mesh
from ptrainx.transforms.reshard import reshard
from ptrainx.transforms.successors import tell_misplaced_successors

__all__ = ["JitFunction", "jit"]


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
    reductions: str = "fast",
    logical_shards: int | Mapping[str, int] | None = None,
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
        backend: "graph": one graph, generated Python over ATen. "inductor": the same graph, its regions between
            collectives compiled by Inductor and kept in a cache folder; where there is no C++ compiler, "graph", with
            a warning. "eager": operator by operator on DTensors, for debugging.
        max_implicit_bytes: refuse a program whose ranks send more than this for communication that nobody asked for.
        reductions: "fast", or "ordered": the same bits on meshes of every size that divides `logical_shards`.
        logical_shards: into how many parts an ordered program cuts every axis, or each by name; 8 by default.

    Returns:
        a function with `trace(*args)`, `lower(*args)`, `comms(*args)` and `clear_cache()`.

    >>> from ptrainx.mesh import make_mesh
    >>> mesh = make_mesh(data=2, simulate=True)
    >>> jit(lambda x: x.sum(), mesh=mesh, in_specs=P("data"))(torch.ones(4))
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
        "reductions": reductions,
        "logical_shards": logical_shards,
    }
    return (lambda fn: JitFunction(fn, **options)) if fn is None else JitFunction(fn, **options)


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
        reductions: str = "fast",
        logical_shards: int | Mapping[str, int] | None = None,
    ):
        check_options(backend, reductions, logical_shards)
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.mesh, self.in_specs, self.out_specs, self.backend = fn, mesh, in_specs, out_specs, backend
        self.name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
        self.name = self.name.rsplit("<locals>.", 1)[-1]
        self.static = frozenset(positions_of(static_argnums, "static_argnums"))
        self.donate = frozenset(positions_of(donate_argnums, "donate_argnums"))
        self.max_implicit_bytes = max_implicit_bytes
        self.ordered = reductions == "ordered"
        self.logical_shards = LOGICAL_SHARDS if logical_shards is None else logical_shards
        if self.static & self.donate:
            raise InputError(
                f"{self.name}: argument {min(self.static & self.donate)} is both static and donated",
                got=f"static_argnums={sorted(self.static)}, donate_argnums={sorted(self.donate)}",
                fix="a static argument is no tensor and has no memory to give: leave it out of donate_argnums",
            )
        self._cache = ProgramCache()
        self._parameters = parameter_names(fn)
        self._static_names = {self._called(i) for i in self.static}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_trace() is not None:
            return self._inline(args, kwargs)
        dynamic, named, static = self._partition(args, kwargs)
        leaves, treedef = px_tree.flatten((dynamic, named))
        if any_differentiated(leaves) or tc.FakeTensor in set(map(type, leaves)):
            return self._inside_another_transform(args, kwargs, leaves)
        key, mesh = self._key(leaves, treedef, static)
        compiled = self._cache.find(key)
        if compiled is None:
            compiled = self._compile(key, args, kwargs, mesh, leaves)
        elif flags.check_inputs() and is_shared(mesh):
            self._check_inputs(compiled, mesh, leaves)
        if isinstance(mesh, Mesh):
            mesh.check_alive()
        return compiled.run(leaves)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The graph of a call with arguments like these (values, or `ShapeDtypeStruct`s), before any pass."""
        return Traced(self._program(args, kwargs), self.backend)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The graph after all passes; as `trace(...).lower()`."""
        return self.trace(*args, **kwargs).lower()

    def comms(self, *args: Any, **kwargs: Any) -> CommReport:
        """Every collective of a call with arguments like these, with source lines. Runs nothing.

        A program that has been compiled is not traced again.
        """
        dynamic, named, static = self._partition(args, kwargs)
        leaves, treedef = px_tree.flatten((dynamic, named))
        compiled = self._cache.get(self._key(leaves, treedef, static)[0])
        return compiled.comms() if isinstance(compiled, Compiled) else self.lower(*args, **kwargs).comms()

    def clear_cache(self) -> None:
        """Forgets every compiled program."""
        self._cache.clear()

    def _key(self, leaves: list[Any], treedef: Any, static: tuple) -> tuple[Any, AbstractMesh]:
        """(what the program of a call is found by, its mesh)."""
        mesh = self.mesh or default_mesh(leaves)
        return (treedef, leaf_keys(leaves), static, mesh, tc.numeric_defaults()), mesh

    def _inline(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The call inside another jitted function: its specs constrain, its mesh has to be the same."""
        trace = current_trace()
        assert trace is not None
        check_inside(self.name, self.mesh, self.ordered, trace)
        if self.in_specs is not None:
            positions = [i for i in range(len(args)) if i not in self.static]
            dynamic = tuple(args[i] for i in positions)
            placed = [reshard(x, spec) for x, spec in zip(dynamic, self._positional_specs(dynamic))]
            inside = dict(zip(positions, placed))
            args = tuple(inside.get(i, value) for i, value in enumerate(args))
        out = self.fn(*args, **kwargs)
        return out if self.out_specs is None else reshard(out, self.out_specs)

    def _inside_another_transform(self, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """The call under `px.grad` or `px.eval_shape` outside any jit: as if it were not jitted."""
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            raise GradientError(
                f"{self.name} is jitted, and is differentiated from outside over placed values",
                fix="jit the gradient instead: px.jit(px.grad(fn), ...)",
            )
        return self.fn(*args, **kwargs)

    def _partition(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], tuple]:
        """(dynamic positional arguments, dynamic keyword arguments, static ones in a form that can be a key)."""
        if not self.static:
            return args, kwargs, ()
        found: dict[Any, Any] = {i: args[i] for i in sorted(self.static) if i < len(args)}
        found.update((name, kwargs[name]) for name in sorted(self._static_names) if name in kwargs)
        for i, value in found.items():
            try:
                hash(value)
            except TypeError:
                called = self._called(i) if isinstance(i, int) else i
                raise InputError(
                    f"{self.name}: static argument {called} is not hashable",
                    got=type(value).__name__,
                    fix="pass a tuple, a string, a number or a frozen dataclass, or don't make it static",
                ) from None
        dynamic = tuple(a for i, a in enumerate(args) if i not in self.static)
        named = {name: a for name, a in kwargs.items() if name not in self._static_names}
        return dynamic, named, tuple((i, typed(value)) for i, value in found.items())

    def _called(self, position: int) -> str:
        return self._parameters[position] if position < len(self._parameters) else f"argument {position}"

    def _program(self, args: tuple, kwargs: dict[str, Any], mesh: AbstractMesh | None = None) -> Program:
        dynamic, named, _ = self._partition(args, kwargs)
        positions = [i for i in range(len(args)) if i not in self.static]
        leaves, treedef = px_tree.flatten((dynamic, named))
        mesh = mesh or self.mesh or default_mesh(leaves)
        arguments = self._arguments(dynamic, named, positions, mesh)
        values = {i: args[i] for i in self.static if i < len(args)}
        fixed = {name: kwargs[name] for name in kwargs if name not in named}

        def call(traced: list[Any]) -> Any:
            moving, keywords = px_tree.unflatten(treedef, traced)
            rest = iter(moving)
            return self.fn(*[values[i] if i in values else next(rest) for i in range(len(args))], **keywords, **fixed)

        device = mesh.device if isinstance(mesh, Mesh) else torch.device("cpu")
        source = defined_at(self.fn) or self.name
        flatten = self._flattener(args, kwargs)
        logical = ordered_mesh(self.name, mesh, self.logical_shards, arguments) if self.ordered else None
        return Program(self.name, call, tuple(arguments), self.out_specs, mesh, device, flatten, source, logical)

    def _flattener(self, args: tuple, kwargs: dict[str, Any]) -> Callable[..., list[Any]]:
        """What takes a call's arguments to their leaves, once it has found them to be like these."""

        def form(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], Any, Any]:
            dynamic, named, static = self._partition(args, kwargs)
            leaves, treedef = px_tree.flatten((dynamic, named))
            return leaves, (treedef, static), [describe(_aval(leaf)) for leaf in leaves]

        _, structure, types_ = form(args, kwargs)

        def flatten(*args: Any, **kwargs: Any) -> list[Any]:
            leaves, own, own_types = form(args, kwargs)
            if own != structure or own_types != types_:
                raise InputError(
                    f"{self.name} is compiled for other arguments",
                    got=f"{own_types} in {own[0]}",
                    expected=f"{types_} in {structure[0]}",
                    fix="compile it for these, or call the jitted function itself",
                )
            return leaves

        return flatten

    def _arguments(self, dynamic: tuple, named: dict, positions: list[int], mesh: AbstractMesh) -> list[Argument]:
        specs = self._positional_specs(dynamic)
        found = []
        for position, value, spec in zip(positions, dynamic, specs):
            found += self._tree_arguments(value, spec, self._called(position), position in self.donate, mesh)
        donated = {self._called(position) for position in self.donate}
        # optree orders the keys of a dict: so do we
        for name in sorted(named):
            found += self._tree_arguments(named[name], None, name, name in donated, mesh)
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
            if leaf.ndim and trace_placements(own, mesh) != trace_placements(wanted, mesh):
                raise SpecError(
                    f"{where} is placed otherwise than in_specs says",
                    got=f"{describe(leaf)} at {own}",
                    expected=str(wanted),
                    fix=f"move it with px.reshard({path}, {wanted}), or change in_specs",
                )
            return Argument(path, tuple(leaf.shape), leaf.dtype, own, plain=False, donated=donated)
        if is_donated(leaf):
            refuse(leaf)
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
        other = next((p for p in leaf.placements if p.is_partial() and not p.is_partial("sum")), None)
        if other is not None:
            raise SpecError(
                f"{where} is placed in a way that no spec can say",
                got=f"{other}, an unreduced value that is no sum",
                fix=f"pay it first: {where.rsplit(' ', 1)[-1]} = px.reshard(value, P(...))",
            )
        return spec_of(leaf)

    def _compile(self, key: Any, args: tuple, kwargs: dict, mesh: AbstractMesh, leaves: list[Any]) -> Any:
        if self._cache:
            flags.log("retrace", f"{self.name} is traced again: {what_changed(key, self._cache)}")
        else:
            flags.log("retrace", f"{self.name} is traced for the first time")
        if not isinstance(mesh, Mesh):
            raise MeshError(
                f"{self.name} is jitted for {mesh}, which has no devices to run on",
                fix="use .trace(...).lower() for planning, or make the mesh with px.make_mesh",
            )
        mesh.check_alive()
        with meeting_of(mesh, self.name) as meeting:
            program = self._program(args, kwargs, mesh)
            if self.backend == "eager":
                compiled: Any = EagerProgram(program)
                if not meeting.alone:
                    meeting.settle(None, plain_hashes(program, leaves))
            else:
                compiled = compile_program(program, leaves, meeting, self._check_implicit, self.backend)
                donated = {self._called(i): args[i] for i in sorted(self.donate) if i < len(args)}
                tell_misplaced_successors(self.name, donated, compiled.lowered)
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

    def _check_inputs(self, compiled: Any, mesh: AbstractMesh, leaves: list[Any]) -> None:
        with meeting_of(mesh, self.name) as meeting:
            meeting.settle(None, plain_hashes(compiled.program, leaves))


def _aval(leaf: Any) -> Any:
    return leaf if isinstance(leaf, ShapeDtypeStruct) else as_tensor(leaf)
