"""Replaces operators that write in place by operators that do not, so that later passes may reorder and drop."""

from __future__ import annotations

import torch
from torch.func import functionalize as torch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from ptrainx.compile.graph import IMPURE, schema_name, writes
from ptrainx.compile.trace import RankGraph

__all__ = ["functionalize"]


def functionalize(graph: RankGraph) -> RankGraph:
    """Traces the graph again under functionalization, only if something in it writes; origins are kept."""
    nodes = graph.module.graph.nodes
    if not any(writes(n) and schema_name(n) not in IMPURE for n in nodes):
        return graph
    inputs = [n.meta["val"] for n in nodes if n.op == "placeholder"]
    interpreter = torch.fx.Interpreter(graph.module)
    with torch.fx.traceback.preserve_node_meta(), graph.fake_mode, torch.no_grad():
        graph.module = make_fx(torch_functionalize(interpreter.run), tracing_mode="real")(*inputs)
    return graph
