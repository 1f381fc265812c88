"""A rank's graph to Python: one function of straight-line calls, each value dropped after its last reader.

Two forms of one code. `direct` calls collectives on process groups; `lockstep` is a generator that yields at each
collective, for the simulator to compute across ranks. Next stage: `executable`.
"""

from __future__ import annotations

import dataclasses
import linecache
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.channel import Channel
from ptrainx.compile.graph import alias_roots, axis_group, is_collective, is_wait, origin_of, schema_name
from ptrainx.compile.kernels import callable_of, choose_kernel
from ptrainx.compile.reuse import in_place_target, plan_reuse
from ptrainx.compile.trace import RankGraph
from ptrainx.core.trace_context import Origin

__all__ = ["CollectiveCall", "generate"]


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
    """A collective as the lockstep run sees it: operator, arguments between tensor and group, mesh axis, origin."""

    name: str
    args: tuple[Any, ...]
    axis: str
    origin: Origin
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Writer:
    def __init__(self, graph: RankGraph, channels: Mapping[str, Channel] | None, donated: set[int]):
        self.graph, self.channels = graph, channels
        self.nodes = list(graph.module.graph.nodes)
        self.names: dict[Node, str] = {}
        self.bound: dict[str, Any] = {}
        self.constants: dict[int, str] = {}
        self.calls: list[CollectiveCall] = []
        self.lines: list[str] = []
        self.donated = donated
        self.roots = alias_roots(graph.module.graph)
        # Simulated ranks may hold one tensor in common, so there a donated argument is let go of, not overwritten.
        self.reused = plan_reuse(graph.module.graph, donated if channels is not None else set())

    def write(self) -> tuple[str, dict[str, Any]]:
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        for i, node in enumerate([*placeholders, *(n for n in self.nodes if n.op not in ("placeholder", "output"))]):
            self.names[node] = f"a{i}" if node.op == "placeholder" else f"v{i}"
        last_reader = self._last_readers()
        if placeholders:
            self.lines.append(f"[{', '.join(self.names[n] for n in placeholders)}] = args")
        self.lines.append("args.clear()")
        unread = [self.names[n] for n in placeholders if not n.users]
        if unread:
            self.lines.append(f"del {', '.join(unread)}")
        for node in self.nodes:
            if node.op == "output":
                self.lines.append(f"return [{', '.join(self._outputs(node))}]")
            elif node.op != "placeholder":
                self.lines.append(f"{self.names[node]} = {self._expression(node)}")
                dead = [self.names[n] for n in last_reader.get(node, ())]
                if not node.users:
                    dead.append(self.names[node])
                if dead:
                    self.lines.append(f"del {', '.join(dead)}")
        return "def step(args):\n" + "".join(f"    {line}\n" for line in self.lines), self.bound

    def _last_readers(self) -> dict[Node, list[Node]]:
        last: dict[Node, Node] = {}
        for node in self.nodes:
            for operand in node.all_input_nodes:
                last[operand] = node
        readers: dict[Node, list[Node]] = {}
        for operand, reader in last.items():
            if reader.op != "output":
                readers.setdefault(reader, []).append(operand)
        return readers

    def _outputs(self, node: Node) -> list[str]:
        """The results; one that shares memory with an argument that is kept, or with another result, is copied."""
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        taken = {self.roots[n] for i, n in enumerate(placeholders) if i not in self.donated and n in self.roots}
        out = []
        for value in node.args[0]:  # type: ignore[union-attr]
            assert isinstance(value, Node)
            root = self.roots[value]
            out.append(
                f"{self.bind('clone', torch.clone)}({self.names[value]})" if root in taken else self.names[value]
            )
            taken.add(root)
        return out

    def _expression(self, node: Node) -> str:
        if node.op == "get_attr":
            return self.bind(f"const_{node.target}".replace(".", "_"), getattr(self.graph.module, str(node.target)))
        if node.target is operator.getitem:
            return f"{self.names[node.args[0]]}[{node.args[1]}]"  # type: ignore[index]
        if is_collective(node):
            return self._collective(node)
        if is_wait(node):
            return f"{self.names[node.args[0]]}.wait()" if self.channels is not None else self.names[node.args[0]]  # type: ignore[index]
        args = list(node.args)
        if node in self.reused:
            kernel = callable_of(in_place_target(node))
            args.insert(0, args.pop(self.reused[node]))
        else:
            kernel = choose_kernel(node)
        target = self.bind(schema_name(node).split("::")[-1] + "_in_place" * (node in self.reused), kernel)
        arguments = [self.format(a) for a in args] + [f"{k}={self.format(v)}" for k, v in node.kwargs.items()]
        return f"{target}({', '.join(arguments)})"

    def _collective(self, node: Node) -> str:
        tensor, *middle, group = node.args
        axis = self.graph.axis_of[group]  # type: ignore[index]
        if self.channels is None:
            value = node.args[0].meta["val"]  # type: ignore[union-attr]
            call = CollectiveCall(
                schema_name(node), tuple(middle), axis, origin_of(node), tuple(value.shape), value.dtype
            )
            self.calls.append(call)
            return f"yield ({len(self.calls) - 1}, {self.format(tensor)})"
        method = schema_name(node).split("::")[-1]
        bound = getattr(self.channels[axis], method)
        arguments = [self.format(tensor), *(self.format(a) for a in middle)]
        if method == "all_reduce" and self._owned(tensor, node):
            arguments.append("True")
        return f"{self.bind(f'{method}_{axis}', bound)}({', '.join(arguments)})"

    def _owned(self, tensor: Any, reader: Node) -> bool:
        """Whether a value is a temporary that only this node reads, so that it can be overwritten."""
        if tensor.op != "call_function" or len(tensor.users) != 1 or is_wait(tensor):
            return False
        root = self.roots.get(tensor)
        return sum(r == root for r in self.roots.values()) == 1

    def bind(self, hint: str, value: Any) -> str:
        """A name in the generated function for an object."""
        key = id(value)
        if key not in self.constants:
            name = "k_" + "".join(c if c.isalnum() else "_" for c in hint)
            while name in self.bound:
                name += "_"
            self.constants[key] = name
            self.bound[name] = value
        return self.constants[key]

    def format(self, value: Any) -> str:
        """An argument as Python source."""
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self.format(v) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        self.bound.setdefault("_keep", []).append(value)
        return self.bind(type(value).__name__, value)


def generate(
    graph: RankGraph, channels: Mapping[str, Channel] | None, donated: set[int], name: str
) -> tuple[Callable[[list[torch.Tensor]], Any], list[CollectiveCall], str]:
    """The Python function of a rank's graph.

    Args:
        graph: after the passes.
        channels: mesh axis -> where its collectives go; None for the lockstep form.
        donated: indices of placeholders whose memory may be given to results.
        name: what tracebacks call it.

    Returns:
        (function, its collectives in lockstep form, source). The function takes a list of local tensors, which it
        empties, and returns a list; in lockstep form it is a generator function that yields (index of the collective,
        its operand) and is sent the result.
    """
    writer = _Writer(graph, channels, donated)
    source, bound = writer.write()
    if channels is None and not writer.calls:
        source += "    yield\n"  # makes it a generator all the same
    filename = f"<ptrainx graph of {name}, rank {graph.rank}, {id(graph):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), bound)
    return bound["step"], writer.calls, source


def collective_summary(graph: RankGraph) -> list[str]:
    """The collectives in order, one line each: what ranks have to agree on."""
    lines = []
    for node in graph.module.graph.nodes:
        if is_collective(node):
            tensor, *middle, _ = node.args
            value = tensor.meta["val"]
            axis = graph.axis_of[axis_group(node)]
            kind = schema_name(node).split("::")[-1]
            plain = [m for m in middle if isinstance(m, (str, int))]
            lines.append(f"{kind} over {axis} of {value.dtype}{list(value.shape)} {plain} at {origin_of(node).source}")
    return lines
