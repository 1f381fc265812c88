"""A rank's graph to Python: one function of straight-line calls, each value dropped after its last reader.

A loop is a function of its own, which calls the functions of its pieces (`stage_loops`).

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

from ptrainx.compile.calls import owned_operands
from ptrainx.compile.channel import Channel
from ptrainx.compile.graph import (
    alias_roots,
    body_of,
    is_call,
    is_collective,
    is_loop,
    is_wait,
    keeps_more,
    origin_of,
    packs,
    schema_name,
)
from ptrainx.compile.kernels import callable_of, choose_kernel
from ptrainx.compile.lower_loops import write_loop
from ptrainx.compile.reuse import in_place_target, plan_reuse
from ptrainx.compile.stage_loops import StagedLoop, stage_loop
from ptrainx.compile.trace import RankGraph
from ptrainx.core.trace_context import Origin

__all__ = ["CollectiveCall", "generate"]

_MESSAGES = {f"ptrainx::{kind}" for kind in ("flush", "receive", "received", "send")}


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
    """A collective as the lockstep run sees it: operator, arguments between tensor and group, mesh axis, origin."""

    name: str
    args: tuple[Any, ...]
    axis: str
    origin: Origin
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass
class _Code:
    """What the functions of one rank share.

    Attributes:
        channels: mesh axis -> where its collectives go; None for the lockstep form.
        functions: their sources.
        generators: names of those that yield.
        bound: what they read as globals.
        names: identity of a bound object -> its name.
        calls: the collectives of the lockstep form.
        written: names of the functions of called bodies.
    """

    channels: Mapping[str, Channel] | None
    functions: list[str] = dataclasses.field(default_factory=list)
    generators: set[str] = dataclasses.field(default_factory=set)
    bound: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    calls: list[CollectiveCall] = dataclasses.field(default_factory=list)
    written: set[str] = dataclasses.field(default_factory=set)

    def bind(self, hint: str, value: Any) -> str:
        """A name in the generated functions for an object."""
        key = id(value)
        if key not in self.names:
            name = "k_" + "".join(c if c.isalnum() else "_" for c in hint)
            while name in self.bound:
                name += "_"
            self.names[key] = name
            self.bound[name] = value
        return self.names[key]

    def call(self, function: str, arguments: str) -> str:
        """A call of a generated function."""
        return f"{'yield from ' * (function in self.generators)}{function}({arguments})"

    def add(self, function: str, lines: list[str], yields: bool, note: str = "") -> None:
        """Adds a function that takes a list, which it empties."""
        if yields:
            self.generators.add(function)
        head = f"def {function}(args):{f'  # {note}' * bool(note)}\n"
        self.functions.append(head + "".join(f"    {line}\n" for line in lines))


class _Writer:
    """Writes the function of one graph.

    Args:
        name: of the function.
        code: what it belongs to.
        graph: whose module it is.
        donated: indices of placeholders that may be overwritten.
        separate: whether results that share memory with an argument or another result have to be copied; a loop's
            pieces see to it themselves.
    """

    def __init__(self, name: str, code: _Code, graph: RankGraph, donated: set[int], separate: bool = True):
        self.name, self.code, self.graph, self.channels = name, code, graph, code.channels
        self.nodes = list(graph.module.graph.nodes)
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []
        self.donated, self.separate = donated, separate
        self.yields = False
        self.roots = alias_roots(graph.module.graph)
        self.reused = plan_reuse(graph.module.graph, donated)
        self.owned = owned_operands(graph.module.graph, donated)

    def write(self) -> None:
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
            elif node.op != "placeholder" and not _is_body(node) and not _is_part(node):
                dead = [self.names[n] for n in last_reader.get(node, ()) if not _is_body(n)]
                if _boxes(node):
                    dead = self._boxed(node, dead)
                else:
                    self.lines.append(f"{self.names[node]} = {self._expression(node)}")
                if not node.users and not _boxes(node):
                    dead.append(self.names[node])
                if dead:
                    self.lines.append(f"del {', '.join(dead)}")
        self.code.add(self.name, self.lines, self.yields)

    def _boxed(self, node: Node, dead: list[str]) -> list[str]:
        """A call that takes its operands in a list, so that it can let go of them; what it leaves to delete."""
        if is_loop(node):
            staged = node.meta.get("staged") or stage_loop(node)
            function = self._loop(staged)
            self.yields = self.yields or function in self.code.generators
            given: list[Any] = list(node.args[2:])
            operands = [
                f"{self.bind('clone', torch.clone)}({self.names[o]})"
                if i in staged.owned and i < staged.loop.form.n_carry and not self._owned_once(o, node)
                else self.names[o]
                for i, o in enumerate(given)
            ]
        elif is_call(node):
            function = self._body(node)
            self.yields = self.yields or function in self.code.generators
            operands = [self.names[o] for o in node.args[1:]]  # type: ignore[index]
        else:
            function = self.bind(getattr(node.target, "__name__", "region"), node.target)
            operands = [self.format(o) for o in node.args[0]]  # type: ignore[union-attr]
        self.lines.append(f"box = [{', '.join(operands)}]")
        if dead:
            self.lines.append(f"del {', '.join(dead)}")
        parts = {int(user.args[1]): self.names[user] for user in node.users if user.users}  # type: ignore[arg-type]
        count = len(node.meta["val"])
        self.lines.append(f"[{', '.join(parts.get(i, '_') for i in range(count))}] = {self.code.call(function, 'box')}")
        return ["_"] if len(parts) < count else []

    def _loop(self, staged: StagedLoop) -> str:
        """The name of a loop's function."""
        stem = f"{self.name}_{self.names[staged.loop.node]}"
        pieces = {"core": staged.core, "ahead": staged.ahead, "late": staged.late}
        for kind, module in pieces.items():
            if module is not None:
                owned = set(staged.owned) if kind == "core" else set()
                graph = dataclasses.replace(self.graph, module=module)
                _Writer(f"{stem}_{kind}", self.code, graph, owned, separate=False).write()
        write_loop(self.code, stem, staged, origin_of(staged.loop.node).source)
        return stem

    def _body(self, node: Node) -> str:
        """The name of a called body's function, written at its first call."""
        name = str(node.args[0].target)  # type: ignore[union-attr]
        function = f"{self.name}_{name}"
        if function not in self.code.written:
            self.code.written.add(function)
            graph = dataclasses.replace(self.graph, module=body_of(node))
            _Writer(function, self.code, graph, set(self.owned[name]), separate=False).write()
        return function

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
        """The results. Copied is what shares memory with a kept argument or another result, or keeps more alive."""
        if not self.separate:
            return [self.names[value] for value in node.args[0]]  # type: ignore[union-attr,index]
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        taken = {self.roots[n] for i, n in enumerate(placeholders) if i not in self.donated and n in self.roots}
        out = []
        for value in node.args[0]:  # type: ignore[union-attr]
            assert isinstance(value, Node)
            root = self.roots[value]
            copied = root in taken or keeps_more(value)
            out.append(f"{self.bind('clone', torch.clone)}({self.names[value]})" if copied else self.names[value])
            taken.add(root)
        return out

    def _expression(self, node: Node) -> str:
        if node.op == "get_attr":
            return self.bind(f"const_{node.target}".replace(".", "_"), getattr(self.graph.module, str(node.target)))
        if node.target is operator.getitem:
            return f"{self.names[node.args[0]]}[{node.args[1]}]"  # type: ignore[index]
        if is_collective(node):
            return self._collective(node)
        if packs(node) and self.channels is not None:
            return self.format(list(node.args[0]))  # type: ignore[arg-type]
        if is_wait(node):
            return f"{self.names[node.args[0]]}.wait()" if self.channels is not None else self.names[node.args[0]]  # type: ignore[index]
        if schema_name(node) in _MESSAGES:
            return self._message(node)
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
            self.code.calls.append(call)
            self.yields = True
            return f"yield ({len(self.code.calls) - 1}, {self.format(tensor)})"
        method = schema_name(node).split("::")[-1]
        bound = getattr(self.channels[axis], method)
        arguments = [self.format(tensor), *(self.format(a) for a in middle)]
        if method == "all_reduce" and self._owned(tensor, node):
            arguments.append("True")
        return f"{self.bind(f'{method}_{axis}', bound)}({', '.join(arguments)})"

    def _message(self, node: Node) -> str:
        """A message between two ranks of an axis. In lockstep form sends and arrivals yield, as collectives do."""
        kind = schema_name(node).split("::")[-1]
        if kind == "received" and self.channels is not None:
            return f"{self.names[node.args[0]]}.wait()"  # type: ignore[index]
        posted: Any = node.args[0] if kind == "received" else node
        axis = self.graph.axis_of[posted.args[-1]]
        if self.channels is not None:
            arguments = ", ".join(self.format(a) for a in node.args[:-1])
            return f"{self.bind(f'{kind}_{axis}', getattr(self.channels[axis], kind))}({arguments})"
        if kind in ("receive", "flush"):
            return "None"
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        peer, tag = posted.args[-3:-1]
        call = CollectiveCall(schema_name(node), (peer, tag), axis, origin_of(node), tuple(value.shape), value.dtype)
        self.code.calls.append(call)
        self.yields = True
        return f"yield ({len(self.code.calls) - 1}, {self.format(node.args[0])})"

    def _owned_once(self, operand: Any, loop: Node) -> bool:
        return self._owned(operand, loop) and loop.args.count(operand) == 1

    def _owned(self, tensor: Any, reader: Node) -> bool:
        """Whether a value is a temporary that only this node reads, so that it can be overwritten."""
        if tensor.op != "call_function" or len(tensor.users) != 1 or is_wait(tensor):
            return False
        root = self.roots.get(tensor)
        return sum(r == root for r in self.roots.values()) == 1

    def bind(self, hint: str, value: Any) -> str:
        """A name in the generated function for an object."""
        return self.code.bind(hint, value)

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
        self.code.bound.setdefault("_keep", []).append(value)
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
    code = _Code(channels)
    # Simulated ranks may hold one tensor in common, so there a donated argument is let go of, not overwritten.
    writer = _Writer("step", code, graph, donated if channels is not None else set())
    writer.donated = donated
    writer.write()
    source = "\n".join(code.functions)
    if channels is None and not writer.yields:
        source += "    yield\n"  # makes it a generator all the same
    filename = f"<ptrainx graph of {name}, rank {graph.rank}, {id(graph):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), code.bound)
    return code.bound["step"], code.calls, source


def _boxes(node: Node) -> bool:
    """Whether a node takes its operands in a list and gives a list of results."""
    return is_loop(node) or is_call(node) or getattr(node.target, "boxed", False)


def _is_part(node: Node) -> bool:
    """Whether a node is one result of such a node, which has its name from the start."""
    return node.target is operator.getitem and _boxes(node.args[0])  # type: ignore[arg-type]


def _is_body(node: Node) -> bool:
    """Whether a node only names the body of a loop."""
    return node.op == "get_attr" and bool(node.users) and all(is_loop(user) or is_call(user) for user in node.users)
