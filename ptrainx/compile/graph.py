"""What a legal graph is, and the questions that passes ask of one.

A legal graph has its placeholders first, only ATen operators, our own operators, functional collectives, loops and
`getitem` after them, and one output, a list. Every collective's result is read by `wait_tensor` alone, and everyone
else reads the wait. No operator writes into a placeholder.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import Origin
from ptrainx.mesh.exchange import COLLECTIVES
from ptrainx.ops.call import CALL
from ptrainx.ops.loop import LOOP, LoopForm
from ptrainx.ops.pieces import ALL_GATHER_PIECES, REDUCE_SCATTER_PIECES

__all__ = [
    "IMPURE",
    "Loop",
    "alias_roots",
    "axis_group",
    "body_of",
    "called_bodies",
    "check_legal",
    "copy_module",
    "is_call",
    "is_collective",
    "is_loop",
    "is_pure",
    "is_wait",
    "keeps_more",
    "loop_of",
    "loops_of",
    "origin_of",
    "output_node",
    "packs",
    "read_until",
    "schema_name",
    "walk",
    "writes",
]

WAIT = "_c10d_functional::wait_tensor"
IMPURE: set[str] = {"ptrainx::debug_print", "ptrainx::flush", "ptrainx::receive", "ptrainx::received", "ptrainx::send"}
"""Operators whose effect is the point: kept, in order, even if nobody reads their result."""


def schema_name(node: Node) -> str:
    """`aten::add`, or "" for a node that is no operator call."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if node.op == "call_function" and schema is not None else ""


def is_collective(node: Node) -> bool:
    """Whether a node sends anything to other ranks."""
    return schema_name(node) in COLLECTIVES


def is_wait(node: Node) -> bool:
    """Whether a node waits for a collective."""
    return schema_name(node) == WAIT


def packs(node: Node) -> bool:
    """Whether a node only joins what a collective over pieces sends: where ranks are real, that takes the pieces."""
    if schema_name(node) != "aten::cat" or len(node.users) != 1:
        return False
    return next(iter(node.users)).target in (ALL_GATHER_PIECES, REDUCE_SCATTER_PIECES)


def read_until(node: Node) -> list[Node]:
    """The nodes at which a node's operands are read for the last time: a collective reads until it is waited for."""
    if packs(node):
        return [node, *read_until(next(iter(node.users)))]
    return [node, *node.users] if is_collective(node) else [node]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a graph.

    Attributes:
        node: its node.
        name: the attribute of the owning module that holds the body.
        body: a module with a legal graph: placeholders (*carry, *x, *consts), output [*carry, *y].
        form: how operands divide, the number of steps, the direction.
    """

    node: Node
    name: str
    body: torch.fx.GraphModule
    form: LoopForm

    @property
    def operands(self) -> tuple[list[Node], list[Node], list[Node]]:
        """(carry, xs, consts)."""
        return self.form.split(self.node.args[2:])


def is_loop(node: Node) -> bool:
    """Whether a node is a loop."""
    return node.op == "call_function" and node.target is LOOP


def loop_of(node: Node) -> Loop:
    """What a loop's node says."""
    owner: Any = node.args[0]
    form: Any = node.args[1]
    body: Any = getattr(node.graph.owning_module, str(owner.target))
    return Loop(node, str(owner.target), body, LoopForm(*form))


def loops_of(graph: Graph) -> list[Loop]:
    """The loops of a graph, in order; not those inside their bodies."""
    return [loop_of(node) for node in graph.nodes if is_loop(node)]


def is_call(node: Node) -> bool:
    """Whether a node runs a graph of its own, once."""
    return node.op == "call_function" and node.target is CALL


def body_of(node: Node) -> torch.fx.GraphModule:
    """The graph that a call runs."""
    owner: Any = node.args[0]
    return getattr(node.graph.owning_module, str(owner.target))


def called_bodies(graph: Graph) -> dict[str, torch.fx.GraphModule]:
    """Name -> body, of the calls of a graph: each body once, though several nodes may call it."""
    return {str(node.args[0].target): body_of(node) for node in graph.nodes if is_call(node)}


def walk(graph: Graph, times: int = 1, calls: bool = True) -> Iterator[tuple[Node, int]]:
    """Every node with how often it runs, the bodies of loops and calls in their place; those of calls if asked for."""
    for node in graph.nodes:
        if is_loop(node):
            loop = loop_of(node)
            yield from walk(loop.body.graph, times * loop.form.length, calls)
        elif is_call(node):
            if calls:
                yield from walk(body_of(node).graph, times)
        else:
            yield node, times


def copy_module(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a graph that shares no nodes with it, nor do the bodies of its loops."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    output_node(graph).meta = dict(output_node(module.graph).meta)
    copy = torch.fx.GraphModule(module, graph)
    for loop in loops_of(copy.graph):
        setattr(copy, loop.name, copy_module(loop.body))
    for name, body in called_bodies(copy.graph).items():
        setattr(copy, name, copy_module(body))
    return copy


def axis_group(node: Node) -> str:
    """The group name of a collective."""
    return node.args[-1]  # type: ignore[return-value]


def writes(node: Node) -> bool:
    """Whether an operator writes into an operand."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def is_pure(node: Node) -> bool:
    """Whether a node may be dropped when nobody reads it."""
    if node.op in ("placeholder", "output"):
        return False
    if is_loop(node):
        return all(n.op in ("placeholder", "output") or is_pure(n) for n in loop_of(node).body.graph.nodes)
    if is_call(node):
        return all(n.op in ("placeholder", "output") or is_pure(n) for n in body_of(node).graph.nodes)
    return not writes(node) and schema_name(node) not in IMPURE


def output_node(graph: Graph) -> Node:
    """The output."""
    return next(iter(graph.find_nodes(op="output")))


def origin_of(node: Node) -> Origin:
    """Where a node comes from."""
    return (node.meta.get("custom") or {}).get("origin") or Origin()


def alias_roots(graph: Graph) -> dict[Node, int]:
    """Each tensor node's storage: nodes with one number share memory.

    A view shares that of what it is of, though its value need not say so: passes put one node in another one's place.
    """
    roots: dict[Node, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            roots[node] = tc.storage_id(value)
    for node in list(roots):
        base = _viewed(node)
        if base in roots and roots[base] != roots[node]:
            old, new = roots[node], roots[base]
            for other in [n for n, root in roots.items() if root == old]:
                roots[other] = new
    return roots


def _viewed(node: Node) -> Any:
    """What a node is a view of; None for one that is no view, or need not be one."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    schema = getattr(made.target, "_schema", None)
    if schema is None or not schema.arguments or not made.args or schema.name in _MAY_COPY:
        return None
    alias = schema.arguments[0].alias_info
    views = alias is not None and not alias.is_write and schema.returns and schema.returns[0].alias_info is not None
    return made.args[0] if views and isinstance(made.args[0], Node) else None


_MAY_COPY = {"aten::reshape", "aten::contiguous", "aten::to", "aten::flatten"}


def keeps_more(node: Node) -> bool:
    """Whether whoever holds a value holds more memory than it has elements: a part of a larger one."""
    value: torch.Tensor = node.meta["val"]
    return value.untyped_storage().nbytes() > value.numel() * value.element_size()


def _tensors(values: Any) -> Iterator[Node]:
    for value in values:
        if isinstance(value, Node):
            yield value


def check_legal(graph: Graph) -> None:
    """Raises AssertionError at the first node that makes a graph illegal; for our own mistakes."""
    body = False
    for node in graph.nodes:
        if node.op == "placeholder":
            assert not body, f"{node}: a placeholder after an operator"
            continue
        body = True
        assert node.op in ("call_function", "get_attr", "output"), f"{node}: a {node.op} node"
        if node.op == "call_function":
            known = schema_name(node) or node.target is operator.getitem or is_loop(node) or is_call(node)
            assert known, f"{node}: {node.target} is no operator"
        if is_collective(node) and not schema_name(node).startswith("_dtensor"):
            assert all(is_wait(u) for u in node.users), f"{node}: read without a wait"
        if is_loop(node):
            check_legal(loop_of(node).body.graph)
    for called in called_bodies(graph).values():
        check_legal(called.graph)
    graph.lint()
