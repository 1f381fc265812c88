"""What a collective of logical ranks is on the devices that host them.

Sums are taken in a fixed binary tree over the logical ranks of the group: a device adds up the part of the tree that it
hosts and sends one addend, if its ranks are a subtree, and else all of them. What moves data only is gathered from all
devices of the group, and each device takes what its ranks get. Several axes are taken one after another: the minor one
first where values are joined, the major one first where they are cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.graph import schema_name
from ptrainx.compile.hosted.builder import Builder
from ptrainx.core.errors import TraceError
from ptrainx.mesh.logical import LogicalMesh

__all__ = ["Exchange", "group_name"]

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Place = tuple[int, ...]

GATHERED_BYTES = 64 * 2**10
"""Up to here all addends of all devices are gathered: one message instead of two."""

_JOIN = {
    "sum": aten.add.Tensor,
    "avg": aten.add.Tensor,
    "product": aten.mul.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}


def group_name(axis: str) -> str:
    """The name of the group of devices along an axis."""
    return f"ptrainx/devices/{axis}"


class Exchange:
    """One collective of one group of logical ranks, of which a device hosts some.

    Args:
        build: where its nodes go.
        mesh: of the logical ranks.
        axes: along which the group lies, major to minor.
        calls: the collective's node in each hosted member's graph, by its place along the axes.
        values: the members' operands.
        leader: the first hosted member, who asks for nodes in the name of all.
    """

    def __init__(
        self,
        build: Builder,
        mesh: LogicalMesh,
        axes: Sequence[str],
        calls: Mapping[Place, Node],
        values: Mapping[Place, Node],
        leader: int,
    ):
        self.build, self.mesh, self.axes, self.calls, self.leader = build, mesh, tuple(axes), calls, leader
        self.like = next(iter(calls.values()))
        self.values = {place: build.contiguous(leader, self.like, value) for place, value in values.items()}
        self.order = list(itertools.product(*(range(mesh.shape[axis]) for axis in axes)))

    def results(self) -> dict[Place, Node]:
        """Each hosted member's result."""
        name = schema_name(self.like).split("::")[-1]
        return getattr(self, f"_{name}")(*self.like.args[1:-1])

    # What each collective means; arguments are those between its operand and its group.

    def _all_reduce(self, op: str) -> dict[Place, Node]:
        values: dict[Place, Node] = dict(self.values)
        for axis in reversed(self.axes):
            groups: dict[Place, list[Node]] = {}
            for place in sorted(values):
                groups.setdefault(place[:-1], []).append(values[place])
            values = {rest: self._sum(axis, parts, op) for rest, parts in groups.items()}
        return dict.fromkeys(self.values, self._average(values[()], op))

    def _reduce_scatter_tensor(self, op: str, group_size: int) -> dict[Place, Node]:
        return self._scattered(self.values, op)

    def _reduce_scatter_pieces(self, op: str, sizes: Sequence[int], group_size: int) -> dict[Place, Node]:
        n = len(self.order)
        rows = {}
        for place, value in self.values.items():
            pieces = self._split(value, [n * size for size in sizes])
            flat = self.build.joined(self.leader, self.like, [self._view(piece, (n, -1)) for piece in pieces], 1)
            rows[place] = self._view(flat, (-1,))
        return self._scattered(rows, op)

    def _all_gather_into_tensor(self, group_size: int) -> dict[Place, Node]:
        if len(self.axes) == 1:
            shape = self.like.meta["val"].shape
            whole = self._view(self._gather(self.axes[0], self._in_order(self.values)), shape)
        else:
            everyone = self._fetch()
            whole = self._join([everyone[place] for place in self.order], 0)
        return dict.fromkeys(self.values, whole)

    def _all_gather_pieces(self, sizes: Sequence[int], group_size: int) -> dict[Place, Node]:
        everyone = self._fetch()
        parts = [self._split(everyone[place], list(sizes)) for place in self.order]
        whole = self._join([own[i] for i in range(len(sizes)) for own in parts], 0)
        return dict.fromkeys(self.values, whole)

    def _all_to_all_single(self, *_: Any) -> dict[Place, Node]:
        sends: dict[Place, Any] = {place: call.args[2] for place, call in self.calls.items()}
        if set(self.order) - set(sends):
            if len({size for own in sends.values() for size in own}) > 1:
                raise TraceError(
                    "an all-to-all of uneven parts can't be taken in logical shards that several devices host",
                    got=f"{next(iter(sends.values()))} rows to send",
                    fix='use even parts, or jit without reductions="ordered"',
                )
            sends = dict.fromkeys(self.order, next(iter(sends.values())))
        everyone = self._fetch()
        parts = {place: self._split(everyone[place], sends[place]) for place in self.order}
        return {
            own: self._join([parts[place][self.order.index(own)] for place in self.order], 0) for own in self.values
        }

    def _shard_dim_alltoall(self, gather_dim: int, shard_dim: int) -> dict[Place, Node]:
        everyone, n = self._fetch(), len(self.order)
        size = self.like.args[0].meta["val"].shape[shard_dim] // n  # type: ignore[union-attr]
        out = {}
        for own in self.values:
            start = self.order.index(own) * size
            cuts = [
                self._add(aten.slice.Tensor, everyone[place], shard_dim, start, start + size) for place in self.order
            ]
            out[own] = self._join(cuts, gather_dim)
        return out

    def _broadcast(self, source: int) -> dict[Place, Node]:
        return dict.fromkeys(self.values, self._own(self._fetch()[self.order[source]]))

    def _ppermute(self, sources: Sequence[int]) -> dict[Place, Node]:
        everyone = self._fetch()
        out = {}
        for own, value in self.values.items():
            source = sources[self.order.index(own)]
            out[own] = (
                self._add(aten.zeros_like.default, value) if source < 0 else self._own(everyone[self.order[source]])
            )
        return out

    # Sums.

    def _scattered(self, values: Mapping[Place, Node], op: str) -> dict[Place, Node]:
        """Each hosted member's part, along dim 0, of the sum of all members' values."""
        values = dict(values)
        for i, axis in enumerate(self.axes):
            groups: dict[Place, list[Place]] = {}
            for place in sorted(values):
                groups.setdefault((*place[:i], *place[i + 1 :]), []).append(place)
            done: dict[Place, Node] = {}
            for places in groups.values():
                done.update(zip(places, self._sum_parts(axis, [values[place] for place in places], op)))
            values = done
        return {place: self._average(value, op) for place, value in values.items()}

    def _sum(self, axis: str, parts: list[Node], op: str) -> Node:
        """The sum over all logical ranks along an axis, of which `parts` are the hosted ones."""
        devices = self.mesh.physical.shape[axis]
        if devices == 1:
            return self._tree(parts, op)
        value: torch.Tensor = parts[0].meta["val"]
        if not self._is_subtree(axis):
            return self._view(self._tree(self._gathered_parts(axis, parts), op), value.shape)
        addend = self._tree(parts, op)
        size = value.numel() * value.element_size()
        if size <= GATHERED_BYTES or value.numel() % devices:
            whole = self._tree(self._gathered_parts(axis, [addend], devices), op)
        else:
            total = self._tree(self._swap(axis, addend), op)
            whole = self._gather(axis, [total])
        return self._view(whole, value.shape)

    def _sum_parts(self, axis: str, parts: list[Node], op: str) -> list[Node]:
        """The hosted ranks' parts, along dim 0, of the sum over all logical ranks along an axis."""
        devices, hosted = self.mesh.physical.shape[axis], self.mesh.finer(axis)
        n = devices * hosted
        value: torch.Tensor = parts[0].meta["val"]
        shape = (value.shape[0] // n, *value.shape[1:])
        if devices > 1 and self._is_subtree(axis):
            block = self._tree(self._swap(axis, self._tree(parts, op)), op)
        else:
            everyone = parts if devices == 1 else self._gathered_parts(axis, parts)
            block = self._view(self._tree(everyone, op), (-1,))
            if devices > 1:
                first, size = self._first(axis) * math.prod(shape), hosted * math.prod(shape)
                block = self._own(self._add(aten.slice.Tensor, block, 0, first, first + size))
        block = self._view(block, (hosted * shape[0], *shape[1:]))
        return [self.build.part(self.leader, self.like, block, 0, i, hosted) for i in range(hosted)]

    def _tree(self, parts: list[Node], op: str) -> Node:
        """Halves first, as long as there are two equal ones; an odd number one after another."""
        if len(parts) == 1:
            return parts[0]
        if len(parts) % 2 == 0:
            half = len(parts) // 2
            return self._add(_JOIN[op], self._tree(parts[:half], op), self._tree(parts[half:], op))
        return self._add(_JOIN[op], self._tree(parts[:-1], op), parts[-1])

    def _is_subtree(self, axis: str) -> bool:
        """Whether the ranks of each device are a node of the tree: whether halving leads to them."""
        devices = self.mesh.physical.shape[axis]
        return devices & (devices - 1) == 0

    def _average(self, total: Node, op: str) -> Node:
        return self._add(aten.div.Tensor, total, len(self.order)) if op == "avg" else total

    # Between devices.

    def _fetch(self) -> dict[Place, Node]:
        """Every member's value."""
        values = dict(self.values)
        shape = next(iter(values.values())).meta["val"].shape
        for i in reversed(range(len(self.axes))):
            groups: dict[Place, list[Place]] = {}
            for place in sorted(values):
                groups.setdefault((*place[:i], *place[i + 1 :]), []).append(place)
            done: dict[Place, Node] = {}
            for rest, places in groups.items():
                parts = [values[place] for place in places]
                if self.mesh.physical.shape[self.axes[i]] > 1:
                    parts = [self._view(part, shape) for part in self._gathered_parts(self.axes[i], parts)]
                done.update(((*rest[:i], place, *rest[i:]), part) for place, part in enumerate(parts))
            values = done
        return values

    def _gather(self, axis: str, parts: list[Node]) -> Node:
        """The values of all ranks along an axis one behind another, flat; `parts` are this device's."""
        flat = self._join([self._view(part, (-1,)) for part in parts], 0)
        devices = self.mesh.physical.shape[axis]
        if devices == 1:
            return flat
        return self._send(c10d.all_gather_into_tensor.default, flat, devices, group_name(axis))

    def _gathered_parts(self, axis: str, parts: list[Node], count: int = 0) -> list[Node]:
        """As `_gather`, each value by itself; `count` of them, by default one for each logical rank."""
        count = count or self.mesh.shape[axis]
        whole = self._gather(axis, parts)
        return self._split(whole, [whole.meta["val"].shape[0] // count] * count)

    def _swap(self, axis: str, value: Node) -> list[Node]:
        """This device's part, flat, of the values of all devices along an axis."""
        devices = self.mesh.physical.shape[axis]
        flat = self._view(value, (-1,))
        sizes = [flat.meta["val"].shape[0] // devices] * devices
        return self._split(self._send(c10d.all_to_all_single.default, flat, sizes, sizes, group_name(axis)), sizes)

    def _first(self, axis: str) -> int:
        """The first hosted place along an axis."""
        return min(place[self.axes.index(axis)] for place in self.values)

    # Nodes.

    def _in_order(self, values: Mapping[Place, Node]) -> list[Node]:
        return [values[place] for place in sorted(values)]

    def _add(self, target: Any, *args: Any) -> Node:
        return self.build.add(self.leader, self.like, target, *args)

    def _send(self, target: Any, *args: Any) -> Node:
        return self.build.collective(self.leader, self.like, target, *args)

    def _own(self, node: Node) -> Node:
        return self.build.copy(self.leader, self.like, node)

    def _join(self, nodes: list[Node], dim: int) -> Node:
        return self.build.joined(self.leader, self.like, nodes, dim)

    def _view(self, node: Node, shape: Sequence[int]) -> Node:
        value: torch.Tensor = node.meta["val"]
        if tuple(value.shape) == tuple(shape) or (tuple(shape) == (-1,) and value.ndim == 1):
            return node
        return self._add(aten.view.default, node, list(shape))

    def _split(self, node: Node, sizes: list[int]) -> list[Node]:
        """Parts along dim 0, as views."""
        ends = list(itertools.accumulate(sizes))
        return [self._add(aten.slice.Tensor, node, 0, end - size, end) for size, end in zip(sizes, ends)]
