"""A piece of a pipeline, the prologue, a layer or the epilogue, to graphs of its forward and of its gradients.

It is traced once, with its gradient behind it, over fake local tensors; DTensor chooses the placements inside. The
graph is cut by what depends on what: the forward; the gradient of the activations that came in; the gradients of
weights. What the latter two need of the forward is saved. To DTensor every stage sees the same values, replicated over
the pipeline's axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import TraceContext
from ptrainx.mesh.placement import contiguous_strides
from ptrainx.ops.debug_print import held_prints
from ptrainx.ops.loop.body import trace_body
from ptrainx.ops.loop.closure import Closure
from ptrainx.ops.loop.joint import lift_constants, local_size, refuse_other_leaves
from ptrainx.ops.loop.partition import extract, is_view, partition, separate_outputs

__all__ = ["Piece", "Slot", "paid", "placed", "trace_piece", "try_piece"]

Call = Callable[[list[DTensor], list[DTensor]], tuple[list[DTensor], list[DTensor]]]


@dataclasses.dataclass(frozen=True)
class Slot:
    """What a piece is given in one place: its DTensorSpec, its local tensor's layout, whether it is differentiated."""

    spec: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    wants: bool

    @classmethod
    def like(cls, value: DTensor) -> Slot:
        """That of a value."""
        local = value._local_tensor
        wants = torch.is_grad_enabled() and value.requires_grad
        return cls(value._spec, tuple(local.shape), tuple(local.stride()), wants)

    @classmethod
    def of(cls, spec: Any, wants: bool) -> Slot:
        """Of a contiguous local tensor."""
        shape = local_size(spec)
        return cls(spec, shape, contiguous_strides(shape), wants)

    def twin(self) -> torch.Tensor:
        """An empty local tensor."""
        meta = self.spec.tensor_meta
        return torch.empty_strided(self.shape, self.stride, dtype=meta.dtype, device=self.spec.mesh.device_type)


def placed(spec: Any, placements: Sequence[Any]) -> Any:
    """The DTensorSpec of such a value elsewhere."""
    meta = spec.tensor_meta
    return tc.make_spec(spec.mesh, tuple(placements), meta.shape, contiguous_strides(meta.shape), meta.dtype)


def paid(spec: Any) -> Any:
    """Where the cotangent of such a value lives: that of an owed sum is replicated."""
    replicate = torch.distributed.tensor.Replicate()
    return placed(spec, [replicate if p.is_partial() else p for p in spec.placements])


@dataclasses.dataclass
class Piece:
    """The graphs of a piece.

    Attributes:
        name: "prologue", "stage" or "epilogue".
        forward: (*inputs, *weights, *closed, *constants) -> (*results, *aux, *saved values).
        n_inputs: how many activations come in.
        n_given: how many operands there are before the closed values.
        n_results, n_aux: how many results.
        saved_primals: which operands of the forward the gradients read.
        backward, input, weight: (*saved primals, *saved values, *cotangents) -> gradients; `input` gives those of the
            activations and what `weight` needs of it, which takes that behind the rest.
        n_passed: how many values `weight` takes of `input`, whose last results they are.
        input_grads: which activations `backward` gives gradients of, first.
        weight_grads: which of the other operands, behind them.
        gradient_specs: of those.
        closed: values of the step around the pipeline.
        constants: local tensors.
        result_specs, aux_specs: DTensorSpecs.
        taken: which results have cotangents.
    """

    name: str
    forward: GraphModule
    n_inputs: int
    n_given: int
    n_results: int
    n_aux: int
    saved_primals: tuple[int, ...]
    backward: GraphModule | None
    input: GraphModule | None
    weight: GraphModule | None
    n_passed: int
    input_grads: list[int]
    weight_grads: list[int]
    gradient_specs: list[Any]
    closed: list[DTensor]
    constants: list[torch.Tensor]
    result_specs: list[Any]
    aux_specs: list[Any]
    taken: list[int]


@dataclasses.dataclass
class _Run:
    module: GraphModule
    results: list[DTensor]
    aux: list[DTensor]
    closed: list[DTensor]
    reached: list[int]
    gradient_specs: list[Any]
    taken: list[int]


def try_piece(
    call: Call, inputs: Sequence[Slot], weights: Sequence[Slot], closed: list[DTensor], trace: TraceContext
) -> tuple[list[DTensor], list[DTensor]]:
    """(results, closed values) of a trial, whose graph is thrown away."""
    with held_prints():
        run = _trace(call, inputs, weights, closed, trace, None, {})
    return run.results, run.closed


def trace_piece(
    name: str,
    call: Call,
    inputs: Sequence[Slot],
    weights: Sequence[Slot],
    closed: list[DTensor],
    trace: TraceContext,
    wanted: Mapping[int, tuple[Any, ...]],
) -> Piece:
    """Traces a piece.

    Args:
        name: what messages call it.
        call: (activations, weights) -> (results, aux).
        inputs: the activations that come in.
        weights: a layer's parameters, a microbatch's leaves.
        closed: what a trial has found that it uses of the step around it.
        trace: the running one.
        wanted: identity of a closed value -> the placements of its gradient, where other pieces have another one.
    """
    run = _trace(call, inputs, weights, closed, trace, len(inputs), wanted)
    with tc.DisableTorchFunction():
        n_given = len(inputs) + len(weights) + len(closed)
        constants = lift_constants(run.module, n_given, trace)
        n_results, n_aux = len(run.results), len(run.aux)
        parts = partition(trace.clean_body(run.module), n_given + len(constants), n_results + n_aux)
        backward = parts.backward if run.reached else None
        whole, weight, n_passed = None, None, 0
        if backward is not None:
            whole, weight, n_passed = _split(backward, sum(i < len(inputs) for i in run.reached))
            for body in (backward, whole, weight):
                separate_outputs(body, 0)
        separate_outputs(parts.forward, 0)
    input_grads = [i for i in run.reached if i < len(inputs)]
    weight_grads = [i for i in run.reached if i >= len(inputs)]
    return Piece(
        name,
        parts.forward,
        len(inputs),
        len(inputs) + len(weights),
        n_results,
        n_aux,
        parts.saved_primals,
        backward,
        whole,
        weight,
        n_passed,
        input_grads,
        weight_grads,
        run.gradient_specs,
        run.closed,
        constants,
        [r._spec for r in run.results],
        [a._spec for a in run.aux],
        run.taken,
    )


def _trace(
    call: Call,
    inputs: Sequence[Slot],
    weights: Sequence[Slot],
    closed: list[DTensor],
    trace: TraceContext,
    differentiate: int | None,
    wanted: Mapping[int, tuple[Any, ...]],
) -> _Run:
    slots = [*inputs, *weights, *(Slot.like(value) for value in closed)]
    n_given, n = len(inputs) + len(weights), len(inputs)
    grads = torch.is_grad_enabled()
    found: dict[str, Any] = {"reached": [], "gradients": [], "taken": []}
    with tc.no_proxy(), torch.no_grad(), tc.DisableTorchFunction():
        twins = [slot.twin() for slot in slots]

    def joint(*local: torch.Tensor) -> list[torch.Tensor]:
        with torch.set_grad_enabled(grads):
            primals = [tc.wrap_local(t, s.spec, requires_grad=s.wants) for t, s in zip(local, slots)]
            closure = Closure(trace, closed, primals[n_given:])
            with closure.active():
                results, aux = call(primals[:n], primals[n:n_given])
                found.update(results=results, aux=aux)
                outs: list[Any] = [t.detach() for t in (*results, *aux)]
                gradients: list[DTensor] = []
                if differentiate is not None and grads:
                    found["taken"] = [i for i, r in enumerate(results) if r.requires_grad]
                    gradients = _gradients(
                        results, primals, local[len(slots) :], found, wanted, closed, n, n_given, trace
                    )
            found["closed"], found["gradients"] = closure.values, [g._spec for g in gradients]
            with tc.DisableTorchFunction():
                return [t._local_tensor.contiguous() for t in (*outs, *gradients)]

    if differentiate is not None and grads:
        # Which results have cotangents, and where these live, a first run tells.
        with held_prints():
            first = _trace(call, inputs, weights, closed, trace, None, {})
        cotangents = [paid(r._spec) for r in first.results if r.requires_grad]
        with tc.no_proxy(), torch.no_grad(), tc.DisableTorchFunction():
            twins += [Slot.of(spec, False).twin() for spec in cotangents]
        found["cotangents"] = cotangents
    module = trace_body(joint, twins)
    return _Run(
        module,
        found["results"],
        found["aux"],
        found["closed"],
        found["reached"],
        found["gradients"],
        found["taken"],
    )


def _gradients(
    results: list[DTensor],
    primals: list[DTensor],
    cotangents: Sequence[torch.Tensor],
    found: dict[str, Any],
    wanted: Mapping[int, tuple[Any, ...]],
    closed: list[DTensor],
    n_inputs: int,
    n_given: int,
    trace: TraceContext,
) -> list[DTensor]:
    along = [tc.wrap_local(t, s) for t, s in zip(cotangents, found["cotangents"])]
    outs = [r for r in results if r.requires_grad]
    index = [i for i, p in enumerate(primals) if p.requires_grad]
    if not outs or not index:
        return []
    refuse_other_leaves(outs, primals, trace, "pipeline")
    with trace.marked(phase="backward"), tc.DisableTorchFunction():
        reached: Any = torch.autograd.grad(outs, [primals[i] for i in index], along, allow_unused=True)
        out = []
        for i, value in zip(index, reached):
            if value is None:
                continue
            placements = tuple(value.placements)
            if i < n_inputs:
                placements = tuple(paid(primals[i]._spec).placements)
            elif i >= n_given:
                placements = wanted.get(id(closed[i - n_given]), placements)
            if placements != tuple(value.placements):
                with trace.marked(asked=False, reason="gradients of a pipeline's stages keep one placement"):
                    value = value.redistribute(value.device_mesh, placements)
            found["reached"].append(i)
            out.append(value.detach())
    return out


def _split(backward: GraphModule, n_inputs: int) -> tuple[GraphModule, GraphModule, int]:
    """(gradients of activations and what the rest needs of it, the rest, how much that is)."""
    nodes = list(backward.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    gradients: list[Node] = list(nodes[-1].args[0])
    of_inputs, of_weights = gradients[:n_inputs], gradients[n_inputs:]
    first = _ancestors(of_inputs, set())
    first_own = {n for n in first if n.op != "placeholder"}
    passed: list[Node] = []
    rest: set[Node] = set()
    stack = list(of_weights)
    while stack:
        node = stack.pop()
        if node in rest or node in passed:
            continue
        if node in first_own and not is_view(node) and isinstance(node.meta.get("val"), torch.Tensor):
            passed.append(node)
        elif node.op != "placeholder":
            rest.add(node)
            stack.extend(node.all_input_nodes)
    order = {node: i for i, node in enumerate(nodes)}
    passed.sort(key=order.__getitem__)
    whole = extract(backward, placeholders, [*of_inputs, *passed], first_own)
    weight = extract(backward, [*placeholders, *passed], of_weights, rest)
    return whole, weight, len(passed)


def _ancestors(roots: Sequence[Node], stop: set[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found and node not in stop:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
