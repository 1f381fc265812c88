"""The tables: every schedule for every number of ranks and microbatches, against longest paths, formulas, torch."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

import ptrainx as px
from ptrainx.schedules import ZBV, DualPipeV, GPipe, Interleaved1F1B, OneFOneB, ZeroBubble
from tests.ops.schedules.independent import longest_paths, torch_table

SCHEDULES = [
    GPipe(), OneFOneB(), Interleaved1F1B(1), Interleaved1F1B(), Interleaved1F1B(3), ZeroBubble(), ZBV(), DualPipeV()
]  # fmt: skip
MICROBATCHES = (*range(1, 18), 24)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
every_p = pytest.mark.parametrize("p", [1, 2, 3, 4, 8])


@every_p
@every_schedule
def test_every_action_is_done_once_where_its_stage_lies_and_none_waits_for_ever(schedule, p):
    for m in MICROBATCHES:
        table = schedule.table(p, m)
        stages = p * schedule.chunks
        assert (table.num_ranks, table.num_stages, table.num_microbatches) == (p, stages, m)
        done = Counter(
            (piece, s, i) for todo in table.actions for kind, s, i in todo for piece in ("IW" if kind == "B" else kind)
        )
        assert done == Counter((kind, s, i) for kind in "FIW" for s in range(stages) for i in range(m))
        for rank, todo in enumerate(table.actions):
            assert {action.stage for action in todo} == set(table.stages_of(rank))
            assert len(table.stages_of(rank)) == schedule.chunks
        ends = longest_paths(table.actions, stages)  # recursion without end, were there a deadlock
        timeline = table.timeline()
        assert {tuple(span.action): span.end for spans in timeline.spans for span in spans} == ends
        assert timeline.makespan == max(ends.values())


def idle(schedule, p: int, m: int) -> Fraction | None:
    """Idle time of a rank, in units of a stage's F, I or W, from the papers; below M = p, worked out by hand."""
    v, short = schedule.chunks, max(0, p - m)
    match schedule:
        case GPipe() | OneFOneB():
            return Fraction(3 * (p - 1))
        case Interleaved1F1B():
            return Fraction(3 * (p - 1 + (v - 1) * short))
        case ZeroBubble():
            return Fraction(p - 1 + short)
        case ZBV():
            return Fraction(p - 1) if 2 * m >= 3 * p - 1 else None
        case DualPipeV():
            return Fraction(p - 1) if m >= 2 * p else None
    raise AssertionError(schedule)


@every_p
@every_schedule
def test_bubble_is_that_of_the_formula(schedule, p):
    for m in MICROBATCHES:
        lost, bubble = idle(schedule, p, m), schedule.table(p, m).timeline().bubble
        if lost is not None:
            assert bubble == pytest.approx(float(lost / (3 * schedule.chunks * m + lost)), abs=1e-12)
        if (formula := schedule.bubble(p, m)) is not None:
            assert bubble == pytest.approx(formula, abs=1e-12)
        assert lost is None or formula is not None


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 3, 2), (4, 5, 3), (3, 4, 1)])
def test_bubble_of_zb_h1_with_other_durations(costs):
    f, i, w = costs
    for p, m in ((2, 2), (4, 4), (4, 9), (8, 16)):
        lost = (p - 1) * (f + i - w)
        timeline = ZeroBubble().table(p, m).timeline(forward=f, input=i, weight=w)
        assert timeline.bubble == pytest.approx(lost / (m * (f + i + w) + lost))


def stored(todo) -> int:
    """The most activations that a rank holds: of each (stage, microbatch), from its F to its B or W."""
    ends = {(s, i): k for k, (kind, s, i) in enumerate(todo) if kind in "BW"}
    starts = {(s, i): k for k, (kind, s, i) in enumerate(todo) if kind == "F"}
    return max(sum(starts[key] <= k < ends[key] for key in starts) for k in range(len(todo)))


@every_schedule
def test_activations_stored_are_those_promised(schedule):
    for p in (1, 2, 4, 8):
        for m in (1, 2, 3, 4, 5, 7, 8, 16, 17):
            table = schedule.table(p, m)
            held = tuple(map(stored, table.actions))
            assert table.timeline().peak_activations == held
            assert all(most <= bound for most, bound in zip(held, schedule.bound(p, m)))
            expected = {
                GPipe: [m] * p,
                OneFOneB: [min(m, p - rank) for rank in range(p)],
                ZeroBubble: [min(m, p)] * p,
            }.get(type(schedule))
            assert expected is None or list(held) == expected
            # In halves of stages, ZB-V stores what 1F1B's first rank does, and DualPipeV one more.
            assert not isinstance(schedule, ZBV) or max(held) == 2 * min(m, p)
            assert not isinstance(schedule, DualPipeV) or max(held) == min(2 * m, 2 * p + 1)


def test_microbatches_stored_by_interleaved_are_megatrons():
    for p, m, v in ((2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 16, 2)):
        held = Interleaved1F1B(v).table(p, m).timeline().peak_activations
        assert held == tuple(min(v * m, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p))


TORCH = [
    ("GPipe", GPipe(), [1, 3, 8]),
    ("Interleaved1F1B", Interleaved1F1B(), [1, 2, 4, 8, 16]),
    ("Interleaved1F1B", Interleaved1F1B(3), [2, 8, 16]),
    ("InterleavedZeroBubble", ZeroBubble(), [4, 8, 16]),
    ("ZBVZeroBubble", ZBV(), [1, 2, 4, 7, 8, 16]),
    ("DualPipeV", DualPipeV(), [8, 11, 16]),
]


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize(("name", "schedule", "microbatches"), TORCH, ids=[f"{row[0]}-{row[1]!r}" for row in TORCH])
def test_order_is_torchs_where_torch_has_one(name, schedule, microbatches, p):
    for m in microbatches:
        if name.startswith("Interleaved") and m % max(1, m // p):
            continue  # torch refuses it
        assert [list(map(tuple, todo)) for todo in schedule.table(p, m).actions] == torch_table(
            name, p, m, schedule.chunks
        )


@every_p
@every_schedule
def test_forwards_alone_lose_no_more_than_filling_the_pipeline(schedule, p):
    for m in (1, 2, 5, 8, 16):
        table = schedule.table(p, m, backward=False)
        assert not table.backward
        timeline = table.validate().timeline()
        work, turns_back = schedule.chunks * m, isinstance(schedule, (ZBV, DualPipeV))
        # The first microbatch has all stages ahead of it; a V has the last one after the turn as well.
        fill = 2 * (p - 1) if turns_back else p - 1 + (schedule.chunks - 1) * max(0, p - m)
        assert timeline.makespan == work + fill
        assert timeline.peak_activations == (0,) * p


def test_sends_delay_what_crosses_ranks_alone():
    # Microbatch 0 goes there and back over p - 1 borders; on the turn of a V, nothing is sent.
    one = OneFOneB().table(4, 1)
    assert one.timeline(send=10).makespan == one.timeline().makespan + 2 * 3 * 10
    v = ZBV().table(4, 1)
    assert v.timeline(send=10).makespan == v.timeline().makespan + 2 * 2 * 3 * 10


def test_stages_of_unequal_length():
    # One microbatch passes everything in turn; with many, the slowest stage sets the pace.
    table = OneFOneB().table(3, 1)
    assert table.timeline(forward=[1, 2, 4], backward=[3, 5, 9]).makespan == 24
    long = OneFOneB().table(3, 50).timeline(forward=[1, 2, 4], backward=[3, 5, 9])
    assert long.makespan == 50 * 13 + (1 + 2) + (3 + 5)
    assert long.busy == (200, 350, 650)


def test_tables_are_made_once():
    assert ZBV().table(4, 8) is ZBV().table(4, 8)
    assert Interleaved1F1B(2).table(2, 4) is not Interleaved1F1B(3).table(2, 4)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (2, 1.5), ("2", 1)])
def test_sizes_that_are_none(sizes):
    with pytest.raises(px.errors.InputError, match="whole number from 1 on"):
        OneFOneB().table(*sizes)


@pytest.mark.parametrize("chunks", [0, 1.5, "2"])
def test_chunks_that_are_none(chunks):
    with pytest.raises(px.errors.InputError, match="chunks"):
        Interleaved1F1B(chunks)


@pytest.mark.parametrize("forward", [-1.0, [1.0], float("nan")])
def test_durations_that_are_none(forward):
    with pytest.raises(px.errors.InputError, match="forward"):
        OneFOneB().table(2, 2).timeline(forward=forward)
