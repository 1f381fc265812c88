"""How much memory a step needs: the peak of live tensors on a rank, and who holds it.

Enters: a rank's graph after the passes. Leaves: a `MemoryReport`. The graph is walked in the order of execution with
the lifetimes that the generated code has: a value lives until its last reader, an argument that is not donated to the
end; views share their base's memory, results in place take none, a collective keeps its buffers until it is waited
for; a loop runs step by step. What kernels use inside, and what an allocator keeps, is not counted.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ptrainx.compile.calls import owned_operands
from ptrainx.compile.comms import members_of
from ptrainx.compile.graph import (
    alias_roots,
    axis_group,
    body_of,
    is_call,
    is_collective,
    is_loop,
    is_wait,
    keeps_more,
    origin_of,
    output_node,
    packs,
    schema_name,
)
from ptrainx.compile.memory_report import Holder, MemoryReport
from ptrainx.compile.memory_values import Buffer, Pending, Value, buffers_of, bytes_of_storage, bytes_of_value
from ptrainx.compile.reuse import plan_reuse
from ptrainx.compile.shared_memory import can_share
from ptrainx.compile.stage_loops import StagedLoop, is_list, stage_loop
from ptrainx.compile.trace import Program, RankGraph
from ptrainx.ops.loop import LoopForm

__all__ = ["report_memory"]


def report_memory(program: Program, graph: RankGraph) -> MemoryReport:
    """The memory of a rank's graph, as the generated code uses it."""
    first = _Run(program, graph)
    result_bytes = first.execute()
    # Once more, to look at what is alive at the moment that has turned out to be the peak.
    second = _Run(program, graph, look_at=first.peak_event)
    second.execute()
    holders = sorted(second.seen, key=lambda buffer: -buffer.bytes)
    return MemoryReport(
        first.peak,
        first.argument_bytes,
        result_bytes,
        first.peak_at[0],
        first.peak_at[1],
        tuple(buffer.holder for buffer in holders if buffer.bytes),
    )


class _Run:
    """One execution, without data.

    Args:
        program: whose arguments they are.
        graph: what runs.
        look_at: the number of the allocation after which to note what is alive.
    """

    def __init__(self, program: Program, graph: RankGraph, look_at: int = -1):
        self.program, self.graph, self.look_at = program, graph, look_at
        self.sizes: Mapping[str, int] = program.mesh.shape
        self.gloo = program.device.type == "cpu"
        self.live: dict[Buffer, None] = {}  # in order: who is first is told first
        self.now = self.peak = self.argument_bytes = self.events = 0
        self.peak_event = 0
        self.peak_at = (program.source, "forward")
        self.seen: list[Buffer] = []

    def execute(self) -> int:
        """Runs the graph; returns the bytes of its results."""
        placeholders = list(self.graph.module.graph.find_nodes(op="placeholder"))
        args, donated = [], set()
        for i, node in enumerate(placeholders):
            argument = self.program.arguments[i] if i < len(self.program.arguments) else None
            buffer = self._allocate(node, bytes_of_storage(node), argument.path if argument else "captured")
            args.append(self._hold(buffer))
            if argument is not None and argument.donated:
                donated.add(i)
            else:
                self._hold(buffer)
        self.argument_bytes = self.now
        results = self.run(self.graph.module, args, donated, separate=True)
        return sum(buffer.bytes for buffer in {id(b): b for b in buffers_of(results)}.values())

    def run(self, module: GraphModule, args: Sequence[Value], donated: set[int], separate: bool = False) -> list[Value]:
        """Executes a graph; takes over the variables in `args`, and gives the caller those of the results."""
        return _Frame(self, module, args, donated).results(separate)

    def _allocate(self, node: Node, size: int, what: str = "") -> Buffer:
        origin = origin_of(node)
        name = what or schema_name(node).split("::")[-1] or str(node.target)
        buffer = Buffer(size, Holder(size, name, origin.source, origin.phase, origin.layer, origin.role))
        self.live[buffer] = None
        self.now += size
        self.events += 1
        if self.now > self.peak:
            self.peak, self.peak_event, self.peak_at = self.now, self.events, (origin.source, origin.phase)
        if self.events == self.look_at:
            self.seen = list(self.live)
        return buffer

    def _hold(self, value: Value) -> Value:
        for buffer in buffers_of(value):
            buffer.refs += 1
        return value

    def _drop(self, value: Value) -> None:
        for buffer in buffers_of(value):
            buffer.refs -= 1
            if buffer.refs == 0:
                del self.live[buffer]
                self.now -= buffer.bytes

    def passing(self, node: Node, size: int) -> None:
        """Memory that is used and let go of within one operator."""
        self._drop(self._hold(self._allocate(node, size)))


class _Frame:
    """The variables of one function while it runs."""

    def __init__(self, run: _Run, module: GraphModule, args: Sequence[Value], donated: set[int]):
        self.run, self.graph = run, module.graph
        self.values: dict[Node, Value] = {}
        self.roots = alias_roots(self.graph)
        self.reused = plan_reuse(self.graph, donated)
        self.owned = owned_operands(self.graph, donated)
        self.buffers: dict[int, Buffer] = {}
        self.last: dict[Node, Node] = {}
        for node in self.graph.nodes:
            for operand in node.all_input_nodes:
                self.last[operand] = node
        self.placeholders = list(self.graph.find_nodes(op="placeholder"))
        self.kept = {self.roots[n] for i, n in enumerate(self.placeholders) if i not in donated and n in self.roots}
        for node, value in zip(self.placeholders, args):
            self.values[node] = value
            if isinstance(value, Buffer) and node in self.roots:
                self.buffers[self.roots[node]] = value
        for node in self.placeholders:
            if not node.users:
                self._let_go(node)

    def results(self, separate: bool) -> list[Value]:
        """Runs every node, and returns what the output names."""
        for node in self.graph.nodes:
            if node.op == "output":
                return self._return(node, separate)
            if node.op == "call_function":
                self._execute(node)
        raise AssertionError("a graph without an output")

    def _execute(self, node: Node) -> None:
        dead = [n for n in node.all_input_nodes if self.last[n] is node and n.op != "get_attr"]
        if is_loop(node):
            self.values[node] = self._loop(node, dead)
        elif is_call(node):
            self.values[node] = self._call(node, dead)
        else:
            self.values[node] = self.run._hold(self._value(node))
            for operand in dead:
                self._let_go(operand)
        if not node.users:
            self._let_go(node)

    def _let_go(self, node: Node) -> None:
        self.run._drop(self.values.pop(node, None))

    def _value(self, node: Node) -> Value:
        if node.target is operator.getitem:
            return self.values[node.args[0]][int(node.args[1])]  # type: ignore[index,arg-type]
        if is_collective(node):
            return self._collective(node)
        if packs(node):
            return [self.values[piece] for piece in node.all_input_nodes]
        if is_wait(node):
            return self._wait(node)
        if node in self.reused:
            operand: Any = node.args[self.reused[node]]
            buffer = self.values[operand]
            self.buffers[self.roots[node]] = buffer
            return buffer
        value = node.meta.get("val")
        made = [self._of(node, v) for v in value] if isinstance(value, (list, tuple)) else self._of(node, value)
        if self.run.gloo and schema_name(node) in _CONVOLUTIONS:
            self.run.passing(node, _blocked_bytes(node, made))
        return made

    def _of(self, node: Node, value: Any) -> Value:
        """The buffer of a result: that of the storage, if some value has it already."""
        if not isinstance(value, torch.Tensor):
            return None
        storage = value.untyped_storage()
        known = self.buffers.get(storage._cdata)
        if known is not None and known in self.run.live:
            return known
        made = self.buffers[storage._cdata] = self.run._allocate(node, storage.nbytes())
        return made

    def _return(self, node: Node, separate: bool) -> list[Value]:
        out, taken = [], set(self.kept)
        results: Iterable[Node] = node.args[0]  # type: ignore[assignment]
        for result in results:
            value = self.values[result]
            root = self.roots.get(result)
            if separate and (root in taken or keeps_more(result)):
                value = self.run._allocate(result, bytes_of_value(result.meta["val"]))
            out.append(self.run._hold(value))
            if root is not None:
                taken.add(root)
        for value in self.values.values():
            self.run._drop(value)
        return out

    # Collectives, as `channel` runs them.

    def _collective(self, node: Node) -> Value:
        operand: Any = node.args[0]
        given, kind = self.values[operand], schema_name(node).split("::")[-1]
        size = bytes_of_value(operand.meta["val"])
        if kind in _PIECES:
            return self._pieces(node, given)
        if kind == "shard_dim_alltoall":
            if self._members(node) > 1:
                self.run.passing(node, 2 * size)
            return self._of(node, node.meta["val"])
        members = self._members(node)
        scattered = kind == "reduce_scatter_tensor" and self.run.gloo and not can_share()
        averaged = kind == "all_reduce" and node.args[1] == "avg"
        parts = members if members > 1 and (scattered or averaged) else 0
        if kind == "all_reduce" and self._is_temporary(operand):
            return Pending(given, [], parts)
        whole = kind in ("all_reduce", "broadcast") or (scattered and members > 1)
        made = self.run._allocate(node, size if whole else bytes_of_value(node.meta["val"]))
        holds = kind not in ("all_reduce", "broadcast") and members > 1
        return Pending(made, [given] if holds else [], parts)

    def _pieces(self, node: Node, given: Value) -> Value:
        result, members = bytes_of_value(node.meta["val"]), self._members(node)
        held = given if isinstance(given, list) else [given]
        if members == 1 or (self.run.gloo and can_share()):
            return Pending(self.run._allocate(node, result), held if members > 1 else [])
        sent = bytes_of_value(node.args[0].meta["val"])  # type: ignore[union-attr]
        packed = [self.run._allocate(node, sent)] if isinstance(given, list) else held
        return Pending(self.run._allocate(node, max(sent, result)), packed, 2 if result > sent else members)

    def _wait(self, node: Node) -> Value:
        pending = self.values[node.args[0]]  # type: ignore[index]
        if not isinstance(pending, Pending):
            return pending
        if pending.parts:
            size = bytes_of_value(node.meta["val"])
            if pending.parts > 2 and pending.held:
                self.run.passing(node, 2 * size)
            made = self.buffers[self.roots[node]] = self.run._allocate(node, size, pending.result.holder.what)
            return made
        self.buffers[self.roots[node]] = pending.result
        return pending.result

    def _members(self, node: Node) -> int:
        return members_of(self.run.graph.axis_of[axis_group(node)], self.run.sizes)

    def _is_temporary(self, node: Node) -> bool:
        """Whether a value is a temporary with one reader, which may overwrite it."""
        if node.op != "call_function" or len(node.users) != 1 or is_wait(node):
            return False
        return list(self.roots.values()).count(self.roots.get(node, -1)) == 1

    def _call(self, node: Node, dead: list[Node]) -> Value:
        operands: list[Node] = list(node.args[1:])  # type: ignore[arg-type]
        box = [self.run._hold(self.values[operand]) for operand in operands]
        for operand in dead:
            self._let_go(operand)
        owned = self.owned[str(node.args[0].target)]  # type: ignore[union-attr]
        return self.run.run(body_of(node), box, set(owned))

    # Loops, as `lower_loops` writes them.

    def _loop(self, node: Node, dead: list[Node]) -> Value:
        staged: StagedLoop = node.meta.get("staged") or stage_loop(node)
        operands: list[Node] = list(node.args[2:])  # type: ignore[arg-type]
        box = []
        for i, operand in enumerate(operands):
            value = self.values[operand]
            if i in staged.owned and i < staged.loop.form.n_carry and not self._is_temporary(operand):
                value = self.run._allocate(node, bytes_of_value(operand.meta["val"]))
            box.append(self.run._hold(value))
        for operand in dead:
            self._let_go(operand)
        return _LoopRun(self.run, staged, operands, box).results()


class _LoopRun:
    """The variables of a loop's function while it runs."""

    def __init__(self, run: _Run, staged: StagedLoop, operands: list[Node], box: list[Value]):
        self.run, self.staged, self.box = run, staged, box
        self.form: LoopForm = staged.loop.form
        self.lists = {i for i, operand in enumerate(operands) if is_list(operand)}
        results: list[Node] = list(output_node(staged.loop.body.graph).args[0])  # type: ignore[arg-type]
        self.ys: list[Value] = [
            [None] * self.form.length
            if i in staged.lists
            else run._hold(run._allocate(staged.loop.node, self.form.length * bytes_of_value(y.meta["val"]), "stack"))
            for i, y in enumerate(results[self.form.n_carry :])
        ]

    def results(self) -> list[Value]:
        """Runs every step."""
        n, staged = self.form.n_carry, self.staged
        order = list(self.form.order)
        ahead = self._piece(staged.ahead, order[0])
        held: list[Value] | None = None
        behind = 0
        for position, i in enumerate(order):
            now, ahead = ahead, []
            if position + 1 < len(order):
                ahead = self._piece(staged.ahead, order[position + 1])
            args = [self._operand(k, i, take=k in staged.taken) for k in range(len(self.box))] + now
            self.box[:n] = [None] * n
            out = self.run.run(staged.core, args, set(staged.owned))
            self.box[:n] = out[:n]
            for index, value in zip(staged.early_ys, out[n:]):
                self._put(index, i, value)
            if held is not None:
                self._finish(held, behind)
            if staged.late is not None:
                held, behind = out[n + len(staged.early_ys) :], i
        if held is not None:
            self._finish(held, behind)
        for value in self.box[n:]:
            self.run._drop(value)
        return [*self.box[:n], *self.ys]

    def _operand(self, k: int, i: int, take: bool = False) -> Value:
        """An operand for step i: a slice of what is stacked, an item of a list."""
        if k < self.form.n_carry:
            return self.box[k]
        if k not in self.lists:
            return self.run._hold(self.box[k])
        item = self.box[k][i]
        if take:
            self.box[k][i] = None
            return item
        return self.run._hold(item)

    def _piece(self, module: GraphModule | None, i: int) -> list[Value]:
        if module is None:
            return []
        return self.run.run(module, [self._operand(k, i) for k in self.staged.ahead_reads], set())

    def _finish(self, held: list[Value], i: int) -> None:
        assert self.staged.late is not None
        for index, value in zip(self.staged.late_ys, self.run.run(self.staged.late, held, set())):
            self._put(index, i, value)

    def _put(self, index: int, i: int, value: Value) -> None:
        if index in self.staged.lists:
            self.ys[index][i] = value
        else:
            self.run._drop(value)


_PIECES = ("all_gather_pieces", "reduce_scatter_pieces")
_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")


def _blocked_bytes(node: Node, made: Value) -> int:
    """What oneDNN's convolutions hold beside their results: the largest operand and results in its blocked layout."""
    operand = max(bytes_of_value(n.meta["val"]) for n in node.all_input_nodes)
    results = sum(buffer.bytes for buffer in buffers_of(made))
    return operand + results if schema_name(node) == _CONVOLUTIONS[1] else max(operand - results, results)
