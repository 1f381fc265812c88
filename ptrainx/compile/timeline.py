"""How long a step takes by a cost model, with its collectives in the order of the graph, and with none overlapped.

Enters: a rank's graph after the passes, and what the machine can do. Leaves: a `Timeline`. A device computes one
operator after the other, each as long as its floating-point operations or its bytes take, whichever is longer. Each
axis has a link of its own, which carries one collective after the other; a collective starts when it is issued and the
link is free, and an operator that waits for it stands still until it has arrived. The ranks are alike, so that one
stands for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from ptrainx.compile.comms import kind_of, members_of, wire_bytes
from ptrainx.compile.cost import node_bytes, node_flops
from ptrainx.compile.graph import axis_group, body_of, is_call, is_collective, is_loop, is_wait, schema_name
from ptrainx.compile.stage_loops import StagedLoop, stage_loop
from ptrainx.compile.trace import RankGraph
from ptrainx.mesh.axes import split_axes

__all__ = ["Hardware", "Link", "Timeline", "predict_time"]


@dataclasses.dataclass(frozen=True)
class Link:
    """What carries the collectives of an axis.

    Attributes:
        bytes_per_s: that one rank can send.
        latency_s: of one hop; a ring of n ranks has n - 1 hops a round.
    """

    bytes_per_s: float
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What the cost model takes a machine for.

    Attributes:
        flops_per_s: of matrix products, as measured, not as advertised.
        bytes_per_s: of the device's memory.
        links: axis -> link.
        launch_s: the least that an operator takes.
        link: of the axes that `links` does not name.
    """

    flops_per_s: float
    bytes_per_s: float
    links: Mapping[str, Link] = dataclasses.field(default_factory=dict)
    launch_s: float = 0.0
    link: Link = Link(float("inf"), 0.0)

    def link_of(self, axis: str) -> Link:
        """The link of an axis; of several together, the slowest of theirs."""
        links = [self.links.get(name, self.link) for name in split_axes(axis)]
        return Link(min(k.bytes_per_s for k in links), max(k.latency_s for k in links))


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Seconds of one step on one rank.

    Attributes:
        compute: of operators, one after the other.
        communication: of collectives, one after the other.
        total: in the order of the graph.
        unoverlapped: with every collective waited for at once.
    """

    compute: float
    communication: float
    total: float
    unoverlapped: float

    @property
    def exposed(self) -> float:
        """Of communication, what the device stands still for."""
        return self.total - self.compute

    def __str__(self) -> str:
        hidden = 1 - self.exposed / self.communication if self.communication else 1.0
        return (
            f"{self.total * 1e3:.3f} ms: compute {self.compute * 1e3:.3f}, "
            f"communication {self.communication * 1e3:.3f}, "
            f"of which {self.exposed * 1e3:.3f} exposed ({hidden:.0%} hidden); "
            f"{self.unoverlapped * 1e3:.3f} ms without overlap"
        )


def predict_time(graph: RankGraph, sizes: Mapping[str, int], hardware: Hardware) -> Timeline:
    """The time of a rank's graph.

    Args:
        graph: after the passes: its collectives are issued and waited for where they stand.
        sizes: axis -> number of ranks.
        hardware: what runs it.
    """
    overlapped, serial = (_Clock(graph, sizes, hardware, overlap) for overlap in (True, False))
    for clock in (overlapped, serial):
        clock.run(graph.module.graph, [])
    return Timeline(serial.computed, serial.sent, overlapped.end, serial.end)


class _Clock:
    """The time of the device, and of each link, as a graph goes by."""

    def __init__(self, graph: RankGraph, sizes: Mapping[str, int], hardware: Hardware, overlap: bool):
        self.graph, self.sizes, self.hardware, self.overlap = graph, sizes, hardware, overlap
        self.now = self.computed = self.sent = 0.0
        self.free: dict[str, float] = {}

    @property
    def end(self) -> float:
        """When everything has been done and has arrived."""
        return max(self.now, *self.free.values()) if self.free else self.now

    def run(self, graph: Any, arrivals: list[float]) -> list[float]:
        """Runs a graph whose operands arrive then; tells when its results do."""
        placeholders = list(graph.find_nodes(op="placeholder"))
        arrival: dict[Node, float] = dict(zip(placeholders, arrivals))
        for node in graph.nodes:
            if node.op == "output":
                return [arrival.get(n, 0.0) for n in node.args[0]]
            if is_loop(node):
                self._loop(node, arrival)
            elif is_call(node):
                self.run(body_of(node).graph, [])
            elif is_collective(node):
                arrival[node] = self._issue(node)
            elif is_wait(node):
                self.now = max(self.now, arrival.get(node.args[0], 0.0))
            elif schema_name(node):
                self._compute(node)
        return []

    def _compute(self, node: Node) -> None:
        moved, flops = node_bytes(node), node_flops(node)
        if moved or flops:
            hw = self.hardware
            took = max(flops / hw.flops_per_s, moved / hw.bytes_per_s, hw.launch_s)
            self.now += took
            self.computed += took

    def _issue(self, node: Node) -> float:
        """When a collective that is issued now has arrived."""
        operand: Any = node.args[0]
        axis = self.graph.axis_of[axis_group(node)]
        link, members = self.hardware.link_of(axis), members_of(axis, self.sizes)
        took = collective_time(kind_of(node), operand.meta["val"], members, link)
        self.sent += took
        start = max([self.now, *(self.free.get(name, 0.0) for name in split_axes(axis))])
        for name in split_axes(axis):
            self.free[name] = start + took
        if not self.overlap:
            self.now = start + took
        return start + took

    def _loop(self, node: Node, arrival: dict[Node, float]) -> None:
        """Step by step, in the pieces in which it runs: what can starts a step ahead, what may ends a step late."""
        staged: StagedLoop = node.meta.get("staged") or stage_loop(node)
        form = staged.loop.form
        n_operands = len(node.args) - 2
        ahead: list[float] = []
        held: list[float] | None = None
        if staged.ahead is not None:
            ahead = self.run(staged.ahead.graph, [])
        for step in range(form.length):
            started = ahead
            if staged.ahead is not None and step + 1 < form.length:
                ahead = self.run(staged.ahead.graph, [])
            out = self.run(staged.core.graph, [0.0] * n_operands + started)
            if staged.late is not None:
                if held is not None:
                    self.run(staged.late.graph, held)
                held = out[form.n_carry + len(staged.early_ys) :]
        if staged.late is not None and held is not None:
            self.run(staged.late.graph, held)


def collective_time(kind: str, operand: Any, members: int, link: Link) -> float:
    """Seconds of a collective: the bytes that a rank sends, and the hops of its ring.

    An all-reduce goes around twice, a gather, a scatter and a broadcast once; in an all-to-all every rank reaches every
    other one directly.
    """
    if members < 2:
        return 0.0
    hops = {"all_reduce": 2 * (members - 1), "all_to_all": 1}.get(kind, members - 1)
    return wire_bytes(kind, operand, members) / link.bytes_per_s + hops * link.latency_s
