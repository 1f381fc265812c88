"""Replaces operators that write in place by operators that do not, so that later passes may reorder and drop.

Most writes are of one form: `x.add_(y)` on a temporary that nothing views. Those are rewritten one by one. What remains
(writes through views, `index_put_`, `copy_`) is traced once more under torch's functionalization.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functionalize as torch_functionalize
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from ptrainx.compile.graph import IMPURE, alias_roots, schema_name, writes
from ptrainx.compile.program import RankGraph

__all__ = ["functionalize"]


def functionalize(graph: RankGraph) -> RankGraph:
    """The graph without writes; origins are kept."""
    writers = [n for n in graph.module.graph.nodes if writes(n) and schema_name(n) not in IMPURE]
    if not writers:
        return graph
    roots = alias_roots(graph.module.graph)
    order = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    with graph.fake_mode:
        rewritten = [_rewrite(node, roots, order) for node in writers]
    return graph if all(rewritten) else _traced_again(graph)


def _rewrite(node: Node, roots: dict[Node, int], order: dict[Node, int]) -> bool:
    """`x.op_(...)` becomes `op(x, ...)`, and later readers of x read that; False if this write is not so simple."""
    target = _out_of_place(node)
    written = node.args[0] if node.args else None
    if target is None or not isinstance(written, Node) or written.op == "placeholder":
        return False
    if any(root == roots[written] and other not in (node, written) for other, root in roots.items()):
        return False
    before = written.meta["val"]
    value = target(*_values(node.args), **_values(node.kwargs))
    if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != (before.dtype, before.shape):
        return False
    if value.stride() != before.stride():
        return False
    node.target = target
    node.meta["val"] = value
    written.replace_all_uses_with(node, delete_user_cb=lambda user: order.get(user, -1) > order[node])
    del roots[node]
    return True


def _out_of_place(node: Node) -> Any:
    """The operator without the write: `aten::add_.Tensor` -> `aten::add.Tensor`."""
    namespace, name = schema_name(node).split("::")
    if namespace != "aten" or not name.endswith("_") or name.startswith("_"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    overload = node.target._schema.overload_name or "default"  # type: ignore[union-attr]
    return getattr(packet, overload, None)


def _values(args: Any) -> Any:
    return torch.fx.node.map_arg(args, lambda n: n.meta["val"])


def _traced_again(graph: RankGraph) -> RankGraph:
    inputs = [n.meta["val"] for n in graph.module.graph.nodes if n.op == "placeholder"]
    interpreter = torch.fx.Interpreter(graph.module)
    with torch.fx.traceback.preserve_node_meta(), graph.fake_mode, torch.no_grad():
        graph.module = make_fx(torch_functionalize(interpreter.run), tracing_mode="real")(*inputs)
    return graph
