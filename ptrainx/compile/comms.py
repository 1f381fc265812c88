"""What a graph sends: every collective with its axis, bytes, source line, layer, and why it is there."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping

import torch
from torch.fx import Node

from ptrainx.compile.graph import axis_group, is_collective, origin_of, schema_name, walk
from ptrainx.compile.provenance import join_layers
from ptrainx.compile.trace import RankGraph
from ptrainx.mesh.axes import split_axes

__all__ = ["Comm", "CommReport", "kind_of", "members_of", "report_comms", "wire_bytes"]

WIDTH = 100
"""What a table should not be wider than."""


@dataclasses.dataclass(frozen=True)
class Comm:
    """One kind of communication at one place.

    Attributes:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute` or `broadcast`.
        axis: the mesh axis it goes over; of several together, `data*model`.
        bytes: what one rank sends over the wire, all `count` together, with ring algorithms.
        count: how many collectives; those in a loop count once a step.
        source: `file:line` of the user's code.
        phase: forward, backward or update.
        asked: asked for (an output spec, a reshard, a gradient's reduction), or implied by operands whose placements
            conflict.
        reason: why.
        layer: the parameter that it serves, by its path, or the loop; "" if none.
    """

    kind: str
    axis: str
    bytes: int
    count: int
    source: str
    phase: str
    asked: bool
    reason: str
    layer: str = ""


class CommReport(list[Comm]):
    """The rows of `comms()`; prints as a table, in which rows that differ in their layer only are one."""

    @property
    def total_bytes(self) -> int:
        """What one rank sends in one call."""
        return sum(c.bytes for c in self)

    def __str__(self) -> str:
        if not self:
            return "no communication"
        rows = [
            (c.kind, c.axis, f"{c.count:,}", f"{c.bytes:,}", c.phase, "yes" if c.asked else "implied", c.layer,
             c.source, c.reason)
            for c in _grouped(self)
        ]  # fmt: skip
        head = ("kind", "axis", "count", "bytes", "phase", "asked", "layer", "source", "reason")
        lines = _table([head, *rows])
        total = f"{sum(c.count for c in self):,} collectives, {self.total_bytes:,} bytes sent by a rank"
        return "\n".join([*lines, total])


def _grouped(rows: list[Comm]) -> list[Comm]:
    """One row for all layers that are alike in everything else."""
    found: dict[tuple, list[Comm]] = {}
    for c in rows:
        found.setdefault((c.kind, c.axis, c.source, c.phase, c.asked, c.reason), []).append(c)
    return [
        dataclasses.replace(
            group[0],
            bytes=sum(c.bytes for c in group),
            count=sum(c.count for c in group),
            layer=join_layers(part for c in group for part in c.layer.split(", ")),
        )
        for group in found.values()
    ]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as aligned lines; source and reason, where the lines would be too wide, on lines of their own."""
    columns = [column for column in zip(*rows) if any(column[1:])]
    right = {"count", "bytes"}
    widths = [max(map(len, column)) for column in columns]
    cells = [
        [cell.rjust(w) if column[0] in right else cell.ljust(w) for cell in column]
        for column, w in zip(columns, widths)
    ]
    lines = list(zip(*cells))
    if sum(widths) + 2 * (len(widths) - 1) <= WIDTH:
        return ["  ".join(line).rstrip() for line in lines]
    short = []
    for line, (*_, source, reason) in zip(lines, rows):
        short.append("  ".join(line[:-2]).rstrip())
        short += textwrap.wrap(f"{source}  {reason}", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return short


_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_pieces": "all_gather",
    "reduce_scatter_pieces": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
    "ppermute": "permute",
    "send": "send",
}


def kind_of(node: Node) -> str:
    """The kind of a collective, as `Comm` calls it."""
    return _KINDS[schema_name(node).split("::")[-1]]


def members_of(axis: str, sizes: Mapping[str, int]) -> int:
    """How many ranks take part in a collective over an axis, or over several: `data*model`."""
    return math.prod(sizes[name] for name in split_axes(axis))


def wire_bytes(kind: str, operand: torch.Tensor, n: int) -> int:
    """What one rank of n sends for a collective on a local operand, with ring algorithms."""
    size = operand.numel() * operand.element_size()
    if kind == "all_reduce":
        return 2 * size * (n - 1) // n
    if kind == "all_gather":
        return size * (n - 1)
    if kind in ("broadcast", "permute", "send"):
        return size if n > 1 else 0
    return size * (n - 1) // n


def report_comms(graph: RankGraph, sizes: Mapping[str, int]) -> CommReport:
    """The communication of a rank's graph, equal rows counted together, in the order of their first appearance."""
    found: dict[tuple, list[int]] = {}
    for node, times in walk(graph.module.graph):
        if is_collective(node) or schema_name(node) == "ptrainx::send":
            key, size = _row(node, graph, sizes)
            counted = found.setdefault(key, [0, 0])
            counted[0] += times
            counted[1] += times * size
    return CommReport(
        Comm(kind, axis, size, count, source, phase, asked, reason, layer)
        for (kind, axis, source, phase, asked, reason, layer), (count, size) in found.items()
    )


def _row(node: Node, graph: RankGraph, sizes: Mapping[str, int]) -> tuple[tuple, int]:
    kind, axis = kind_of(node), graph.axis_of[axis_group(node)]
    origin = origin_of(node)
    operand = node.args[0].meta["val"]  # type: ignore[union-attr]
    key = (kind, axis, origin.source, origin.phase, origin.asked, origin.reason, origin.layer)
    return key, wire_bytes(kind, operand, members_of(axis, sizes))
