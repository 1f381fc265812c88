"""What a graph sends: one row a collective, with the user's line and the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch.fx import Node

from ptrainx.compile.graph import axis_group, is_collective, origin_of, schema_name
from ptrainx.compile.trace import RankGraph

__all__ = ["Comm", "CommReport", "report_comms", "wire_bytes"]


@dataclasses.dataclass(frozen=True)
class Comm:
    """One kind of communication at one place.

    Attributes:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `broadcast`.
        axis: the mesh axis it goes over.
        bytes: what one rank sends over the wire, all `count` together, with ring algorithms.
        count: how many collectives.
        source: `file:line` of the user's code.
        phase: forward, backward or update.
        asked: asked for (an output spec, a reshard, a gradient's reduction), or implied by operands whose placements
            conflict.
        reason: why.
    """

    kind: str
    axis: str
    bytes: int
    count: int
    source: str
    phase: str
    asked: bool
    reason: str


class CommReport(list[Comm]):
    """The rows of `comms()`; prints as a table."""

    @property
    def total_bytes(self) -> int:
        """What one rank sends in one call."""
        return sum(c.bytes for c in self)

    def __str__(self) -> str:
        if not self:
            return "no communication"
        head = ("kind", "axis", "count", "bytes", "phase", "asked", "source", "reason")
        rows = [
            (c.kind, c.axis, str(c.count), f"{c.bytes:,}", c.phase, "yes" if c.asked else "implied", c.source, c.reason)
            for c in self
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        right = {2, 3}
        lines = [
            "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in (head, *rows)
        ]
        total = f"{sum(c.count for c in self)} collectives, {self.total_bytes:,} bytes sent by a rank"
        return "\n".join([*(line.rstrip() for line in lines), total])


_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
}


def wire_bytes(kind: str, operand: torch.Tensor, n: int) -> int:
    """What one rank of n sends for a collective on a local operand, with ring algorithms."""
    size = operand.numel() * operand.element_size()
    if kind == "all_reduce":
        return 2 * size * (n - 1) // n
    if kind == "all_gather":
        return size * (n - 1)
    if kind == "broadcast":
        return size if n > 1 else 0
    return size * (n - 1) // n


def report_comms(graph: RankGraph, sizes: Mapping[str, int]) -> CommReport:
    """The communication of a rank's graph, equal rows counted together, in the order of their first appearance."""
    found: dict[tuple, list[int]] = {}
    for node in graph.module.graph.nodes:
        if is_collective(node):
            key, size = _row(node, graph, sizes)
            counted = found.setdefault(key, [0, 0])
            counted[0] += 1
            counted[1] += size
    return CommReport(
        Comm(kind, axis, size, count, source, phase, asked, reason)
        for (kind, axis, source, phase, asked, reason), (count, size) in found.items()
    )


def _row(node: Node, graph: RankGraph, sizes: Mapping[str, int]) -> tuple[tuple, int]:
    kind = _KINDS[schema_name(node).split("::")[-1]]
    axis = graph.axis_of[axis_group(node)]
    origin = origin_of(node)
    operand = node.args[0].meta["val"]  # type: ignore[union-attr]
    key = (kind, axis, origin.source, origin.phase, origin.asked, origin.reason)
    return key, wire_bytes(kind, operand, sizes[axis])
