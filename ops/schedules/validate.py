"""Whether a schedule can be run: every action once, on its rank, none waits for ever, no more is stored than promised.

In: a table's parts. Out: nothing, or a `ScheduleError` that names the first bad action, its rank and position, and
tells of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ptrainx.core.errors import ScheduleError
from ptrainx.ops.schedules.actions import KINDS, Action, needs
from ptrainx.ops.schedules.clock import Span, run

__all__ = ["Parts", "validate"]

MOST_TOLD = 3  # mistakes that are told beside the first


@dataclasses.dataclass(frozen=True)
class Parts:
    """What there is to check of a table; see `Table`."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_of_stage: Sequence[int]
    actions: Sequence[Sequence[Action]]
    activation_bound: Sequence[int] | None


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One thing that is wrong, in the parts of an error's message."""

    problem: str
    got: str
    expected: str
    fix: str


def validate(parts: Parts) -> None:
    """Raises ScheduleError for the first bad action; see the module."""
    for check in (_sizes, _places, _missing, _deadlock, _stored):
        mistakes = list(check(parts))
        if mistakes:
            first, *others = mistakes
            also = [f"also {other.problem}" for other in others[:MOST_TOLD]]
            more = [f"and {len(others) - MOST_TOLD} more"] if len(others) > MOST_TOLD else []
            raise ScheduleError(
                f"schedule: {first.problem}",
                got="; ".join([first.got, *also, *more]),
                expected=first.expected,
                fix=first.fix,
            )


def _sizes(parts: Parts) -> Iterator[Mistake]:
    p, stages, m = parts.num_ranks, parts.num_stages, parts.num_microbatches
    whole = all(isinstance(size, int) and size >= 1 for size in (p, stages, m))
    if not whole or stages % p:
        yield Mistake(
            "sizes that make no pipeline",
            f"{p} ranks, {stages} stages, {m} microbatches",
            "whole numbers from 1 on, and equally many stages on each rank",
            "let num_stages be num_ranks times the stages per rank",
        )
        return
    held = [list(parts.rank_of_stage).count(rank) for rank in range(p)]
    if len(parts.rank_of_stage) != stages or held != [stages // p] * p:
        yield Mistake(
            "rank_of_stage does not give each rank equally many stages",
            f"rank_of_stage={tuple(parts.rank_of_stage)}",
            f"{stages} entries, ranks 0 to {p - 1}, each as often as the others",
            "name for each stage the rank that holds it",
        )
    if len(parts.actions) != p:
        yield Mistake(
            "not one list of actions for each rank",
            f"{len(parts.actions)} lists",
            f"{p}, one a rank",
            "give every rank a list, in the order of ranks",
        )
    if parts.activation_bound is not None and len(parts.activation_bound) != p:
        yield Mistake(
            "activation_bound has not one number for each rank",
            f"activation_bound={tuple(parts.activation_bound)}",
            f"{p} numbers",
            "give the most activations of every rank, in the order of ranks",
        )


def _places(parts: Parts) -> Iterator[Mistake]:
    seen: dict[Action, str] = {}
    for rank, position, action in _positions(parts.actions):
        here = f"rank {rank}, position {position}: {action}"
        if action.kind not in KINDS:
            kinds = ", ".join(KINDS)
            yield Mistake(f"{here} is of no known kind", repr(action.kind), f"one of {kinds}", f"use one of {kinds}")
        elif not (action.stage in range(parts.num_stages) and action.microbatch in range(parts.num_microbatches)):
            yield Mistake(
                f"{here} does not exist",
                f"stage {action.stage!r}, microbatch {action.microbatch!r}",
                f"stages 0 to {parts.num_stages - 1}, microbatches 0 to {parts.num_microbatches - 1}",
                "leave it out, or correct its numbers",
            )
        elif parts.rank_of_stage[action.stage] != rank:
            holder = parts.rank_of_stage[action.stage]
            yield Mistake(
                f"{here} is on a rank that does not hold the stage",
                f"it stands in the list of rank {rank}",
                f"rank {holder}, which holds stage {action.stage}",
                f"move it to rank {holder}",
            )
        else:
            for piece in _pieces(action):
                if piece in seen:
                    yield Mistake(
                        f"{here} repeats what is done at {seen[piece]}",
                        f"{piece} twice" if piece != action else "it twice",
                        "each action once; B stands for I and W",
                        "leave one of them out",
                    )
                    break
            else:
                seen.update(dict.fromkeys(_pieces(action), f"rank {rank}, position {position}, {action}"))


def _missing(parts: Parts) -> Iterator[Mistake]:
    present = {piece for _, _, action in _positions(parts.actions) for piece in _pieces(action)}
    wanted = "FIW" if any(piece.kind != "F" for piece in present) else "F"
    for stage in range(parts.num_stages):
        for microbatch in range(parts.num_microbatches):
            lacking = [kind for kind in wanted if Action(kind, stage, microbatch) not in present]
            if lacking:
                name = "B" if lacking == ["I", "W"] else lacking[0]
                rank = parts.rank_of_stage[stage]
                yield Mistake(
                    f"rank {rank} never does {Action(name, stage, microbatch)}",
                    f"it is not among the rank's {len(parts.actions[rank])} actions",
                    "F of every microbatch at every stage; where there are gradients, B of each too, or I and W",
                    f"add it to the list of rank {rank}",
                )


def _deadlock(parts: Parts) -> Iterator[Mistake]:
    spans = run(parts.actions, parts.rank_of_stage, lambda action: 1.0)
    if all(len(had) == len(todo) for had, todo in zip(spans, parts.actions)):
        return
    place = {piece: (r, k) for r, k, action in _positions(parts.actions) for piece in _pieces(action)}
    waits = {rank: _wait(parts, rank, spans) for rank in range(parts.num_ranks) if _stopped(parts, rank, spans)}
    circle = _circle({rank: place[need][0] for rank, need in waits.items()})
    # Of the circle, the rank that came to a stop first.
    first = min(circle, key=lambda rank: (spans[rank][-1].end if spans[rank] else 0.0, rank))
    need = waits[first]
    rank, position = place[need]
    needed, stop = parts.actions[rank][position], len(spans[rank])
    stopped = {r: f"rank {r}, position {len(spans[r])}: {parts.actions[r][len(spans[r])]}" for r in circle}
    wanted = {r: parts.actions[place[waits[r]][0]][place[waits[r]][1]] for r in circle}
    yield Mistake(
        f"{stopped[first]} comes before {needed}, which it needs"
        if circle == [first]
        else f"deadlock at {stopped[first]} waits for {needed}, which comes at position {position} of rank {rank}",
        "; ".join(f"{stopped[r]} waits for {wanted[r]}" for r in circle),
        "an order in which every action comes after what it needs",
        f"on rank {rank}, put {needed} before position {stop}, {parts.actions[rank][stop]}",
    )


def _stored(parts: Parts) -> Iterator[Mistake]:
    if parts.activation_bound is None or all(action.kind == "F" for _, _, action in _positions(parts.actions)):
        return
    for rank, (actions, bound) in enumerate(zip(parts.actions, parts.activation_bound)):
        stored = 0
        for position, action in enumerate(actions):
            stored += (action.kind == "F") - (action.kind in "BW")
            if stored > bound:
                yield Mistake(
                    f"rank {rank}, position {position}: {action} stores more activations than the schedule promises",
                    f"{stored} stored",
                    f"at most {bound} on rank {rank}",
                    "do a B, or an I and its W, before it, or raise the bound",
                )
                break


def _positions(actions: Sequence[Sequence[Action]]) -> Iterator[tuple[int, int, Action]]:
    for rank, todo in enumerate(actions):
        for position, action in enumerate(todo):
            yield rank, position, action


def _pieces(action: Action) -> tuple[Action, ...]:
    """An action with B taken apart."""
    return tuple(Action(kind, *action[1:]) for kind in "IW") if action.kind == "B" else (action,)


def _stopped(parts: Parts, rank: int, spans: list[list[Span]]) -> bool:
    return len(spans[rank]) < len(parts.actions[rank])


def _wait(parts: Parts, rank: int, spans: list[list[Span]]) -> Action:
    """What a stopped rank waits for: the first need of its next action that has not been done."""
    done = {piece for had in spans for span in had for piece in _pieces(span.action)}
    wanted = needs(parts.actions[rank][len(spans[rank])], parts.num_stages)
    return next(need for need in wanted if need not in done)


def _circle(waits_for: dict[int, int]) -> list[int]:
    """Ranks that wait for each other in turn. Every stopped rank waits for a stopped one, so there is such a circle."""
    rank, path = min(waits_for), []
    while rank not in path:
        path.append(rank)
        rank = waits_for[rank]
    return path[path.index(rank) :]
