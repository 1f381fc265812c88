"""`PTRAINX_CHECK_PASSES=1`: at a step's first call, its graph after each pass runs on the real inputs of the call.

`History` keeps a copy of every rank's graph after each pass. `check_history` runs them in turn, on a real mesh on all
ranks together, on a simulated one in lockstep, and tells the first pass that changes a result.

A pass that promises so leaves every bit as it was. Others may take sums in another order: elements may then differ by
the bound of their dtype (`BOUNDS`), relative to the largest element of the result before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ptrainx.compile.agreement import meeting_of
from ptrainx.compile.channel import Channels, Pending
from ptrainx.compile.graph import copy_module
from ptrainx.compile.interpret import interpret
from ptrainx.compile.lockstep import Lockstep
from ptrainx.compile.lower import CollectiveCall
from ptrainx.compile.passes.one_pass import Pass
from ptrainx.compile.program import Program, RankGraph
from ptrainx.core.errors import PassError

__all__ = ["BOUNDS", "History", "check_history"]

BOUNDS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far a pass that only promises to be close may move an element, relative to the largest one."""

Results = list[list[torch.Tensor]]  # by rank, by output


@dataclasses.dataclass
class History:
    """One rank's graphs.

    Attributes:
        traced: before any pass.
        after: (pass, the loop whose body it ran on or "", the whole graph then), in order.
    """

    traced: RankGraph
    after: list[tuple[Pass, str, RankGraph]]

    @classmethod
    def of(cls, graph: RankGraph) -> History:
        """The history of a graph that no pass has touched yet."""
        return cls(_copy(graph), [])

    def watch(self, one: Pass, where: str, graph: RankGraph) -> None:
        """Keeps what a pass has made; for `run_passes`."""
        self.after.append((one, where, _copy(graph)))


def _copy(graph: RankGraph) -> RankGraph:
    return dataclasses.replace(graph, module=copy_module(graph.module), axis_of=dict(graph.axis_of))


def check_history(program: Program, histories: Sequence[History], args: Sequence[list[torch.Tensor]]) -> None:
    """Runs every graph of every rank that this process plays.

    Args:
        program: what they were made of.
        histories: of each rank.
        args: each rank's local tensors; they are only read.

    Raises:
        PassError: a pass changes a result; names pass, output, element and both values.
        AgreementError: another rank found such a pass.
    """
    with meeting_of(program.mesh, f"the passes of {program.name}") as meeting:
        before = _run(program, [h.traced for h in histories], args)
        problem: PassError | None = None
        for i in range(len(histories[0].after)):
            one, where, _ = histories[0].after[i]
            after = _run(program, [h.after[i][2] for h in histories], args)
            # Every rank runs every graph, or others would wait in a collective for one that has left.
            problem = problem or _difference(program, one, where, before, after, histories)
            before = after
        if problem is not None:
            raise problem
        meeting.settle(None, {})


def _run(program: Program, graphs: Sequence[RankGraph], args: Sequence[list[torch.Tensor]]) -> Results:
    if not program.mesh.simulated:
        return [_run_here(Channels(program.mesh), graphs[0], args[0])]
    calls: list[list[CollectiveCall]] = [[] for _ in graphs]
    programs = [(_stepped(graph, made), made) for graph, made in zip(graphs, calls)]
    return Lockstep(programs, program.mesh.shape).run([list(own) for own in args])


def _stepped(graph: RankGraph, calls: list[CollectiveCall]) -> Any:
    """The graph as the lockstep run takes it: requests are (index into calls, operand)."""

    def step(args: list[torch.Tensor]) -> Any:
        run: Any = interpret(graph, args)
        result = None
        while True:
            try:
                call, operand = run.send(result)
            except StopIteration as stop:
                return stop.value
            calls.append(call)
            result = yield len(calls) - 1, operand

    return step


def _run_here(channels: Channels, graph: RankGraph, args: list[torch.Tensor]) -> list[torch.Tensor]:
    run: Any = interpret(graph, args)
    result = None
    while True:
        try:
            call, operand = run.send(result)
        except StopIteration as stop:
            return stop.value
        made = getattr(channels[call.axis], call.name.split("::")[-1])(operand, *call.args)
        result = made.wait() if isinstance(made, Pending) else made


def _difference(
    program: Program, one: Pass, where: str, before: Results, after: Results, histories: Sequence[History]
) -> PassError | None:
    for history, olds, news in zip(histories, before, after):
        for output, old, new in zip(history.traced.outputs, olds, news):
            index = _first_difference(old, new, one.exact)
            if index is None:
                continue
            at = f"{output.path}{list(index)}" if index else output.path
            place = f" in the body of {where}" if where else ""
            promise = "bit for bit" if one.exact else f"within {BOUNDS.get(old.dtype, 0):g} of the largest element"
            return PassError(
                f"{program.name}: the pass {one.name}{place} changes {at} of rank {history.traced.rank}",
                got=_told(new, index),
                expected=f"{_told(old, index)}, as before it, {promise}",
                fix="report it with the program; a pass of your own can be taken out of the list",
                source=program.source,
            )
    return None


def _told(value: torch.Tensor, index: tuple[int, ...]) -> str:
    return repr(value[index].item()) if index or value.ndim == 0 else f"{value.dtype}{list(value.shape)}"


def _first_difference(old: torch.Tensor, new: torch.Tensor, exact: bool) -> tuple[int, ...] | None:
    """The index of the first element that differs too much; () for a whole that differs in shape or dtype."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return ()
    if exact or not (old.is_floating_point() or old.is_complex()):
        wrong = _bits(old) != _bits(new)
    else:
        bound = BOUNDS.get(torch.empty((), dtype=old.dtype).real.dtype, 1e-4)
        largest = torch.nan_to_num(old.abs(), 0.0, 0.0, 0.0).max() if old.numel() else 0.0
        close = (old - new).abs() <= bound * largest
        wrong = ~(close | (old == new) | (old.isnan() & new.isnan()))
    places = wrong.nonzero()
    return tuple(places[0].tolist()) if len(places) else None


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj()).reshape(*value.shape[:-1], -1) if value.ndim else value.real
    kind = _INTEGERS[value.element_size()]
    return value if value.dtype is kind or value.dtype is torch.bool else value.contiguous().view(kind)
