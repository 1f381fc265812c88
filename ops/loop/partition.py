"""A body with its gradient, as one graph, to two bodies: one that runs forwards and one that runs backwards.

The backward body gets what it needs of the forward one: operands again, and *saved* values, which the forward body
gives out. What is cheap is computed again instead: views, and whatever comes from one step's slices alone by gathering,
casting or viewing. So a parameter that is stored sharded is gathered once more rather than kept whole.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ptrainx.core import torch_compat as tc

__all__ = ["Partition", "extract", "is_view", "partition", "separate_outputs"]

_GATHERS = {"_c10d_functional::all_gather_into_tensor", "_c10d_functional::wait_tensor"}
_CASTS = {"aten::_to_copy", "aten::clone", "aten::cat"}


@dataclasses.dataclass(frozen=True)
class Partition:
    """The two bodies.

    Attributes:
        forward: primals -> (*results, *saved values).
        backward: (*saved primals, *saved values, *cotangents) -> gradients.
        saved_primals: indices of the primals that the backward body reads.
        n_saved: how many values the forward body gives out for the backward one.
    """

    forward: GraphModule
    backward: GraphModule
    saved_primals: tuple[int, ...]
    n_saved: int


def partition(joint: GraphModule, n_primals: int, n_results: int) -> Partition:
    """Cuts `joint(*primals, *cotangents) -> [*results, *gradients]`, a graph without writes.

    Args:
        joint: each node with its fake value.
        n_primals: how many of its placeholders are primals.
        n_results: how many of its outputs are results.
    """
    nodes = list(joint.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    primals, cotangents = placeholders[:n_primals], placeholders[n_primals:]
    outputs: list[Node] = list(nodes[-1].args[0])
    results, gradients = outputs[:n_results], outputs[n_results:]
    forward = _ancestors([*results, *(n for n in nodes if _acts(n))])
    forward |= {n for n in nodes if n.target is operator.getitem and n.args[0] in forward}
    cheap = _cheap(nodes, set(primals))
    saved, backward = _needed(gradients, forward, cheap, set(cotangents))
    order = {node: i for i, node in enumerate(nodes)}
    kept = sorted(saved, key=order.__getitem__)
    saved_primals = [n for n in kept if n.op == "placeholder"]
    values = [n for n in kept if n.op != "placeholder"]
    return Partition(
        extract(joint, primals, [*results, *values], forward),
        extract(joint, [*saved_primals, *values, *cotangents], gradients, backward),
        tuple(primals.index(n) for n in saved_primals),
        len(values),
    )


def _acts(node: Node) -> bool:
    return getattr(getattr(node.target, "_schema", None), "name", "") == "ptrainx::debug_print"


def _ancestors(roots: Sequence[Any]) -> set[Node]:
    found: set[Node] = set()
    stack = [r for r in roots if isinstance(r, Node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _cheap(nodes: list[Node], primals: set[Node]) -> set[Node]:
    """Nodes that are computed again rather than saved."""
    from_primals, cheap = set(primals), set()
    for node in nodes:
        if node.op != "call_function":
            continue
        operands = node.all_input_nodes
        name = _name(node)
        pure = all(n in from_primals for n in operands)
        if is_view(node) or (pure and operands and name in _GATHERS | _CASTS):
            cheap.add(node)
            if pure:
                from_primals.add(node)
        elif not operands:
            cheap.add(node)  # constants
    return cheap


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def is_view(node: Node) -> bool:
    """Whether a node's result shares memory with its operand."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return is_view(source)
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _needed(
    gradients: Sequence[Any], forward: set[Node], cheap: set[Node], cotangents: set[Node]
) -> tuple[set[Node], set[Node]]:
    """(what the backward body is given, what it computes)."""
    saved: set[Node] = set()
    computed: set[Node] = set()
    stack = [g for g in gradients if isinstance(g, Node)]
    while stack:
        node = stack.pop()
        if node in saved or node in computed:
            continue
        if node.op == "placeholder":
            (computed if node in cotangents else saved).add(node)
        elif node in forward and node.op != "get_attr" and node not in cheap:
            saved.add(node)
        else:
            computed.add(node)
            stack.extend(node.all_input_nodes)
    return saved, computed


def extract(module: GraphModule, inputs: Sequence[Node], results: Sequence[Any], keep: set[Node]) -> GraphModule:
    """The part of a graph that leads from `inputs` to `results`, by nodes of `keep`, in their order."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in keep and node not in copies and node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output([copies[r] for r in results])
    output.meta = dict(next(iter(module.graph.find_nodes(op="output"))).meta)
    part = GraphModule(module, graph)
    graph.lint()
    return part


def separate_outputs(module: GraphModule, n_carry: int) -> None:
    """Makes a body's results independent: one that shares memory with an operand or another result is copied.

    A carry that comes out as a `y` just as it came in stays: nobody writes into it.
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    output = next(iter(graph.find_nodes(op="output")))
    carries = set(list(placeholders)[:n_carry])
    taken = {_storage(n) for n in placeholders}
    results = []
    for i, node in enumerate(output.args[0]):
        if not (i >= n_carry and node in carries):
            if node.op == "get_attr" or _storage(node) in taken:
                node = _copied(graph, output, node)
            taken.add(_storage(node))
        results.append(node)
    output.args = (results,)
    module.recompile()


def _copied(graph: Graph, output: Node, node: Node) -> Node:
    with graph.inserting_before(output):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    value = node.meta["val"]
    with tc.no_dispatch_modes(), value.fake_mode:
        copy.meta["val"] = value.clone()
    return copy


def _storage(node: Node) -> int:
    return tc.storage_id(node.meta["val"])
