"""The operator `call(body, *operands) -> results`: a graph, as one node of another one.

`body` is a graph of local operators. Several nodes may call one body. Results share no memory with operands or with
each other, which the body has to see to.

In a graph it is a `call_function` node: `CALL(get_attr of the body, *operands)`, read by `getitem` alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree

from ptrainx.core import torch_compat as tc

__all__ = ["CALL", "call_results", "trace_call"]


class _Call(tc.HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("ptrainx_call")

    def __call__(self, body: Any, *operands: Any) -> Any:
        return super().__call__(body, *operands)


CALL: Any = _Call()
for _key in ("AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
    CALL.fallthrough(getattr(tc.DispatchKey, _key))


def call_results(body: Any) -> tuple[torch.Tensor, ...]:
    """Empty tensors like a body's results: fake ones, under the mode of fake tensors."""
    values = [node.meta["val"] for node in next(iter(body.graph.find_nodes(op="output"))).args[0]]
    return tuple(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values)


@CALL.py_impl(tc.DispatchKey.CompositeExplicitAutograd)  # type: ignore[untyped-decorator]
def _dense(body: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(body(*operands))


@tc.register_fake(CALL, skip_cache=True)
def _fake(body: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return call_results(body)


@CALL.py_functionalize_impl  # type: ignore[untyped-decorator]
def _functional(ctx: Any, body: Any, *operands: torch.Tensor) -> Any:
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(CALL(body, *ctx.unwrap_tensors(operands)))


@CALL.py_impl(ProxyTorchDispatchMode)  # type: ignore[untyped-decorator]
def _traced(mode: Any, body: Any, *operands: torch.Tensor) -> Any:
    tracer = mode.tracer
    name = tracer.get_fresh_qualname("call_body_")
    tracer.root.register_module(name, body)
    proxies = [tracer.unwrap_proxy(operand) for operand in operands]
    owner = tracer.create_proxy("get_attr", name, (), {})
    proxy = tracer.create_proxy("call_function", CALL, (owner, *proxies), {}, name="call")
    with tc.no_proxy():
        results = call_results(body)
    return track_tensor_tree(results, proxy, constant=None, tracer=tracer)


def trace_call(body: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A call as a node of the graph that is being traced, past any mode of user code."""
    with tc.DisableTorchFunction():
        return _traced(tc.proxy_mode(), body, *operands)
