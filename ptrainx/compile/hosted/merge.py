"""The graphs of logical ranks to one graph: each is walked to its next collective, which happens once all members of
its group that the device hosts have come to it.

The order in which ranks are walked, and so the order of the devices' collectives, follows from the graphs alone and is
the same on every device.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ptrainx.compile.graph import axis_group, is_collective, is_loop, is_wait, output_node
from ptrainx.compile.hosted.builder import Builder
from ptrainx.compile.hosted.exchange import Exchange
from ptrainx.compile.hosted.loops import merge_loops
from ptrainx.core.errors import AgreementError
from ptrainx.mesh.axes import split_axes
from ptrainx.mesh.logical import LogicalMesh

__all__ = ["merge"]


def merge(
    build: Builder,
    mesh: LogicalMesh,
    axis_of: Mapping[str, str],
    modules: Mapping[int, GraphModule],
    inputs: Mapping[int, Sequence[Node]],
) -> dict[int, list[Node]]:
    """Adds what every hosted rank's graph computes.

    Args:
        build: where to.
        mesh: of the logical ranks.
        axis_of: group name in the ranks' graphs -> axis, or axes taken together.
        modules: each hosted rank's graph.
        inputs: nodes for each one's placeholders.

    Returns:
        nodes for each one's results.

    Raises:
        AgreementError: the ranks wait for each other for ever.
    """
    walks = {rank: _Walk(rank, module, inputs[rank]) for rank, module in modules.items()}
    waiting = {rank: node for rank, walk in walks.items() if (node := walk.advance(build)) is not None}
    while waiting:
        arrived = _meet(build, mesh, axis_of, walks, waiting)
        if not arrived:
            sides = "\n    ".join(f"logical rank {rank} waits in {node.target}" for rank, node in waiting.items())
            raise AgreementError(
                f"the logical ranks wait for each other for ever:\n    {sides}",
                fix="choose dims that the logical mesh divides, or leave out reductions='ordered'",
            )
        for rank in arrived:
            node = walks[rank].advance(build)
            waiting.pop(rank)
            if node is not None:
                waiting[rank] = node
    return {rank: walk.results for rank, walk in walks.items()}


class _Walk:
    """One rank's graph, as far as it has been added.

    Attributes:
        known: its nodes -> those of the graph under construction; a loop's results are a list.
        results: once the end is reached.
    """

    def __init__(self, rank: int, module: GraphModule, inputs: Sequence[Node]):
        self.rank, self.module = rank, module
        nodes = list(module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.known: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))
        self.rest = iter([node for node in nodes if node.op not in ("placeholder", "output")])
        self.output = output_node(module.graph)
        self.results: list[Node] = []

    def advance(self, build: Builder) -> Node | None:
        """Adds nodes up to the next collective or loop, which is the result; None at the end."""
        for node in self.rest:
            if is_collective(node) or is_loop(node):
                return node
            self._add(build, node)
        given: Any = self.output.args[0]
        self.results = [self.known[node] for node in given]
        return None

    def _add(self, build: Builder, node: Node) -> None:
        if node.op == "get_attr":
            value = getattr(self.module, str(node.target))
            if isinstance(value, torch.Tensor):
                self.known[node] = build.constant(value)
            return
        source: Any = node.args[0] if node.args else None
        if is_wait(node):
            self.known[node] = self.known[source]
        elif node.target is operator.getitem and isinstance(self.known[source], list):
            self.known[node] = self.known[source][node.args[1]]
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.known.__getitem__)
            self.known[node] = build.add(self.rank, node, node.target, *args, **kwargs)


def _meet(
    build: Builder,
    mesh: LogicalMesh,
    axis_of: Mapping[str, str],
    walks: Mapping[int, _Walk],
    waiting: Mapping[int, Node],
) -> list[int]:
    """Adds every collective and loop that all of its hosted ranks have come to; who can go on."""
    if len(waiting) == len(walks) and all(map(is_loop, waiting.values())):

        def inside(part: Builder, bodies: Mapping[int, GraphModule], own: Mapping[int, Sequence[Node]]) -> Any:
            return merge(part, mesh, axis_of, bodies, own)

        known = {rank: walk.known for rank, walk in walks.items()}
        for rank, results in merge_loops(build, waiting, known, inside).items():
            known[rank][waiting[rank]] = results
        return list(waiting)
    arrived: list[int] = []
    for rank, node in waiting.items():
        if rank in arrived or is_loop(node):
            continue
        axes = split_axes(axis_of[axis_group(node)])
        group = [other for other in walks if _elsewhere(mesh, other, axes) == _elsewhere(mesh, rank, axes)]
        calls = [waiting.get(other) for other in group]
        if not all(call is not None and _same(call, node, axis_of) for call in calls):
            continue
        places = {other: _place(mesh, other, axes) for other in group}
        exchange = Exchange(
            build,
            mesh,
            axes,
            {places[other]: waiting[other] for other in group},
            {places[other]: walks[other].known[waiting[other].args[0]] for other in group},  # type: ignore[index]
            group[0],
        )
        got = exchange.results()
        for other in group:
            walks[other].known[waiting[other]] = got[places[other]]
        arrived += group
    return arrived


def _same(call: Node, other: Node, axis_of: Mapping[str, str]) -> bool:
    return call.target is other.target and axis_of[axis_group(call)] == axis_of[axis_group(other)]


def _place(mesh: LogicalMesh, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """A rank's place along some axes."""
    coords = dict(zip(mesh.axis_names, mesh.rank_coords(rank)))
    return tuple(coords[axis] for axis in axes)


def _elsewhere(mesh: LogicalMesh, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
    """A rank's place along all other axes."""
    return _place(mesh, rank, [axis for axis in mesh.axis_names if axis not in axes])
