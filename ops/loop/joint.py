"""A loop's body to its plan: traced once, as local graphs, with its gradient if one will be asked for.

The carry's placements are a fixed point, found by trial runs whose graphs are thrown away. The last run is the one that
counts: the body and, behind it, its gradient, over fake local tensors, DTensor choosing the placements inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.fx import GraphModule

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import GradientError, TraceError
from ptrainx.core.trace_context import TraceContext
from ptrainx.mesh.placement import contiguous_strides
from ptrainx.ops.debug_print import held_prints
from ptrainx.ops.loop.body import trace_body
from ptrainx.ops.loop.closure import Closure
from ptrainx.ops.loop.partition import Partition, partition

__all__ = [
    "Body",
    "Plan",
    "lift_constants",
    "local_like",
    "local_size",
    "make_plan",
    "refuse_other_leaves",
    "slice_spec",
    "stack_spec",
]

_TRIALS = 8


@dataclasses.dataclass
class Body:
    """A body as the plan sees it.

    Attributes:
        call: `(carry leaves, x leaves) -> (carry leaves, y leaves)`, checked: the new carry is like the old one.
        settle: `(new carry leaf, old carry leaf) -> placements` that the carry should have had from the start.
        keep: `(new carry leaves, old ones) -> the new ones at the old ones' placements`, or an error.
    """

    call: Callable[[list[DTensor], list[DTensor]], tuple[list[DTensor], list[DTensor]]]
    settle: Callable[[DTensor, DTensor], tuple[Any, ...]]
    keep: Callable[[list[DTensor], list[DTensor]], list[DTensor]]


@dataclasses.dataclass
class Plan:
    """What a loop's operators need.

    Attributes:
        parts: the forward body and the backward one; the latter is None if no gradient can be asked for.
        carry_specs, y_specs: DTensorSpecs of the carry and of one step's ys.
        closed: values of the step around the loop, operands after the xs.
        constants: local tensors that are operands after them.
        differentiated: which primals (carry, xs, closed) get gradients.
        gradient_specs: of those, for one step.
        carry_differentiable, y_differentiable: which results have gradients.
        cotangent_specs: of the differentiable results, for one step.
    """

    parts: Partition
    has_gradient: bool
    carry_specs: list[Any]
    y_specs: list[Any]
    closed: list[DTensor]
    constants: list[torch.Tensor]
    differentiated: list[int]
    gradient_specs: list[Any]
    carry_differentiable: list[bool]
    y_differentiable: list[bool]
    cotangent_specs: list[Any]


def slice_spec(spec: Any) -> Any:
    """The DTensorSpec of a slice along dim 0, which is not sharded."""
    meta = spec.tensor_meta
    return tc.make_spec(
        spec.mesh, tuple(_moved(p, -1) for p in spec.placements), meta.shape[1:], meta.stride[1:], meta.dtype
    )


def stack_spec(spec: Any, length: int) -> Any:
    """The DTensorSpec of such values stacked along a new dim 0."""
    meta = spec.tensor_meta
    shape = (length, *meta.shape)
    return tc.make_spec(
        spec.mesh, tuple(_moved(p, 1) for p in spec.placements), shape, contiguous_strides(shape), meta.dtype
    )


def _moved(placement: Any, by: int) -> Any:
    return tc.shifted_shard(placement, by)


def _at(spec: Any, placements: tuple[Any, ...]) -> Any:
    meta = spec.tensor_meta
    return tc.make_spec(spec.mesh, placements, meta.shape, contiguous_strides(meta.shape), meta.dtype)


def _paid(spec: Any) -> Any:
    """Where the cotangent of such a value lives: as the value; the cotangent of an owed sum is replicated."""
    return _at(spec, tuple(Replicate() if p.is_partial() else p for p in spec.placements))


def local_like(spec: Any) -> torch.Tensor:
    """An empty contiguous local tensor of a DTensorSpec, of the rank that the mesh plays."""
    return torch.empty(local_size(spec), dtype=spec.tensor_meta.dtype, device=spec.mesh.device_type)


def local_size(spec: Any) -> tuple[int, ...]:
    """The shape of the rank's part of a DTensorSpec."""
    with tc.no_dispatch_modes(), tc.DisableTorchFunction():
        shape, _ = tc.compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(shape)


def make_plan(body: Body, carry: list[DTensor], xs: list[DTensor], trace: TraceContext) -> Plan:
    """The plan of a loop that starts from `carry` over `xs`, which are global values of the running trace."""
    grads = torch.is_grad_enabled()
    carry_specs = [_at(c._spec, tuple(c.placements)) for c in carry]
    carry_grads = [grads and c.requires_grad for c in carry]
    x_specs = [slice_spec(x._spec) for x in xs]
    x_grads = [grads and x.requires_grad for x in xs]
    closed: list[DTensor] = []
    for _ in range(_TRIALS):
        found = _run(body, carry_specs, carry_grads, xs, x_specs, x_grads, closed, trace, None)
        settled = [_at(s, body.settle(new, old)) for s, new, old in zip(carry_specs, found.carry, found.start)]
        wanted = [grads and (a or c.requires_grad) for a, c in zip(carry_grads, found.carry)]
        stable = wanted == carry_grads and all(
            tuple(a.placements) == tuple(b.placements) for a, b in zip(settled, carry_specs)
        )
        closed, carry_specs, carry_grads = found.closed, settled, wanted
        if stable:
            break
    y_specs = [_at(y._spec, tuple(y.placements)) for y in found.ys]
    y_grads = [grads and y.requires_grad for y in found.ys]
    differentiable = list(carry_grads)
    inputs = [*carry_grads, *x_grads, *(grads and c.requires_grad for c in closed)]
    needed = any(inputs) and any([*differentiable, *y_grads])
    cotangents = (
        [_paid(s) for s, d in zip([*carry_specs, *y_specs], [*differentiable, *y_grads]) if d] if needed else []
    )
    gradient = _Gradient(needed, differentiable, y_grads, inputs, cotangents)
    found = _run(body, carry_specs, carry_grads, xs, x_specs, x_grads, closed, trace, gradient)
    module = found.module
    constants = lift_constants(module, len(carry) + len(xs) + len(closed), trace)
    n_primals = len(carry) + len(xs) + len(closed) + len(constants)
    with tc.DisableTorchFunction():
        parts = partition(trace.clean_body(module), n_primals, len(carry) + len(found.ys))
    return Plan(
        parts,
        needed,
        carry_specs,
        y_specs,
        closed,
        constants,
        [i for i, wants in enumerate(inputs) if wants] if needed else [],
        found.gradient_specs,
        differentiable if needed else [False] * len(carry),
        y_grads if needed else [False] * len(y_grads),
        cotangents,
    )


@dataclasses.dataclass
class _Gradient:
    """What the counting run differentiates, and with which cotangents."""

    needed: bool
    carry: list[bool]
    ys: list[bool]
    inputs: list[bool]
    cotangents: list[Any]


@dataclasses.dataclass
class _Run:
    module: GraphModule
    start: list[DTensor]
    carry: list[DTensor]
    ys: list[DTensor]
    closed: list[DTensor]
    gradient_specs: list[Any]


def _run(
    body: Body,
    carry_specs: list[Any],
    carry_grads: list[bool],
    xs: list[DTensor],
    x_specs: list[Any],
    x_grads: list[bool],
    closed: list[DTensor],
    trace: TraceContext,
    gradient: _Gradient | None,
) -> _Run:
    """Traces the body once; a trial run, without `gradient`, prints nothing and changes no carry's placement."""
    with tc.no_proxy(), torch.no_grad(), tc.DisableTorchFunction():
        locals_ = [local_like(spec) for spec in carry_specs]
        locals_ += [
            torch.empty_strided(_rest(x.shape), _rest(x.stride()), dtype=x.dtype, device=x.device)
            for x in (x._local_tensor for x in xs)
        ]
        locals_ += [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in (c._local_tensor for c in closed)
        ]
        n_primals = len(locals_)
        locals_ += [local_like(spec) for spec in gradient.cotangents] if gradient is not None else []
    specs = [*carry_specs, *x_specs, *(c._spec for c in closed)]
    wants = [*carry_grads, *x_grads, *(torch.is_grad_enabled() and c.requires_grad for c in closed)]
    n, m = len(carry_specs), len(carry_specs) + len(xs)
    grads = torch.is_grad_enabled()
    run: dict[str, Any] = {"gradients": []}

    def joint(*local: torch.Tensor) -> list[torch.Tensor]:
        with torch.set_grad_enabled(grads):
            primals = [tc.wrap_local(t, s, requires_grad=w) for t, s, w in zip(local[:n_primals], specs, wants)]
            closure = Closure(trace, closed, primals[m:n_primals])
            with closure.active():
                carry, ys = body.call(primals[:n], primals[n:m])
                run.update(start=primals[:n], carry=carry, ys=ys)
                if gradient is not None:
                    carry = body.keep(carry, primals[:n])
                outs: list[Any] = [t.detach() for t in (*carry, *ys)]
                found = (
                    []
                    if gradient is None or not gradient.needed
                    else _gradients(gradient, [*carry, *ys], primals, local[n_primals:], carry_specs, trace)
                )
            run["closed"], run["gradients"] = closure.values, [g._spec for g in found]
            with tc.DisableTorchFunction():
                results = [t._local_tensor.contiguous() if i < n else t._local_tensor for i, t in enumerate(outs)]
                return results + [g._local_tensor.contiguous() for g in found]

    if gradient is None:
        with held_prints():
            module = trace_body(joint, locals_)
    else:
        module = trace_body(joint, locals_)
        if len(run["closed"]) != len(closed):
            raise TraceError(
                "scan: the body uses other values of the step when it is run again",
                fix="make the body a function of its arguments and of values that do not change",
                source=trace.origin.source,
            )
    return _Run(module, run["start"], run["carry"], run["ys"], run["closed"], run["gradients"])


def _rest(sizes: Any) -> list[int]:
    return list(sizes[1:])


def _gradients(
    gradient: _Gradient,
    results: list[DTensor],
    primals: list[DTensor],
    cotangents: Any,
    carry_specs: list[Any],
    trace: TraceContext,
) -> list[DTensor]:
    """One gradient for each differentiated primal; those of the carry at the carry's placement, sums paid."""
    outs = [r for r, d in zip(results, [*gradient.carry, *gradient.ys]) if d]
    inputs = [p for p, wants in zip(primals, gradient.inputs) if wants]
    refuse_other_leaves(outs, primals, trace)
    along = [tc.wrap_local(t, s) for t, s in zip(cotangents, gradient.cotangents)]
    with trace.marked(phase="backward"), tc.DisableTorchFunction():
        live = [(o, c) for o, c in zip(outs, along) if o.requires_grad]
        found: Any = torch.autograd.grad([o for o, _ in live], inputs, [c for _, c in live], allow_unused=True)
        out: list[Any] = []
        index = [i for i, wants in enumerate(gradient.inputs) if wants]
        for i, primal, reached in zip(index, inputs, found):
            value: Any = torch.zeros_like(primal).detach() if reached is None else reached
            if i < len(carry_specs):
                wanted = tuple(_paid(carry_specs[i]).placements)
                if tuple(value.placements) != wanted:
                    with trace.marked(asked=False, reason="the gradient of a scan's carry keeps its placement"):
                        value = value.redistribute(value.device_mesh, wanted)
            out.append(value.detach())
    return out


def refuse_other_leaves(outs: list[DTensor], primals: list[DTensor], trace: TraceContext, name: str = "scan") -> None:
    """A value of the step around the loop that came in unseen would lose its gradient."""
    known = {id(p) for p in primals}
    seen: set[Any] = set()
    stack: list[Any] = [o.grad_fn for o in outs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise GradientError(
                f"{name}: the body differentiates by a value from outside that it gets past torch's functions, "
                f"{tuple(leaf.shape)}",
                fix=f"pass it to {name} as an argument, or use it through px.reshard or an ordinary operator",
                source=trace.origin.source,
            )
        stack.extend(before for before, _ in node.next_functions)


def lift_constants(module: GraphModule, position: int, trace: TraceContext) -> list[torch.Tensor]:
    """Fake tensors that make_fx has stored as attributes become placeholders after the first `position` ones."""
    graph = module.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    lifted: dict[int, Any] = {}
    values: list[torch.Tensor] = []
    anchor = placeholders[position - 1] if position else None
    for node in list(graph.find_nodes(op="get_attr")):
        value: Any = getattr(module, str(node.target), None)
        if not tc.is_fake(value):
            continue
        if id(value) not in lifted:
            with graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes))):
                anchor = graph.placeholder(f"constant_{len(values)}")
            anchor.meta = {**node.meta, "val": value}
            lifted[id(value)] = anchor
            values.append(value)
        node.replace_all_uses_with(lifted[id(value)])
        graph.erase_node(node)
    graph.lint()
    module.recompile()
    return values
