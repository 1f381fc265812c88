"""Between a device's part of a value and the parts of the logical ranks that it hosts."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from ptrainx.compile.hosted.builder import Builder
from ptrainx.mesh.logical import LogicalMesh
from ptrainx.mesh.partition_spec import PartitionSpec, axes_of

__all__ = ["joined_parts", "own_part_of"]


def own_part_of(build: Builder, mesh: LogicalMesh, spec: PartitionSpec, whole: Node, rank: int) -> Node:
    """A logical rank's part of what its device holds."""
    coords = dict(zip(mesh.axis_names, mesh.rank_coords(rank)))
    part = whole
    for dim, entry in enumerate(spec.entries):
        for axis in axes_of(entry):
            finer = mesh.finer(axis)
            part = build.part(rank, whole, part, dim, coords[axis] % finer, finer)
    return part


def joined_parts(build: Builder, mesh: LogicalMesh, spec: PartitionSpec, parts: Mapping[int, Node]) -> Node:
    """What a device holds, from its logical ranks' parts.

    Along axes that split no dim the ranks hold the same, and the first is taken.
    """
    axes = [axis for entry in spec.entries for axis in axes_of(entry)]
    found: dict[tuple[int, ...], Node] = {}
    for rank in sorted(parts):
        coords = dict(zip(mesh.axis_names, mesh.rank_coords(rank)))
        found.setdefault(tuple(coords[axis] for axis in axes), parts[rank])
    leader = min(parts)
    # The minor axis of a dim is joined first; parts stand in the order of their places.
    for dim in reversed(range(len(spec.entries))):
        for _ in axes_of(spec.entries[dim]):
            groups: dict[tuple[int, ...], list[Node]] = {}
            for place in sorted(found):
                groups.setdefault(place[:-1], []).append(found[place])
            found = {rest: build.joined(leader, nodes[0], nodes, dim) for rest, nodes in groups.items()}
    return found[()]
