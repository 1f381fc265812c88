"""A graph as text, for people."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ptrainx.compile.graph import (
    axis_group,
    body_of,
    is_call,
    is_collective,
    is_loop,
    loop_of,
    origin_of,
    output_node,
    schema_name,
)
from ptrainx.compile.trace import Argument, Output, Program, RankGraph
from ptrainx.core.avals import DTYPE_NAMES, describe
from ptrainx.mesh.partition_spec import axes_of

__all__ = ["as_text", "node_lines", "placed"]

NOTE_COLUMN = 64
"""Where the note about a line's origin stands, if the line is not longer."""


def as_text(program: Program, graph: RankGraph) -> str:
    """One line a node: `v12: f32[64,256] = mm(v3, a1)  # train.py:31 forward blocks/0/up`.

    Arguments and results are written with their global shape and the axes that split each dim, as
    `f32[2048@data,256]`; between them stand local shapes. A loop is followed by its body, indented.
    """
    writer = _Writer(graph)
    nodes = graph.module.graph
    writer.name(nodes, "a", "v")
    arguments: list[Argument | None] = list(program.arguments)
    lines = [f"{program.name} on {program.mesh}, rank {graph.rank}"]
    for i, node in enumerate(nodes.find_nodes(op="placeholder")):
        argument = arguments[i] if i < len(arguments) else None
        if argument is None:
            lines.append(f"  {writer.names[node]}: {_type(node)} = captured")
        else:
            lines.append(f"  {writer.names[node]}: {placed(argument)} = {_called(argument.path)}")
    lines += writer.body(nodes, "  ")
    result: Any = output_node(nodes).args[0]
    for value, output in zip(result, graph.outputs):
        lines.append(f"  return {writer.names[value]}: {placed(output)} as {output.path}")
    return "\n".join(lines)


def node_lines(graph: RankGraph) -> list[tuple[Node, str]]:
    """Each node that computes or sends, with its line of `as_text`; the bodies of loops in the place of the loops."""
    writer = _Writer(graph)
    writer.name(graph.module.graph, "a", "v")
    return list(writer.lines(graph.module.graph))


def placed(value: Argument | Output) -> str:
    """`f32[2048@data,256]`: the global shape, each dim with the axes that split it."""
    dims = []
    for dim, n in enumerate(value.shape):
        axes = axes_of(value.spec[dim]) if dim < len(value.spec) else ()
        dims.append(f"{n}@{'*'.join(axes)}" if axes else str(n))
    owed = f" owed over {','.join(value.spec.unreduced)}" if value.spec.unreduced else ""
    return f"{DTYPE_NAMES.get(value.dtype, str(value.dtype))}[{','.join(dims)}]{owed}"


class _Writer:
    """Names nodes and writes their lines."""

    def __init__(self, graph: RankGraph):
        self.graph = graph
        self.names: dict[Node, str] = {}
        self.shown: set[int] = set()

    def name(self, graph: Graph, inputs: str, results: str) -> None:
        """Numbers the nodes of a graph from 0."""
        for i, node in enumerate(n for n in graph.nodes if n.op != "output"):
            self.names[node] = f"{inputs if node.op == 'placeholder' else results}{i}"

    def lines(self, graph: Graph) -> Iterator[tuple[Node, str]]:
        """Each node's line, bodies of loops included."""
        for node in graph.nodes:
            if is_loop(node) or is_call(node):
                self._name_body(node)
                yield from self.lines(_body_of(node))
            elif node.op not in ("placeholder", "output"):
                yield node, f"{self.line(node)}  # {_note(node)}"

    def body(self, graph: Graph, indent: str) -> Iterator[str]:
        """The lines of a graph between its arguments and its results."""
        for node in graph.nodes:
            if is_loop(node):
                yield from self._loop(node, indent)
            elif is_call(node):
                yield from self._called(node, indent)
            elif node.op in ("get_attr", "call_function") and not _owns_body(node):
                yield _noted(indent + self.line(node), node)

    def _called(self, node: Node, indent: str) -> Iterator[str]:
        """A call, with the body at its first one."""
        body = body_of(node)
        given = self._list(node.args[1:])  # type: ignore[arg-type]
        yield _noted(f"{indent}{self.names[node]} = {node.args[0].target}({given})", node)  # type: ignore[union-attr]
        if id(body) in self.shown:
            return
        self.shown.add(id(body))
        self._name_body(node)
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for own in placeholders:
            yield f"{indent}  {self.names[own]}: {_type(own)}"
        yield from self.body(body.graph, indent + "  ")
        yield f"{indent}  return {self._list(output_node(body.graph).args[0])}"  # type: ignore[arg-type]

    def line(self, node: Node) -> str:
        """`v2: f32[4,8] = mm(a0, a1)`."""
        kind = _type(node)
        return f"{self.names[node]}{': ' + kind if kind else ''} = {self._call(node)}"

    def _name_body(self, node: Node) -> None:
        self.name(_body_of(node), f"{self.names[node]}.a", f"{self.names[node]}.v")

    def _loop(self, node: Node, indent: str) -> Iterator[str]:
        loop = loop_of(node)
        self._name_body(node)
        given, own = loop.operands, loop.form.split([n for n in loop.body.graph.nodes if n.op == "placeholder"])
        backwards = " backwards" if loop.form.reverse else ""
        yield _noted(f"{indent}{self.names[node]} = {loop.form.length} steps{backwards}:", node)
        for inside, outside, how in zip(own, given, ("from", "in", "=")):
            for a, b in zip(inside, outside):
                yield f"{indent}  {self.names[a]}: {_type(a)} {how} {self.names[b]}"
        yield from self.body(loop.body.graph, indent + "  ")
        results: Sequence[Node] = output_node(loop.body.graph).args[0]  # type: ignore[assignment]
        carried, stacked = results[: loop.form.n_carry], results[loop.form.n_carry :]
        yield f"{indent}  next {self._list(carried)}" + (f"; stack {self._list(stacked)}" if stacked else "")

    def _list(self, nodes: Iterable[Node]) -> str:
        return ", ".join(self.names[n] for n in nodes)

    def _call(self, node: Node) -> str:
        if node.op == "get_attr":
            return f"constant {node.target}"
        if node.target is operator.getitem:
            return f"{self.names[node.args[0]]}[{node.args[1]}]"  # type: ignore[index]
        args = list(node.args)
        if is_collective(node):
            args[-1] = f"axis={self.graph.axis_of[axis_group(node)]}"
        shown = [self._argument(a) for a in args] + [f"{k}={self._argument(v)}" for k, v in node.kwargs.items()]
        return f"{schema_name(node).split('::')[-1]}({', '.join(shown)})"

    def _argument(self, value: object) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(v) for v in value)}]"
        return f"{value:.6g}" if isinstance(value, float) else str(value)


def _called(path: str) -> str:
    return path if path.startswith("argument ") else f"argument {path}"


def _type(node: Node) -> str:
    value = node.meta.get("val")
    return describe(value) if isinstance(value, torch.Tensor) else ""


def _owns_body(node: Node) -> bool:
    """Whether a node only names the body of a loop."""
    return node.op == "get_attr" and all(is_loop(user) or is_call(user) for user in node.users)


def _body_of(node: Node) -> Graph:
    return body_of(node).graph if is_call(node) else loop_of(node).body.graph


def _noted(line: str, node: Node) -> str:
    return f"{line:<{NOTE_COLUMN}}  # {_note(node)}"


def _note(node: Node) -> str:
    """`train.py:31 backward blocks/0/up, asked: gradient of argument 0`."""
    origin = origin_of(node)
    where = " ".join(filter(None, (origin.source, origin.phase, origin.layer)))
    if not is_collective(node):
        return where
    return f"{where}, {'asked' if origin.asked else 'implied'}: {origin.reason}"
