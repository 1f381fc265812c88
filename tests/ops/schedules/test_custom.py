"""Schedules of one's own, and names."""

from __future__ import annotations

import importlib.metadata

import pytest

import ptrainx as px
from ptrainx.ops.schedules import registry
from ptrainx.schedules import (
    ZBV,
    Action,
    Custom,
    GPipe,
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    Table,
    ZeroBubble,
    get,
    names,
    register,
)


def test_a_function_that_makes_lists():
    mine = Custom(lambda p, m: [[(kind, r, i) for kind in "FB" for i in range(m)] for r in range(p)])
    for p, m in ((1, 1), (2, 5), (4, 3)):
        assert mine.table(p, m).actions == GPipe().table(p, m).actions
        assert mine.table(p, m) is mine.table(p, m)
    assert mine.bound(2, 5) is None
    assert mine.bubble(2, 5) is None


def test_a_function_that_makes_tables():
    assert Custom(ZBV().table, chunks=2).table(3, 4) == ZBV().table(3, 4)
    with pytest.raises(px.errors.ScheduleError, match="another number of stages on each rank"):
        Custom(ZBV().table).table(3, 4)


def test_a_table_is_for_its_own_sizes():
    mine = Custom(ZBV().table(2, 3))
    assert (mine.chunks, mine.table(2, 3)) == (2, ZBV().table(2, 3))
    for sizes in ((2, 4), (3, 3)):
        with pytest.raises(px.errors.ScheduleError, match="its table is for other numbers"):
            mine.table(*sizes)


def test_lists_tell_their_sizes():
    mine = Custom([list(todo) for todo in Interleaved1F1B().table(2, 3).actions], chunks=2)
    assert mine.table(2, 3).actions == Interleaved1F1B().table(2, 3).actions
    assert not mine.table(2, 3, backward=False).backward


@pytest.mark.parametrize("placement", ["v", (0, 1, 1, 0), lambda p: [*range(p), *reversed(range(p))]])
def test_placements(placement):
    mine = Custom(lambda p, m: ZBV().table(p, m).actions, chunks=2, placement=placement)
    assert mine.table(2, 5) == Table(2, 4, 5, (0, 1, 1, 0), ZBV().table(2, 5).actions)


def test_a_placement_that_does_not_fit_the_actions():
    with pytest.raises(px.errors.ScheduleError, match="rank that does not hold the stage"):
        Custom(lambda p, m: ZBV().table(p, m).actions, chunks=2).table(2, 5)


@pytest.mark.parametrize("bound", [(4, 4), lambda p, m: [m] * p])
def test_bounds_are_checked(bound):
    assert Custom(GPipe().actions, bound=bound).table(2, 4).activation_bound == (4, 4)
    with pytest.raises(px.errors.ScheduleError, match="more activations than the schedule promises"):
        Custom(GPipe().actions, bound=(4, 3)).table(2, 4)


@pytest.mark.parametrize("made", [3, "F0", None])
def test_what_is_no_table(made):
    with pytest.raises(px.errors.ScheduleError, match="no table"):
        Custom(made)
    with pytest.raises(px.errors.ScheduleError, match="no table"):
        Custom(lambda p, m: made).table(1, 1)


def test_lists_are_validated_at_once():
    with pytest.raises(px.errors.ScheduleError, match="never does"):
        Custom([[("F", 0, 0)], []])


@pytest.mark.parametrize("options", [{"placement": "ring"}, {"chunks": 0}, {"chunks": 1.5}])
def test_options_that_are_none(options):
    with pytest.raises(px.errors.InputError, match=r"schedules\.Custom"):
        Custom(GPipe().actions, **options)


class Backwards(Schedule):
    """GPipe with the gradients of the last microbatch first."""

    chunks = 1
    name = "backwards"

    def actions(self, num_ranks, num_microbatches):
        ms = range(num_microbatches)
        return [[Action(*a) for a in [*(("F", r, i) for i in ms), *(("B", r, i) for i in reversed(ms))]]
                for r in range(num_ranks)]  # fmt: skip


def test_a_class_of_ones_own():
    table = Backwards().table(3, 4)
    assert table.rank_of_stage == (0, 1, 2)
    # The last microbatch's forward ends last, and its gradient follows at once: GPipe's makespan.
    assert table.timeline().makespan == GPipe().table(3, 4).timeline().makespan
    assert Backwards().visualize(3, 4).startswith("backwards: 3 ranks, 4 microbatches\n")


def test_names_of_ours():
    assert [get(name) for name in ("gpipe", "1f1b", "interleaved", "zb", "zbv")] == [
        GPipe(), OneFOneB(), Interleaved1F1B(chunks=2), ZeroBubble(), ZBV()
    ]  # fmt: skip
    with pytest.raises(px.errors.InputError, match="unknown schedule") as caught:
        get("1f1f")
    assert "1f1b, dualpipev, gpipe" in caught.value.expected


@pytest.fixture
def registered(monkeypatch):
    """A registry of the test's own."""
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    registry._of_packages.cache_clear()
    yield
    registry._of_packages.cache_clear()


def test_users_register_theirs(registered):
    mine = Custom(GPipe().actions)
    register("mine", mine)
    assert get("mine") is mine
    assert "mine" in names()
    for name, schedule in (("", mine), (3, mine), ("other", GPipe), ("other", "1f1b")):
        with pytest.raises(px.errors.InputError, match=r"schedules\.register"):
            register(name, schedule)


def register_from_package():
    register("theirs", Interleaved1F1B(chunks=4))


def test_installed_packages_register_theirs(registered, monkeypatch):
    entry = importlib.metadata.EntryPoint("theirs", f"{__name__}:register_from_package", "ptrainx.schedules")
    monkeypatch.setattr(entry.__class__, "load", lambda self: register_from_package)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == entry.group else [])
    assert get("theirs") == Interleaved1F1B(chunks=4)
