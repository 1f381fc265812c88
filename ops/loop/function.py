"""The loop as a differentiable function of global values: one loop operator forwards, one backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import GradientError
from ptrainx.core.trace_context import TraceContext
from ptrainx.ops.loop.joint import Plan, local_size, stack_spec
from ptrainx.ops.loop.operator import LoopForm, trace_loop
from ptrainx.ops.loop.partition import separate_outputs

__all__ = ["run_loop"]

aten = torch.ops.aten


def run_loop(
    plan: Plan, carry: Sequence[DTensor], xs: Sequence[DTensor], length: int, reverse: bool, trace: TraceContext
) -> tuple[list[DTensor], list[DTensor]]:
    """(last carry, stacked ys) of a planned loop, as nodes of the graph that is being traced."""
    loop = _Loop(plan, len(carry), len(xs), length, reverse, trace)
    operands = [*carry, *xs, *(trace.inside(value) for value in plan.closed)]
    with tc.DisableTorchFunction():
        results: Any = _LoopFunction.apply(loop, *operands)
    return list(results[: len(carry)]), list(results[len(carry) :])


class _Loop:
    """The forward and backward operators of one plan."""

    def __init__(self, plan: Plan, n_carry: int, n_xs: int, length: int, reverse: bool, trace: TraceContext):
        self.plan, self.n_carry, self.n_xs, self.length, self.reverse = plan, n_carry, n_xs, length, reverse
        self.trace, self.origin = trace, trace.origin
        saved = plan.parts.saved_primals
        self.saved_carry = [i for i in saved if i < n_carry]
        self.saved_xs = [i for i in saved if n_carry <= i < n_carry + n_xs]
        self.saved_consts = [i for i in saved if i >= n_carry + n_xs]

    def forward(self, operands: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(results, what the backward loop reads), local tensors."""
        plan, body = self.plan, self.plan.parts.forward
        _append_outputs(body, self.saved_carry)
        separate_outputs(body, self.n_carry)
        form = LoopForm(self.n_carry, self.n_xs, self.length, self.reverse)
        outs = trace_loop(body, form, *operands, *plan.constants)
        n = self.n_carry + len(plan.y_specs)
        return list(outs[:n]), list(outs[n:])

    def backward(self, operands: list[torch.Tensor], saved: list[torch.Tensor], cotangents: list[torch.Tensor]) -> Any:
        """The gradients of the differentiated operands, local tensors: stacked for xs, summed for the rest."""
        plan = self.plan
        n_cotangent_carry = sum(plan.carry_differentiable)
        summed = [k for k, i in enumerate(plan.differentiated) if i >= self.n_carry + self.n_xs]
        body = _backward_body(self, n_cotangent_carry, summed)
        separate_outputs(body, n_cotangent_carry + len(summed))
        every = [*operands, *plan.constants]
        values, carries = saved[: plan.parts.n_saved], saved[plan.parts.n_saved :]
        outputs = list(next(iter(body.graph.find_nodes(op="output"))).args[0])
        zeros = [
            torch.zeros(v.shape, dtype=v.dtype, device=v.device)
            for v in (node.meta["val"] for node in outputs[n_cotangent_carry : n_cotangent_carry + len(summed)])
        ]
        first = [*cotangents[:n_cotangent_carry], *zeros]
        xs = [*carries, *(every[i] for i in self.saved_xs), *values, *cotangents[n_cotangent_carry:]]
        form = LoopForm(len(first), len(xs), self.length, not self.reverse)
        return trace_loop(body, form, *first, *xs, *(every[i] for i in self.saved_consts)), n_cotangent_carry, summed


def _append_outputs(body: GraphModule, indices: Sequence[int]) -> None:
    """Gives out the carries, as they came in, behind everything else."""
    placeholders = list(body.graph.find_nodes(op="placeholder"))
    output = next(iter(body.graph.find_nodes(op="output")))
    output.args = ([*output.args[0], *(placeholders[i] for i in indices)],)


def _backward_body(loop: _Loop, n_cotangent_carry: int, summed: list[int]) -> GraphModule:
    """The backward part in a loop's form.

    `(*cotangents of the carry, *sums | *saved carries, *saved xs, *saved values, *cotangents of ys | *saved consts)` to
    `[*cotangents of the carry, *sums, *gradients of xs]`.
    """
    plan, old = loop.plan, loop.plan.parts.backward
    parts = plan.parts
    placeholders = list(old.graph.find_nodes(op="placeholder"))
    n_primals, n_values = len(parts.saved_primals), parts.n_saved
    primal = dict(zip(parts.saved_primals, placeholders[:n_primals]))
    values = placeholders[n_primals : n_primals + n_values]
    cotangents = placeholders[n_primals + n_values :]
    gradients: list[Node] = list(next(iter(old.graph.find_nodes(op="output"))).args[0])
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}

    def enter(nodes: Sequence[Node]) -> None:
        for node in nodes:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)

    enter(cotangents[:n_cotangent_carry])
    sums = []
    for k in summed:
        sums.append(graph.placeholder(f"sum_{k}"))
        sums[-1].meta = {**gradients[k].meta, "val": _fresh(gradients[k])}
    enter([primal[i] for i in loop.saved_carry])
    enter([primal[i] for i in loop.saved_xs])
    enter(values)
    enter(cotangents[n_cotangent_carry:])
    enter([primal[i] for i in loop.saved_consts])
    for node in old.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    position = {i: k for k, i in enumerate(plan.differentiated)}
    carries = [copies[gradients[position[i]]] for i, d in enumerate(plan.carry_differentiable) if d]
    totals = []
    for k, total in zip(summed, sums):
        node = graph.call_function(aten.add.Tensor, (total, copies[gradients[k]]))
        node.meta = {**gradients[k].meta, "val": _fresh(gradients[k])}
        totals.append(node)
    of_xs = [
        copies[gradients[k]] for k, i in enumerate(plan.differentiated) if loop.n_carry <= i < loop.n_carry + loop.n_xs
    ]
    output = graph.output([*carries, *totals, *of_xs])
    output.meta = {}
    graph.lint()
    return GraphModule(old, graph)


def _fresh(node: Node) -> torch.Tensor:
    """A fake tensor like a node's value, with memory of its own."""
    value = node.meta["val"]
    with tc.no_dispatch_modes(), value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


class _LoopFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loop: _Loop, *operands: DTensor) -> Any:
        plan = loop.plan
        local = [value._local_tensor for value in operands]
        local[: loop.n_carry] = [t.contiguous() for t in local[: loop.n_carry]]
        results, saved = loop.forward(local)
        ctx.loop, ctx.local, ctx.saved = loop, local, saved
        ctx.set_materialize_grads(False)
        specs = [*plan.carry_specs, *(stack_spec(s, loop.length) for s in plan.y_specs)]
        wrapped = [tc.wrap_local(t, s) for t, s in zip(results, specs)]
        differentiable = [*plan.carry_differentiable, *plan.y_differentiable]
        ctx.mark_non_differentiable(*[w for w, d in zip(wrapped, differentiable) if not d])
        return tuple(wrapped)

    @staticmethod
    def backward(ctx: Any, *cotangents: DTensor | None) -> Any:
        loop, plan = ctx.loop, ctx.loop.plan
        if torch.is_grad_enabled():
            raise GradientError(
                "scan is differentiated twice by torch.autograd.grad(create_graph=True)",
                fix="nest px.grad instead",
                source=loop.origin.source,
            )
        with loop.trace.marked(source=loop.origin.source, phase="backward"):
            local = _local_cotangents(loop, cotangents)
            outs, n_carry, summed = loop.backward(ctx.local, ctx.saved, local)
        ctx.saved = None
        n, m = loop.n_carry, loop.n_carry + loop.n_xs
        found: list[Any] = [None] * (len(ctx.local))
        spec_of = dict(zip(plan.differentiated, plan.gradient_specs))
        of_carry = iter(outs[:n_carry])
        for i, differentiable in enumerate(plan.carry_differentiable):
            if differentiable:
                found[i] = tc.wrap_local(next(of_carry), spec_of[i])
        for k, total in zip(summed, outs[n_carry:]):
            i = plan.differentiated[k]
            found[i] = tc.wrap_local(total, spec_of[i])
        of_xs = [i for i in plan.differentiated if n <= i < m]
        for i, stack in zip(of_xs, outs[n_carry + len(summed) :]):
            found[i] = tc.wrap_local(stack, stack_spec(spec_of[i], loop.length))
        return None, *found


def _local_cotangents(loop: _Loop, cotangents: Sequence[DTensor | None]) -> list[torch.Tensor]:
    """The cotangents of the differentiable results, at the placements that the backward body was traced for."""
    plan, out = loop.plan, []
    specs = iter(plan.cotangent_specs)
    for i, differentiable in enumerate([*plan.carry_differentiable, *plan.y_differentiable]):
        if not differentiable:
            continue
        spec = next(specs)
        spec = spec if i < loop.n_carry else stack_spec(spec, loop.length)
        value = cotangents[i]
        if value is None:
            local = _zeros(spec)
        else:
            if tuple(value.placements) != tuple(spec.placements):
                with loop.trace.marked(asked=False, reason="the gradient of a scan's result keeps its placement"):
                    value = value.redistribute(value.device_mesh, spec.placements)
            local = value._local_tensor.contiguous()
        out.append(local)
    return out


def _zeros(spec: Any) -> torch.Tensor:
    return torch.zeros(local_size(spec), dtype=spec.tensor_meta.dtype, device=spec.mesh.device_type)
