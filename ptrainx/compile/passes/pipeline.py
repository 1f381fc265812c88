"""Runs the passes over a rank's graph."""

from __future__ import annotations

from collections.abc import Callable

from ptrainx.compile.graph import check_legal, schema_name
from ptrainx.compile.passes.bucket import bucket_reductions
from ptrainx.compile.passes.common import share_common
from ptrainx.compile.passes.dead import drop_dead
from ptrainx.compile.passes.functionalize import functionalize
from ptrainx.compile.passes.identities import drop_identities
from ptrainx.compile.passes.narrow_random import narrow_random
from ptrainx.compile.passes.schedule import issue_early
from ptrainx.compile.trace import RankGraph

__all__ = ["PASSES", "run_passes"]


def _narrow_random(graph: RankGraph) -> RankGraph:
    if any(schema_name(n) == "ptrainx::random" for n in graph.module.graph.nodes):
        graph.module.graph = narrow_random(graph.module.graph)
    return graph


PASSES: tuple[Callable[[RankGraph], RankGraph], ...] = (
    functionalize,
    drop_identities,
    share_common,
    drop_dead,
    _narrow_random,
    bucket_reductions,
    issue_early,
)


def run_passes(graph: RankGraph) -> RankGraph:
    """The graph after every pass, each checked."""
    for one in PASSES:
        graph = one(graph)
        check_legal(graph.module.graph)
    graph.module.recompile()
    return graph
