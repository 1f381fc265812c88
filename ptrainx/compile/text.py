"""A graph as text, for people."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.graph import axis_group, is_collective, origin_of, schema_name
from ptrainx.compile.trace import Argument, Output, Program, RankGraph
from ptrainx.core.avals import DTYPE_NAMES, describe
from ptrainx.mesh.partition_spec import axes_of

__all__ = ["as_text"]


def as_text(program: Program, graph: RankGraph) -> str:
    """One line a node: `v12: f32[64,256] = mm(v3, a1)  # train.py:31 forward`.

    Arguments and results are written with their global shape and the axes that split each dim, as
    `f32[2048@data,256]`; between them stand local shapes.
    """
    names: dict[Node, str] = {}
    lines = [f"{program.name} on {program.mesh}, rank {graph.rank}"]
    arguments: list[Argument | None] = list(program.arguments)
    for node in graph.module.graph.nodes:
        if node.op == "output":
            break
        names[node] = f"{'a' if node.op == 'placeholder' else 'v'}{len(names)}"
        value = node.meta.get("val")
        kind = describe(value) if isinstance(value, torch.Tensor) else ""
        if node.op == "placeholder":
            index = len(names) - 1
            argument = arguments[index] if index < len(arguments) else None
            told = f"{placed(argument)} = argument {argument.path}" if argument else f"{kind} = captured"
            lines.append(f"  {names[node]}: {told}")
        else:
            lines.append(f"  {names[node]}: {kind} = {_call(node, names, graph)}  # {_note(node)}")
    result: Any = next(iter(graph.module.graph.find_nodes(op="output"))).args[0]
    for value, output in zip(result, graph.outputs):
        lines.append(f"  return {names[value]}: {placed(output)} as {output.path}")
    return "\n".join(lines)


def placed(value: Argument | Output) -> str:
    """`f32[2048@data,256]`: the global shape, each dim with the axes that split it."""
    dims = []
    for dim, n in enumerate(value.shape):
        axes = axes_of(value.spec[dim]) if dim < len(value.spec) else ()
        dims.append(f"{n}@{'*'.join(axes)}" if axes else str(n))
    owed = f" owed over {','.join(value.spec.unreduced)}" if value.spec.unreduced else ""
    return f"{DTYPE_NAMES.get(value.dtype, str(value.dtype))}[{','.join(dims)}]{owed}"


def _call(node: Node, names: dict[Node, str], graph: RankGraph) -> str:
    if node.op == "get_attr":
        return f"constant {node.target}"
    if node.target is operator.getitem:
        return f"{names[node.args[0]]}[{node.args[1]}]"  # type: ignore[index]
    args = list(node.args)
    if is_collective(node):
        args[-1] = f"axis={graph.axis_of[axis_group(node)]}"
    shown = [_argument(a, names) for a in args] + [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
    return f"{schema_name(node).split('::')[-1]}({', '.join(shown)})"


def _argument(value: object, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v, names) for v in value)}]"
    return str(value)


def _note(node: Node) -> str:
    origin = origin_of(node)
    if not is_collective(node):
        return f"{origin.source} {origin.phase}"
    return f"{origin.source} {origin.phase}, {'asked' if origin.asked else 'implied'}: {origin.reason}"
