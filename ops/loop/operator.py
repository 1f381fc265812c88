"""The operator `loop(body, form, *carry, *xs, *consts) -> (*carry, *ys)`.

`body(*carry, *x, *consts) -> (*carry, *y)` is a graph of local operators. It runs `length` times; `x` is a slice of
each of `xs` along dim 0, and every `y` is stacked along a new dim 0, its strides kept. Results share no memory with
operands, which the body has to see to.

In a graph it is a `call_function` node: `LOOP(get_attr of the body, (n_carry, n_xs, length, reverse), *operands)`, read
by `getitem` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree

from ptrainx.core import torch_compat as tc

__all__ = ["LOOP", "LoopForm", "loop_results", "new_stack", "stack_strides", "trace_loop"]


class LoopForm(NamedTuple):
    """How a loop's operands divide, and how often its body runs.

    Attributes:
        n_carry: the first operands, and results: from step to step.
        n_xs: the operands after them: one slice a step.
        length: the number of steps.
        reverse: from the last slice to the first; `ys` stay in the order of `xs`.
    """

    n_carry: int
    n_xs: int
    length: int
    reverse: bool

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """(carry, xs, consts)."""
        n, m = self.n_carry, self.n_carry + self.n_xs
        return list(operands[:n]), list(operands[n:m]), list(operands[m:])

    @property
    def order(self) -> range:
        """The indices of the slices, in the order of the steps."""
        return range(self.length - 1, -1, -1) if self.reverse else range(self.length)


class _Loop(tc.HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("ptrainx_loop")

    def __call__(self, body: Any, form: Any, *operands: Any) -> Any:
        # A plain tuple in the graph: FX makes a node of its own of a NamedTuple.
        return super().__call__(body, tuple(form), *operands)


LOOP: Any = _Loop()
for _key in ("AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
    LOOP.fallthrough(getattr(tc.DispatchKey, _key))


def stack_strides(value: torch.Tensor) -> tuple[int, ...]:
    """The strides of a stack of such values: theirs, if they fill their memory, else contiguous ones."""
    strides, expected = list(value.stride()), 1
    for size, stride in sorted(zip(value.shape, strides), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            strides = list(torch.empty(value.shape, device="meta").stride())
            break
        expected *= size
    return (max(value.numel(), 1), *strides)


def new_stack(value: torch.Tensor, length: int) -> torch.Tensor:
    """Memory for `length` values like this one."""
    return torch.empty_strided((length, *value.shape), stack_strides(value), dtype=value.dtype, device=value.device)


def loop_results(body: Any, form: LoopForm) -> tuple[torch.Tensor, ...]:
    """Empty tensors like a loop's results: fake ones, under the mode of fake tensors."""
    values = [node.meta["val"] for node in next(iter(body.graph.find_nodes(op="output"))).args[0]]
    carry = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values[: form.n_carry]]
    return (*carry, *(new_stack(v, form.length) for v in values[form.n_carry :]))


@LOOP.py_impl(tc.DispatchKey.CompositeExplicitAutograd)  # type: ignore[untyped-decorator]
def _dense(body: Any, form: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    form = LoopForm(*form)
    carry, xs, consts = form.split(operands)
    stacks: list[torch.Tensor] = []
    for i in form.order:
        outs = body(*carry, *[x[i] for x in xs], *consts)
        carry, ys = list(outs[: form.n_carry]), outs[form.n_carry :]
        stacks = stacks or [new_stack(y, form.length) for y in ys]
        for stack, y in zip(stacks, ys):
            stack[i].copy_(y)
    return (*carry, *stacks)


@tc.register_fake(LOOP, skip_cache=True)
def _fake(body: Any, form: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return loop_results(body, LoopForm(*form))


@LOOP.py_functionalize_impl  # type: ignore[untyped-decorator]
def _functional(ctx: Any, body: Any, form: Any, *operands: torch.Tensor) -> Any:
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(LOOP(body, form, *ctx.unwrap_tensors(operands)))


@LOOP.py_impl(ProxyTorchDispatchMode)  # type: ignore[untyped-decorator]
def _traced(mode: Any, body: Any, form: Any, *operands: torch.Tensor) -> Any:
    form, tracer = LoopForm(*form), mode.tracer
    name = next((name for name, module in tracer.root.named_modules() if module is body), None)
    if name is None:
        name = tracer.get_fresh_qualname("loop_body_")
        tracer.root.register_module(name, body)
    proxies = [tracer.unwrap_proxy(operand) for operand in operands]
    owner = tracer.create_proxy("get_attr", name, (), {})
    proxy = tracer.create_proxy("call_function", LOOP, (owner, tuple(form), *proxies), {}, name="loop")
    with tc.no_proxy():
        results = loop_results(body, form)
    return track_tensor_tree(results, proxy, constant=None, tracer=tracer)


def trace_loop(body: Any, form: LoopForm, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A loop as a node of the graph that is being traced, past any mode of user code."""
    with tc.DisableTorchFunction():
        return _traced(tc.proxy_mode(), body, form, *operands)
