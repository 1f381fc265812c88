"""Graphs with loops, made by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ptrainx.compile.graph import loops_of
from ptrainx.compile.trace import RankGraph
from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import Origin
from ptrainx.ops.loop import LOOP, LoopForm

__all__ = ["looped", "rank_graph", "traced"]


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> GraphModule:
    """A function of float tensors of these shapes as a graph with fake values; it returns a list."""
    with tc.FakeTensorMode() as mode:
        return make_fx(fn, tracing_mode="real")(*[mode.from_tensor(torch.empty(s)) for s in shapes])


def looped(body: Callable[..., Any], length: int, *shapes: tuple[int, ...]) -> GraphModule:
    """A graph of one loop: the body's operands are its carry, and it returns them, changed."""
    inside = body if isinstance(body, GraphModule) else traced(body, *shapes)
    form = LoopForm(len(shapes), 0, length, False)
    return traced(lambda *operands: list(LOOP(inside, form, *operands)), *shapes)


def rank_graph(module: GraphModule, axis_of: Mapping[str, str], origin: Origin) -> RankGraph:
    """A module as rank 0's graph, every node from one origin."""
    modules = [module]
    while modules:
        graph = modules.pop().graph
        for node in graph.nodes:
            node.meta["custom"] = {"origin": origin}
        modules += [loop.body for loop in loops_of(graph)]
    return RankGraph(module, 0, [], [], None, (), None, dict(axis_of))
