"""Does what `remat` marks: the backward reads values that are computed again rather than kept.

Each rematerialized call is a set of nodes. A node of the backward that reads one of them reads a copy, computed just
before it from the call's arguments and from what the policy saves. Values that the rest of the forward reads too are
there anyway and are not computed again.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch.fx import Graph, Node

from ptrainx.compile.graph import is_collective, is_pure, is_wait, origin_of, schema_name
from ptrainx.compile.program import RankGraph
from ptrainx.core import torch_compat as tc
from ptrainx.core.trace_context import Remat

__all__ = ["recompute"]


def recompute(graph: RankGraph, around: int = 0) -> RankGraph:
    """The graph with copies of what is to be computed again.

    Args:
        graph: without writes.
        around: the rematerialized call that the whole graph is part of, if it is a loop's body; 0 for none.
    """
    if graph.remats:
        _Recompute(graph.module.graph, graph.remats, around).run()
    return graph


class _Recompute:
    def __init__(self, graph: Graph, remats: dict[int, Remat], around: int):
        self.graph, self.remats, self.around = graph, remats, around
        self.calls: dict[Node, tuple[int, ...]] = {
            node: self._calls(origin_of(node).remat) for node in graph.nodes if node.op == "call_function"
        }
        self.copies: dict[Node, Node] = {}

    def _calls(self, call: int) -> tuple[int, ...]:
        """The rematerialized calls around a node, innermost first, inside this graph."""
        found = []
        while call and call != self.around:
            found.append(call)
            call = self.remats[call].parent
        return tuple(found) if call == self.around else ()

    def run(self) -> None:
        members = {node for node, calls in self.calls.items() if calls and origin_of(node).phase != "backward"}
        again = {node for node in members if not self._is_kept(node, members)}
        for node in list(self.graph.nodes):
            if node.op in ("placeholder", "output") or node in members or origin_of(node).phase != "backward":
                continue
            for operand in node.all_input_nodes:
                if operand in again:
                    node.replace_input_with(operand, self._copy(operand, again, node))

    def _is_kept(self, node: Node, members: set[Node]) -> bool:
        """Whether a value is there in the backward: saved by every policy around it, or read by others forwards."""
        if not is_pure(node):
            return True
        if node.target is operator.getitem and self._is_saved(node.args[0]):  # type: ignore[arg-type]
            return True
        if self._is_saved(node) and not is_collective(node):
            return True
        outer = self.calls[node][-1]
        return any(
            user.op == "output" or (origin_of(user).phase != "backward" and outer not in self.calls.get(user, ()))
            for user in node.users
            if not is_wait(user) or not is_collective(node)
        )

    def _is_saved(self, node: Node) -> bool:
        """Whether all policies save a value, or one that is the same but for its name."""
        same = [user for user in node.users if user in self.calls and origin_of(user).name and _is_same(user, node)]
        return any(
            all(self.remats[call].policy(schema_name(n), origin_of(n).name or None) for call in self.calls[n])
            for n in (node, *same)
        )

    def _copy(self, node: Node, again: set[Node], reader: Node) -> Node:
        """The value computed again, before `reader`, which is the first to need it."""
        order = self._needed(node, again)
        for original in order:
            with self.graph.inserting_before(reader):
                copy = self.graph.node_copy(original, lambda operand: self.copies.get(operand, operand))
            origin = origin_of(original)
            call = self.calls[original][-1]
            copy.meta["custom"] = {"origin": dataclasses.replace(origin, phase="backward", remat=self.around)}
            copy.meta["recomputed"] = call
            self.copies[original] = copy
        return self.copies[node]

    def _needed(self, node: Node, again: set[Node]) -> list[Node]:
        """What has to be computed again for a node, operands first; of a tuple, all parts."""
        order: list[Node] = []
        seen: set[Node] = set(self.copies)
        stack: list[tuple[Node, bool]] = [(node, False)]
        while stack:
            current, done = stack.pop()
            if done:
                order.append(current)
            elif current in again and current not in seen:
                seen.add(current)
                stack.append((current, True))
                stack.extend((operand, False) for operand in current.all_input_nodes)
        return order


def _is_same(node: Node, operand: Node) -> bool:
    """Whether a view shows the whole of its operand as it is."""
    a, b = node.meta.get("val"), operand.meta.get("val")
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return tc.storage_id(a) == tc.storage_id(b) and (a.shape, a.stride()) == (b.shape, b.stride())
