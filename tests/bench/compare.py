"""Runs contenders side by side at one size: losses first, then times.

In: names and counts. Out: a `Comparison`. Contenders take turns, forwards in one round and backwards in the next, so
that whatever else the machine does meets all alike; a ratio is that of two contenders' medians within one round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.bench.model import STEPS_TO_LOSS
from tests.bench.processes import ContenderFailed, Processes
from tests.bench.roster import GROUPS, REFERENCE, ROSTER, Contender, missing

__all__ = ["MISMATCH", "Comparison", "Ratio", "Row", "compare", "losses_agree"]

MISMATCH = "its losses are not those of one device"
TOLERANCE = 1e-4  # relative, of losses
BUILD_TIMEOUT = 900.0
VISIT_TIMEOUT = 300.0


class Row(NamedTuple):
    """What a contender came to.

    Attributes:
        name: of the contender.
        status: "ok", MISMATCH (then no time is told), or why it did not run.
        losses: first, and that of step 23.
        start_s: seconds up to the end of the first step.
        rounds: seconds a step, one median for each round; of the slower rank, where there are two.
        cpu: processor seconds a step, one mean for each round; of all processes and threads. Others' load on the
            machine hardly touches it.
    """

    name: str
    status: str
    losses: tuple[float, float] | None = None
    start_s: float | None = None
    rounds: tuple[float, ...] = ()
    cpu: tuple[float, ...] = ()

    @property
    def ms(self) -> float | None:
        """Median milliseconds a step."""
        return statistics.median(self.rounds) * 1e3 if self.rounds else None

    @property
    def cpu_ms(self) -> float | None:
        """Median processor milliseconds a step."""
        return statistics.median(self.cpu) * 1e3 if self.cpu else None


class Ratio(NamedTuple):
    """The median of paired ratios, and their quartiles."""

    median: float
    low: float
    high: float


class Comparison(NamedTuple):
    """Everything that was found at one size."""

    size: str
    reference: tuple[float, float]
    rows: tuple[Row, ...]

    def best(self, name: str) -> str:
        """The fastest contender of a group of `roster.GROUPS` by its median; the name itself if it is no group's."""
        timed = {row.name: row.ms for row in self.rows if row.ms is not None}
        members = [member for member in GROUPS.get(name, (name,)) if member in timed]
        return min(members, key=timed.__getitem__, default=name)

    def ratio(self, name: str, base: str) -> Ratio | None:
        """How many times as long `name` took as `base`, contenders or groups; None if one of them has no times."""
        name, base = self.best(name), self.best(base)
        rounds = {row.name: row.rounds for row in self.rows}
        pairs = [a / b for a, b in zip(rounds.get(name, ()), rounds.get(base, ()))]
        if not pairs:
            return None
        if len(pairs) == 1:
            return Ratio(pairs[0], pairs[0], pairs[0])
        low, median, high = statistics.quantiles(pairs, n=4, method="inclusive")
        return Ratio(median, low, high)


def losses_agree(losses: Sequence[float], reference: Sequence[float], *, last: bool = True) -> bool:
    """Whether the first loss, and the last one, are the reference's to within 1e-4."""
    pairs = list(zip(losses, reference))[: 2 if last else 1]
    return all(abs(a - b) <= TOLERANCE * abs(b) for a, b in pairs)


def compare(
    processes: Processes,
    size: str,
    names: Sequence[str],
    *,
    steps: int,
    rounds: int,
    report: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Trains every contender for 23 steps, checks their losses, then times them in turn.

    Args:
        processes: to run in.
        size: of the model.
        names: of contenders.
        steps: timed steps at each visit.
        rounds: visits to each contender.
        report: called with a line when something is done.
    """
    first, *_, last = processes.call(
        "ranks", BUILD_TIMEOUT, "build", REFERENCE.name, REFERENCE.where, size, STEPS_TO_LOSS, only=0
    )[0]["losses"]
    processes.call("ranks", VISIT_TIMEOUT, "drop")
    rows = _build_all(processes, size, names, (first, last), report)
    running = [name for name in names if rows[name].status == "ok"]
    times: dict[str, list[float]] = {name: [] for name in running}
    used: dict[str, list[float]] = {name: [] for name in running}
    for number in range(rounds):
        for name in running if number % 2 == 0 else running[::-1]:
            answers = processes.call(ROSTER[name].runs_in, VISIT_TIMEOUT, "visit", name, steps)
            times[name].append(statistics.median(map(max, zip(*(wall for wall, _ in answers)))))
            used[name].append(sum(cpu for _, cpu in answers))
        report(f"{size}: round {number + 1} of {rounds}")
    for group in {ROSTER[name].runs_in for name in running}:
        processes.call(group, VISIT_TIMEOUT, "drop")
    for name in running:
        rows[name] = rows[name]._replace(rounds=tuple(times[name]), cpu=tuple(used[name]))
    return Comparison(size, (first, last), tuple(rows[name] for name in names))


def _build_all(
    processes: Processes, size: str, names: Sequence[str], reference: tuple[float, float], report: Callable[[str], None]
) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        contender = ROSTER[name]
        reason = missing(contender)
        if reason is not None:
            rows[name] = Row(name, reason)
            continue
        try:
            rows[name] = _build(processes, size, contender, reference)
        except ContenderFailed as error:
            rows[name] = Row(name, error.reason)
            if error.stuck:
                # The group's processes are lost, and with them what they had built.
                processes.end(contender.runs_in)
                waiting += [
                    n for n, row in rows.items() if row.status == "ok" and ROSTER[n].runs_in == contender.runs_in
                ]
        report(f"{size}: {name}: {rows[name].status}")
    return rows


def _build(processes: Processes, size: str, contender: Contender, reference: tuple[float, float]) -> Row:
    group = contender.runs_in
    answers: list[dict[str, Any]] = processes.call(
        group, BUILD_TIMEOUT, "build", contender.name, contender.where, size, STEPS_TO_LOSS
    )
    means = [statistics.fmean(losses) for losses in zip(*(answer["losses"] for answer in answers))]
    losses = (means[0], means[-1])
    agree = losses_agree(losses, reference, last=contender.same_losses)
    if not agree:
        processes.call(group, VISIT_TIMEOUT, "drop", contender.name)
    start_s = max(answer["start_s"] for answer in answers)
    return Row(contender.name, "ok" if agree else MISMATCH, losses, start_s)
