"""A user's function to one rank's graph.

Enters: a function, the abstract values and specs of its arguments, a mesh. Leaves: a `RankGraph`, the local ATen and
collective operators that one rank runs, each node with its `Origin`. DTensor chooses the placements while the function
runs once on fake local tensors. Next stage: `passes`.

The trace runs on a virtual view of the mesh, so that real, simulated and abstract meshes go one way.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from ptrainx.compile.guards import Captures, GlobalValues
from ptrainx.compile.program import Argument, Output, Program, RankGraph
from ptrainx.compile.provenance import annotate, argument_label
from ptrainx.compile.rules import LocalRules, guard_methods
from ptrainx.compile.trace_view import remembered_propagation, trace_view
from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor, describe, is_array_like
from ptrainx.core.errors import PtrainxError, SpecError, TraceError, TreeError
from ptrainx.core.trace_context import Origin, TraceContext, called_by_library
from ptrainx.mesh.partition_spec import PartitionSpec
from ptrainx.mesh.placement import check_spec, contiguous_strides, local_shape, spec_of_placements, trace_placements
from ptrainx.mesh.spec_tree import spread
from ptrainx.ops.sharding_rules import install_sharding_rules

__all__ = [
    "Argument",
    "Output",
    "Program",
    "RankGraph",
    "place_outputs",
    "quiet",
    "sums_only",
    "trace_program",
    "tracing_alone",
]


tracing_alone = threading.RLock()
"""Held while a step is traced, which changes how DTensor works for the whole process."""


def trace_program(program: Program, rank: int) -> RankGraph:
    """Traces the program of one rank."""
    install_sharding_rules()
    view = trace_view(program.mesh, rank)
    trace = TraceContext(program.mesh, view, rank, program.name)
    trace.origin = Origin(program.source)
    fake_mode = tc.FakeTensorMode()
    captures = Captures(fake_mode, view)
    axis_of: dict[str, str] = dict(zip(view._dim_group_names, program.mesh.axis_names))
    trace.joint_groups = axis_of
    trace.clean_body = functools.partial(_clean_body, trace=trace, fake_mode=fake_mode, axis_of=axis_of)
    locals_in = [_fake_local(a, program, rank, fake_mode) for a in program.arguments]
    specs_in = [_spec(a, program, view) for a in program.arguments]
    names = {tc.storage_id(t): f"argument {a.path}" for t, a in zip(locals_in, program.arguments)}
    captured_names: dict[int, str] = {}

    def frozen(storage: int) -> str | None:
        for fake in captures.fakes[len(captured_names) :]:
            captured_names[tc.storage_id(fake)] = "a captured value"
        return names.get(storage) or captured_names.get(storage)

    found: dict[str, Any] = {}

    def local_step(*local: torch.Tensor) -> list[torch.Tensor]:
        leaves = [tc.wrap_local(t, spec) for t, spec in zip(local, specs_in)]
        modes = GlobalValues(trace, captures)
        trace.as_global = modes.as_global
        with modes, LocalRules(trace, frozen):
            result = program.call(leaves)
        trace.at_source(program.source)
        with LocalRules(trace, frozen):
            values, found["tree"], found["outputs"] = place_outputs(
                result, program, trace, lambda leaf: captures.replica(leaf, trace)
            )
            return [v._local_tensor.contiguous() for v in values]

    with _tracing_environment(trace), fake_mode, torch.no_grad(), _explained(program, trace):
        module = make_fx(local_step, tracing_mode="real")(*locals_in)
    _lift_captures(module, captures)
    _drop_detaching(module)
    annotate(module.graph, [argument_label(a.path) for a in program.arguments], program.source)
    return RankGraph(
        module,
        rank,
        captures.values,
        captures.versions,
        found["tree"],
        found["outputs"],
        fake_mode,
        axis_of,
        program.mesh.shape,
        program.mesh.one_backend,
        trace.remats,
    )


def _clean_body(
    module: torch.fx.GraphModule, *, trace: TraceContext, fake_mode: Any, axis_of: dict[str, str]
) -> torch.fx.GraphModule:
    """A loop's body and its gradient as a graph that can be cut in two: no writes, nothing twice, nothing unread."""
    from ptrainx.compile.passes.pipeline import tidy

    _drop_detaching(module)
    graph = RankGraph(module, trace.rank, [], [], None, (), fake_mode, axis_of, remats=trace.remats)
    with tc.no_dispatch_modes():
        return tidy(graph, trace.origin.remat).module


def _drop_detaching(module: torch.fx.GraphModule) -> None:
    """Removes `detach_`, which autograd calls on what has no gradient: on a view it is an error."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)


def _fake_local(argument: Argument, program: Program, rank: int, fake_mode: Any) -> torch.Tensor:
    shape = local_shape(argument.spec, program.mesh, argument.shape, rank)
    with fake_mode:
        return torch.empty(shape, dtype=argument.dtype, device=program.device)


def _spec(argument: Argument, program: Program, view: Any) -> Any:
    placements = trace_placements(argument.spec, program.mesh)
    return tc.make_spec(view, placements, argument.shape, contiguous_strides(argument.shape), argument.dtype)


def place_outputs(
    result: Any, program: Program, trace: TraceContext, replica: Callable[[torch.Tensor], DTensor]
) -> tuple[list[DTensor], Any, tuple[Output, ...]]:
    """Applies the output specs: each leaf of the result becomes a DTensor at its final placement.

    `replica` gives the global value that stands for a tensor from outside.
    """
    pairs, treedef = px_tree.flatten_with_path(result)
    chosen = spread(program.out_specs, result, "result")
    values, outputs = [], []
    for (path, leaf), wanted in zip(pairs, chosen):
        where = px_tree.path_expr(path, "result")
        value = _as_global(leaf, where, program, trace, replica)
        spec, placements, reason = _destination(value, wanted, program, where)
        if tuple(value.placements) != placements:
            with trace.marked(asked=True, reason=reason):
                value = _redistribute_output(value, placements, trace, where)
        outputs.append(Output(where, tuple(value.shape), value.dtype, spec))
        values.append(value)
    return values, treedef, tuple(outputs)


def _destination(
    value: DTensor, wanted: PartitionSpec | None, program: Program, where: str
) -> tuple[PartitionSpec, tuple[Any, ...], str]:
    """(spec, placements, reason) of an output."""
    mesh = program.mesh
    if wanted is not None:
        check_spec(wanted, mesh, value.shape, where)
        if value.ndim == 0:
            wanted = PartitionSpec(unreduced=wanted.unreduced)
        return wanted, trace_placements(wanted, mesh), f"out_specs {wanted} of {where}"
    placements, reason = list(value.placements), "a sum owed in the result"
    if any(tc.is_strided_shard(p) for p in placements):
        # What a view has made of a sharded dim: no spec says it; the same axes in mesh order come closest.
        placements = [Shard(p.dim) if tc.is_strided_shard(p) else p for p in placements]  # type: ignore[attr-defined]
        reason = "a placement in the result that no spec can say"
    placements = [Replicate() if p.is_partial() or value.ndim == 0 else p for p in placements]
    return spec_of_placements(placements, mesh.axis_names, value.ndim), tuple(placements), reason


def _redistribute_output(value: DTensor, placements: tuple, trace: TraceContext, where: str) -> DTensor:
    value = sums_only(value, placements)
    owed = [i for i, p in enumerate(placements) if p.is_partial() and not value.placements[i].is_partial("sum")]
    if owed:
        raise SpecError(
            f"{where} owes no sum over {[trace.mesh.axis_names[i] for i in owed]}",
            got=", ".join(f"{axis}: {p}" for axis, p in zip(trace.mesh.axis_names, value.placements)),
            fix="leave the axes out of unreduced=",
        )
    if any(tc.is_strided_shard(p) for p in value.placements):
        # Not from strided to plain shards at once: torch has no way there.
        value = value.redistribute(trace.view, [Replicate() if tc.is_strided_shard(p) else p for p in value.placements])
    return value.redistribute(trace.view, placements)


def sums_only(value: DTensor, placements: tuple) -> DTensor:
    """A value whose owed averages are owed sums, where `placements` leaves them owed."""
    averages = [
        i for i, (p, q) in enumerate(zip(value.placements, placements)) if p.is_partial("avg") and q.is_partial()
    ]
    if not averages:
        return value
    mesh, spec = value.device_mesh, value._spec
    meta: Any = spec.tensor_meta
    n = math.prod(mesh.size(i) for i in averages)
    owed = tuple(Partial("sum") if i in averages else p for i, p in enumerate(value.placements))
    return tc.wrap_local(value._local_tensor / n, tc.make_spec(mesh, owed, value.shape, meta.stride, value.dtype))


def _as_global(
    leaf: Any, where: str, program: Program, trace: TraceContext, replica: Callable[[torch.Tensor], DTensor]
) -> DTensor:
    if isinstance(leaf, DTensor):
        detached: Any = leaf.detach()
        return detached if leaf.device_mesh is trace.view else replica(leaf)
    if not is_array_like(leaf):
        kind = type(leaf)
        raise TreeError(
            f"{where} of {program.name} is a leaf of unknown type {kind.__module__}.{kind.__qualname__}",
            got=repr(leaf)[:80],
            expected="a tensor, a numpy array, or a Python int, float or bool",
            fix="return it from an ordinary function, or make its class a pytree with px.register_dataclass",
        )
    if tc.is_fake(leaf):
        spec = tc.make_spec(
            trace.view, (Replicate(),) * trace.view.ndim, leaf.shape, contiguous_strides(leaf.shape), leaf.dtype
        )
        return tc.wrap_local(leaf.detach().contiguous(), spec)
    with tc.no_dispatch_modes():  # or a number would become a fake tensor
        value = as_tensor(leaf, where)
    return replica(value)


def _lift_captures(module: torch.fx.GraphModule, captures: Captures) -> None:
    """Captured values, which make_fx has stored as attributes, become placeholders after the arguments."""
    graph = module.graph
    index = {id(fake): i for i, fake in enumerate(captures.fakes)}
    anchor = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)
    lifted: list[torch.fx.Node | None] = [None] * len(captures.fakes)
    for i, fake in enumerate(captures.fakes):
        with graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes))):
            anchor = lifted[i] = graph.placeholder(f"captured_{i}")
            anchor.meta["val"] = fake
    for node in list(graph.nodes):
        if node.op == "get_attr" and id(getattr(module, node.target)) in index:
            node.replace_all_uses_with(lifted[index[id(getattr(module, node.target))]])
            graph.erase_node(node)
    graph.lint()


@contextlib.contextmanager
def _tracing_environment(trace: TraceContext) -> Iterator[None]:
    """What holds while user code is traced, and is put back however it ends."""

    def implied(dispatch: Any, op_info: Any, *rest: Any, **kwargs: Any) -> Any:
        schema = rest[0] if rest else op_info.schema
        reason = f"operands of {getattr(schema, 'op', 'an operator')}"
        with trace.marked(asked=False, reason=reason):
            return dispatch(op_info, *rest, **kwargs)

    with tracing_alone, _replaced(trace, implied), remembered_propagation(trace.view), trace.active():
        with torch.fx.traceback.preserve_node_meta(), quiet():
            try:
                trace.set_origin(trace.origin)
                yield
            finally:
                torch.fx.traceback.get_current_meta().pop("custom", None)


@contextlib.contextmanager
def _replaced(trace: TraceContext, implied: Any) -> Iterator[None]:
    undo_access = guard_methods(trace)
    before_hook = tc.set_redistribute_hook(implied)
    before_implicit = tc.set_implicit_replication(True)
    try:
        yield
    finally:
        tc.set_implicit_replication(before_implicit)
        tc.restore_redistribute_hook(before_hook)
        undo_access()


_TALKATIVE = (
    "distributed.tensor._redistribute",
    "distributed.tensor._collective_utils",
    "_subclasses.fake_tensor",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Off the terminal stay DTensor's advice about redistributions, which `comms()` gives with source lines, and what
    fake tensors say before they raise."""
    loggers = [logging.getLogger(f"torch.{name}") for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


@contextlib.contextmanager
def _explained(program: Program, trace: TraceContext) -> Iterator[None]:
    """What user code raises passes; ours, where torch has wrapped it, is unwrapped; torch's gets the user's line."""
    try:
        yield
    except PtrainxError:
        raise
    except Exception as error:
        if not _raised_by_library(error):
            raise
        cause: BaseException | None = error.__cause__
        while cause is not None and not isinstance(cause, PtrainxError):
            cause = cause.__cause__
        if cause is not None:
            raise cause from None
        if "harding propagation failed" in str(error) or "redistribute" in str(error):
            raise TraceError(
                f"{program.name} can't be partitioned over {program.mesh}: {str(error).splitlines()[0]}",
                source=trace.origin.source,
                fix="constrain the operands' placement with px.reshard before this line, or change their specs",
            ) from error
        arguments = [f"{a.path}: {describe(ShapeDtypeStruct(a.shape, a.dtype))}" for a in program.arguments]
        more = ", ..." if len(arguments) > 8 else ""
        error.add_note(
            f"while {program.name} was traced at {trace.origin.source}, with arguments {', '.join(arguments[:8])}{more}"
        )
        raise


def _raised_by_library(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and called_by_library(trace.tb_frame)
