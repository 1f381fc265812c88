"""The graphs of logical ranks, after their passes, to one graph for each device.

Enters: a graph for every logical rank that this process's devices host. Leaves: a `RankGraph` for each device, whose
arguments and results are the device's own parts, like those of any other program. Next stage: `backend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ptrainx.compile.graph import check_legal, output_node
from ptrainx.compile.hosted.boundary import joined_parts, own_part_of
from ptrainx.compile.hosted.builder import Builder
from ptrainx.compile.hosted.exchange import group_name
from ptrainx.compile.hosted.merge import merge
from ptrainx.compile.passes.dead import drop_dead
from ptrainx.compile.passes.schedule import issue_early
from ptrainx.compile.program import Program, RankGraph
from ptrainx.core import torch_compat as tc
from ptrainx.mesh.logical import LogicalMesh, check_hosted
from ptrainx.mesh.placement import local_shape

__all__ = ["host_graphs"]


def host_graphs(program: Program, graphs: Sequence[RankGraph]) -> list[RankGraph]:
    """A graph for each device that this process plays.

    Args:
        program: with a logical mesh.
        graphs: of the logical ranks, after the passes.

    Raises:
        SpecError: a result that the logical ranks of a device can't hold together.
    """
    logical = program.logical
    assert logical is not None
    by_rank = {graph.rank: graph for graph in graphs}
    for output in graphs[0].outputs:
        check_hosted(output.spec, logical, output.shape, f"{program.name}: {output.path}")
    return [
        _host(program, logical, device, {rank: by_rank[rank] for rank in logical.hosted(device)})
        for device in program.mesh.ranks
    ]


def _host(program: Program, logical: LogicalMesh, device: int, graphs: Mapping[int, RankGraph]) -> RankGraph:
    first = next(iter(graphs.values()))
    build = Builder(tc.FakeTensorMode())
    placeholders = {rank: list(graph.module.graph.find_nodes(op="placeholder")) for rank, graph in graphs.items()}
    arguments = [_argument(build, program, i, placeholders[first.rank][i]) for i in range(len(program.arguments))]
    captures, captured = _captures(build, graphs, placeholders, len(arguments))
    inputs = {
        rank: [
            *(own_part_of(build, logical, a.spec, node, rank) for a, node in zip(program.arguments, arguments)),
            *captured[rank],
        ]
        for rank in graphs
    }
    modules = {rank: graph.module for rank, graph in graphs.items()}
    results = merge(build, logical, first.axis_of, modules, inputs)
    joined = [
        joined_parts(build, logical, output.spec, {rank: own[i] for rank, own in results.items()})
        for i, output in enumerate(first.outputs)
    ]
    module = build.finish(joined, output_node(first.module.graph).meta)
    graph = RankGraph(
        module,
        device,
        [value for value, _ in captures],
        [version for _, version in captures],
        first.out_tree,
        first.outputs,
        build.fake_mode,
        {group_name(axis): axis for axis in program.mesh.axis_names},
        program.mesh.shape,
        program.mesh.one_backend,
        first.remats,
    )
    graph = issue_early(drop_dead(graph))
    check_legal(graph.module.graph)
    graph.module.recompile()
    return graph


def _argument(build: Builder, program: Program, index: int, like: Node) -> Node:
    argument = program.arguments[index]
    shape = local_shape(argument.spec, program.mesh, argument.shape)
    value: torch.Tensor = like.meta["val"]
    with build.fake_mode:
        local = torch.empty(shape, dtype=value.dtype, device=value.device)
    return build.placeholder(f"a{index}", local, like.meta)


def _captures(
    build: Builder, graphs: Mapping[int, RankGraph], placeholders: Mapping[int, list[Node]], n_arguments: int
) -> tuple[list[tuple[Any, int | None]], dict[int, list[Node]]]:
    """(captured values with their versions, the nodes that stand for each rank's): all ranks capture the same ones."""
    known: dict[int, Node] = {}
    captures: list[tuple[Any, int | None]] = []
    found: dict[int, list[Node]] = {rank: [] for rank in graphs}
    for rank, graph in graphs.items():
        own = placeholders[rank][n_arguments:]
        for node, value, version in zip(own, graph.captures, graph.capture_versions, strict=True):
            if id(value) not in known:
                known[id(value)] = build.placeholder(f"captured_{len(known)}", node.meta["val"], node.meta)
                captures.append((value, version))
            found[rank].append(known[id(value)])
    return captures, found
