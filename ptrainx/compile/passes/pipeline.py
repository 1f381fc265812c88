"""Runs the passes over a rank's graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ptrainx.compile.graph import called_bodies, check_legal, schema_name
from ptrainx.compile.passes.bucket import bucket_collectives
from ptrainx.compile.passes.common import share_common
from ptrainx.compile.passes.dead import drop_dead
from ptrainx.compile.passes.defer_sums import defer_loop_sums, merge_sums
from ptrainx.compile.passes.flatten_axes import flatten_axes
from ptrainx.compile.passes.functionalize import functionalize
from ptrainx.compile.passes.identities import drop_identities
from ptrainx.compile.passes.loops import trim_loops
from ptrainx.compile.passes.narrow_gathers import narrow_gathers
from ptrainx.compile.passes.narrow_random import narrow_random
from ptrainx.compile.passes.one_pass import Pass
from ptrainx.compile.passes.recompute import recompute
from ptrainx.compile.passes.scatter import cancel_gathers, scatter_reductions
from ptrainx.compile.passes.schedule import issue_early
from ptrainx.compile.passes.shared_gathers import share_gathers
from ptrainx.compile.program import RankGraph
from ptrainx.core.errors import InputError

__all__ = ["PASSES", "register_pass", "run_passes", "tidy"]


def _narrow_random(graph: RankGraph) -> RankGraph:
    if any(schema_name(n) == "ptrainx::random" for n in graph.module.graph.nodes):
        graph.module.graph = narrow_random(graph.module.graph)
    return graph


PASSES: list[Pass] = [
    Pass("functionalize", functionalize),
    Pass("recompute", recompute),
    Pass("drop_identities", drop_identities),
    Pass("share_common", share_common),
    Pass("drop_dead", drop_dead),
    Pass("narrow_random", _narrow_random),
    Pass("narrow_gathers", narrow_gathers),
    Pass("share_gathers", share_gathers),
    Pass("cancel_gathers", cancel_gathers, exact=False),
    Pass("scatter_reductions", scatter_reductions, exact=False),
    Pass("merge_sums", merge_sums, exact=False),
    Pass("flatten_axes", flatten_axes, exact=False),
    Pass("drop_dead", drop_dead),
    Pass("bucket_collectives", bucket_collectives, exact=False),
    Pass("issue_early", issue_early),
]
"""In the order in which they run, on the bodies of loops first. A list: `register_pass` adds to it."""

BEFORE_LOOPS = Pass("defer_loop_sums", defer_loop_sums, exact=False)
"""Before the passes over the bodies, so that they see what it leaves in them."""

Watch = Callable[[Pass, str, RankGraph], None]


def register_pass(one: Pass, behind: str) -> Callable[[], None]:
    """Adds a pass for the steps that are compiled from now on; all ranks have to.

    Args:
        one: the pass.
        behind: the name of the pass that it follows, of one that comes twice the last.

    Returns:
        a function that takes it out again.

    Raises:
        InputError: no pass has that name.
    """
    names = [known.name for known in PASSES]
    if behind not in names:
        raise InputError(f"there is no pass {behind!r}", expected=f"one of {', '.join(dict.fromkeys(names))}")
    PASSES.insert(len(names) - names[::-1].index(behind), one)
    return lambda: PASSES.remove(one)


def tidy(graph: RankGraph, remat: int = 0) -> RankGraph:
    """The graph of a loop's body and its gradient, ready to be cut in two: no writes, nothing twice, nothing unread.

    Args:
        graph: as traced.
        remat: the rematerialized call that the loop is part of, 0 for none.
    """
    graph = recompute(functionalize(graph), remat)
    for one in (drop_identities, share_common, drop_dead):
        graph = one(graph)
    return graph


def run_passes(graph: RankGraph, watch: Watch | None = None) -> RankGraph:
    """The graph after every pass, each checked; the bodies of its loops and calls first, as graphs of their own.

    Args:
        graph: as traced; it is changed.
        watch: called after each pass with it, where it ran ("" or a loop) and the whole graph as it is then.
    """
    graph = _run(BEFORE_LOOPS, graph, watch)
    for loop in trim_loops(graph.module.graph):
        body = dataclasses.replace(graph, module=loop.body, captures=[], capture_versions=[], outputs=())
        setattr(graph.module, loop.name, run_passes(body, _inside(watch, graph, loop.name)).module)
    for name, called in called_bodies(graph.module.graph).items():
        body = dataclasses.replace(graph, module=called, captures=[], capture_versions=[], outputs=())
        setattr(graph.module, name, run_passes(body, _inside(watch, graph, name)).module)
    for one in PASSES:
        graph = _run(one, graph, watch)
    graph.module.recompile()
    return graph


def _run(one: Pass, graph: RankGraph, watch: Watch | None) -> RankGraph:
    graph = one(graph)
    check_legal(graph.module.graph)
    if watch is not None:
        watch(one, "", graph)
    return graph


def _inside(watch: Watch | None, graph: RankGraph, loop: str) -> Watch | None:
    """The watch over the passes of a loop's body."""
    if watch is None:
        return None

    def inner(one: Pass, where: str, body: RankGraph) -> None:
        setattr(graph.module, loop, body.module)
        watch(one, f"{loop} {where}".strip(), graph)

    return inner
