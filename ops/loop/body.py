"""The graph of a loop's body: traced over local tensors, inside the trace of the step around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["trace_body"]


def trace_body(body: Callable[..., Any], operands: Sequence[torch.Tensor]) -> GraphModule:
    """The graph of a function of local tensors; its nodes' values tell which of them share memory.

    In a trace inside another one `make_fx` notes copies of the operands as its placeholders' values, so that a view of
    an operand would seem to have memory of its own, and the operand be free to be overwritten under it.
    """
    module = make_fx(body, tracing_mode="real")(*operands)
    for node, operand in zip(module.graph.find_nodes(op="placeholder"), operands):
        node.meta["val"] = operand
    return module
