"""A graph, run node by node: the slow reference that nothing of the lowering takes part in.

In: a rank's graph before or after any pass, and local tensors. Out: its results. Collectives are left to whoever drives
it.
"""

from __future__ import annotations

import operator
from collections.abc import Generator
from typing import Any

import torch
from torch.fx import Graph, Node

from ptrainx.compile.graph import (
    IMPURE,
    axis_group,
    body_of,
    is_call,
    is_collective,
    is_loop,
    is_pure,
    is_wait,
    loop_of,
    origin_of,
    schema_name,
)
from ptrainx.compile.lower import CollectiveCall
from ptrainx.compile.passes.emit import operand_of
from ptrainx.compile.program import RankGraph
from ptrainx.ops.loop.operator import new_stack

__all__ = ["interpret"]

Run = Generator[tuple[CollectiveCall, torch.Tensor], torch.Tensor, list[Any]]


def interpret(graph: RankGraph, args: list[torch.Tensor]) -> Run:
    """Runs a graph; prints and other effects are left out.

    Args:
        graph: any legal graph: none writes into its arguments.
        args: local tensors, arguments and captured values.

    Yields:
        (collective, its operand); wants to be sent the result.

    Returns:
        the results.
    """
    return (yield from _run(graph, graph.module.graph, list(args)))


def _run(owner: RankGraph, graph: Graph, args: list[Any]) -> Run:
    values: dict[Node, Any] = {}
    given = iter(args)
    live = _live(graph)
    last: dict[Node, Node] = {operand: node for node in graph.nodes for operand in node.all_input_nodes}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node not in live:
            continue
        elif node.op == "get_attr":
            values[node] = getattr(graph.owning_module, str(node.target))
        elif node.op == "output":
            results: Any = node.args[0]
            return [values[r] for r in results]
        elif is_collective(node):
            call, operand = _call(owner, node), values[operand_of(node)]
            values[node] = yield call, operand.contiguous()
        elif is_wait(node):
            values[node] = values[operand_of(node)]
        elif is_loop(node):
            loop = loop_of(node)
            operands = [values[o] for group in loop.operands for o in group]
            values[node] = yield from _loop(owner, loop.body.graph, loop.form, operands)
        elif is_call(node):
            operands = [values[o] for o in node.args[1:]]
            values[node] = yield from _run(owner, body_of(node).graph, operands)
        elif schema_name(node) in ("ptrainx::send", "ptrainx::received"):
            values[node] = yield _message(owner, node), values[node.args[0]]
        elif schema_name(node) == "ptrainx::receive":
            values[node] = None
        elif schema_name(node) not in IMPURE:
            values[node] = _apply(node, values)
        for operand_node in [o for o in node.all_input_nodes if last[o] is node]:
            values.pop(operand_node, None)
    raise AssertionError("a graph without an output")


def _live(graph: Graph) -> set[Node]:
    """What results and effects need. A trace leaves more behind: attempts at an operator that failed, for one."""
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or not is_pure(node) or any(user in live for user in node.users):
            live.add(node)
    return live


def _apply(node: Node, values: dict[Node, Any]) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = operator.getitem if node.target is operator.getitem else node.target
    return target(*args, **kwargs)


def _loop(owner: RankGraph, body: Graph, form: Any, operands: list[Any]) -> Run:
    carry, xs, consts = form.split(operands)
    stacks: list[torch.Tensor] = []
    for i in form.order:
        outs = yield from _run(owner, body, [*carry, *(x[i] for x in xs), *consts])
        carry, ys = outs[: form.n_carry], outs[form.n_carry :]
        stacks = stacks or [new_stack(y, form.length) for y in ys]
        for stack, y in zip(stacks, ys):
            stack[i].copy_(y)
    return [*carry, *stacks]


def _message(owner: RankGraph, node: Node) -> CollectiveCall:
    operand: Any = node.args[0]
    posted: Any = node if schema_name(node) == "ptrainx::send" else operand
    peer, tag, group = posted.args[-3:]
    value, axis = operand.meta["val"], owner.axis_of[group]
    return CollectiveCall(schema_name(node), (peer, tag), axis, origin_of(node), tuple(value.shape), value.dtype)


def _call(owner: RankGraph, node: Node) -> CollectiveCall:
    value, axis = operand_of(node).meta["val"], owner.axis_of[axis_group(node)]
    return CollectiveCall(
        schema_name(node), tuple(node.args[1:-1]), axis, origin_of(node), tuple(value.shape), value.dtype
    )
