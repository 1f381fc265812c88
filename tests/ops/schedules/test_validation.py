"""What is found wrong in a table: the first bad action by name, rank and position, and what to do."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import ptrainx as px
from ptrainx.schedules import GPipe, Interleaved1F1B, OneFOneB, Table, ZeroBubble
from tests.ops.schedules.independent import longest_paths

GOOD = OneFOneB().table(2, 4)
SPLIT = ZeroBubble().table(2, 4)


def edited(table: Table, *edits) -> Table:
    """The table with entries replaced, `(rank, position, action)`, None for left out."""
    lists = [list(todo) for todo in table.actions]
    for rank, position, action in edits:
        lists[rank][position] = action
    return dataclasses.replace(table, actions=[[a for a in todo if a is not None] for todo in lists])


def swapped(table: Table, rank: int, one: int, other: int) -> Table:
    todo = table.actions[rank]
    return edited(table, (rank, one, todo[other]), (rank, other, todo[one]))


BAD = {
    "B before its own F": (
        swapped(GOOD, 1, 0, 1),
        "rank 1, position 0: B(stage 1, microbatch 0) comes before F(stage 1, microbatch 0)",
        "on rank 1, put F(stage 1, microbatch 0) before position 0, B(stage 1, microbatch 0)",
    ),
    "W before its I": (
        swapped(SPLIT, 0, 2, 3),
        "rank 0, position 2: W(stage 0, microbatch 0) comes before I(stage 0, microbatch 0), which it needs",
        "on rank 0, put I(stage 0, microbatch 0) before position 2, W(stage 0, microbatch 0)",
    ),
    "no forward ahead": (
        Table(
            2, 2, 2, (0, 1),
            [[(k, 0, i) for i in range(2) for k in "FB"], [(k, 1, i) for k in "FB" for i in range(2)]],
        ),
        "deadlock at rank 0, position 1: B(stage 0, microbatch 0) waits for B(stage 1, microbatch 0), which comes at "
        "position 2 of rank 1",
        "on rank 1, put B(stage 1, microbatch 0) before position 1, F(stage 1, microbatch 1)",
    ),
    "a circle of two of three ranks, for which the other waits": (
        Table(
            3, 3, 2, (0, 1, 2),
            [
                [(k, 0, i) for k in "FB" for i in range(2)],
                [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1)],
                [("F", 2, 0), ("F", 2, 1), ("B", 2, 0), ("B", 2, 1)],
            ],
        ),
        "deadlock at rank 1, position 1: B(stage 1, microbatch 0) waits for B(stage 2, microbatch 0), which comes at "
        "position 2 of rank 2",
        "on rank 2, put B(stage 2, microbatch 0) before position 1, F(stage 2, microbatch 1)",
    ),
    "backwards in another order than forwards": (
        Table(
            3, 3, 2, (0, 1, 2),
            [
                [(k, 0, i) for k in "FB" for i in range(2)],
                [("F", 1, 0), ("F", 1, 1), ("B", 1, 1), ("B", 1, 0)],
                [("F", 2, 0), ("B", 2, 0), ("F", 2, 1), ("B", 2, 1)],
            ],
        ),
        None,
        None,
    ),
    "twice": (
        edited(GOOD, (1, 7, ("F", 1, 0))),
        "rank 1, position 7: F(stage 1, microbatch 0) repeats what is done at rank 1, position 0, F(stage 1, micro",
        "leave one of them out",
    ),
    "B beside I": (
        dataclasses.replace(SPLIT, actions=[SPLIT.actions[0], [*SPLIT.actions[1], ("B", 1, 3)]]),
        "rank 1, position 12: B(stage 1, microbatch 3) repeats what is done at rank 1, position",
        "leave one of them out",
    ),
    "missing": (
        edited(GOOD, (1, 7, None)),
        "rank 1 never does B(stage 1, microbatch 3)",
        "add it to the list of rank 1",
    ),
    "I without W": (
        edited(SPLIT, (0, 11, None)),
        "rank 0 never does W(stage 0, microbatch 3)",
        "add it to the list of rank 0",
    ),
    "another's stage": (
        dataclasses.replace(GOOD, actions=[[*GOOD.actions[0], ("F", 1, 0)], GOOD.actions[1][1:]]),
        "rank 0, position 8: F(stage 1, microbatch 0) is on a rank that does not hold the stage",
        "move it to rank 1",
    ),
    "no kind": (
        edited(GOOD, (0, 3, ("X", 0, 1))),
        "rank 0, position 3: X(stage 0, microbatch 1) is of no known kind",
        "use one of F, B, I, W",
    ),
    "no stage": (
        edited(GOOD, (0, 0, ("F", 2, 0))),
        "rank 0, position 0: F(stage 2, microbatch 0) does not exist",
        "leave it out, or correct its numbers",
    ),
    "no microbatch": (
        edited(GOOD, (0, 0, ("F", 0, 4))),
        "rank 0, position 0: F(stage 0, microbatch 4) does not exist",
        "leave it out, or correct its numbers",
    ),
    "too much stored": (
        dataclasses.replace(GPipe().table(2, 4), activation_bound=(2, 1)),
        "rank 0, position 2: F(stage 0, microbatch 2) stores more activations than the schedule promises",
        "do a B, or an I and its W, before it, or raise the bound",
    ),
    "uneven placement": (
        dataclasses.replace(GOOD, rank_of_stage=(0, 0)),
        "rank_of_stage does not give each rank equally many stages",
        "name for each stage the rank that holds it",
    ),
    "stages that ranks can't share": (
        dataclasses.replace(GOOD, num_stages=3),
        "sizes that make no pipeline",
        "let num_stages be num_ranks times the stages per rank",
    ),
    "a list too few": (
        dataclasses.replace(GOOD, actions=GOOD.actions[:1]),
        "not one list of actions for each rank",
        "give every rank a list, in the order of ranks",
    ),
    "a bound too few": (
        dataclasses.replace(GOOD, activation_bound=(2,)),
        "activation_bound has not one number for each rank",
        "give the most activations of every rank, in the order of ranks",
    ),
}  # fmt: skip
RUNS = {"backwards in another order than forwards"}


@pytest.mark.parametrize("name", sorted(set(BAD) - RUNS))
def test_the_first_bad_action_is_named(name):
    table, problem, fix = BAD[name]
    with pytest.raises(px.errors.ScheduleError) as caught:
        table.validate()
    assert caught.value.problem.startswith(f"schedule: {problem}")
    assert caught.value.fix == fix


@pytest.mark.parametrize("name", sorted(RUNS))
def test_an_unusual_order_that_runs_is_let_through(name):
    table = BAD[name][0]
    assert table.validate() is table
    assert max(longest_paths(table.actions, table.num_stages).values()) == table.timeline().makespan


def test_several_mistakes_are_told_at_once():
    table = edited(GOOD, (0, 0, ("F", 0, 9)), (1, 0, ("X", 1, 0)), (1, 1, ("F", 0, 0)))
    with pytest.raises(px.errors.ScheduleError) as caught:
        table.validate()
    assert "F(stage 0, microbatch 9) does not exist" in caught.value.problem
    assert "also rank 1, position 0: X(stage 1, microbatch 0) is of no known kind" in caught.value.got
    assert "also rank 1, position 1: F(stage 0, microbatch 0) is on a rank that does not hold" in caught.value.got


@pytest.mark.parametrize("entry", ["F0", None, ("F", 0), 3])
def test_entries_that_are_no_actions(entry):
    with pytest.raises(px.errors.ScheduleError, match="rank 0, position 1: no action"):
        Table(1, 1, 1, (0,), [[("F", 0, 0), entry]])


def test_what_is_said_of_a_circle_names_every_rank_in_it():
    with pytest.raises(px.errors.ScheduleError) as caught:
        BAD["no forward ahead"][0].validate()
    assert caught.value.got == (
        "rank 0, position 1: B(stage 0, microbatch 0) waits for B(stage 1, microbatch 0); "
        "rank 1, position 1: F(stage 1, microbatch 1) waits for F(stage 0, microbatch 1)"
    )


def can_run(lists, num_stages: int) -> bool:
    """Whether there is no circle among what waits for what: Python's recursion says."""
    try:
        longest_paths(lists, num_stages)
    except RecursionError:
        return False
    return True


@pytest.mark.parametrize("table", [OneFOneB().table(2, 2), ZeroBubble().table(2, 1), Interleaved1F1B().table(2, 1)])
def test_deadlocks_are_found_among_all_orders_of_one_rank(table):
    found = set()
    for order in itertools.islice(itertools.permutations(table.actions[0]), 200):
        changed = dataclasses.replace(table, actions=[order, *table.actions[1:]], activation_bound=None)
        runs = can_run(changed.actions, table.num_stages)
        found.add(runs)
        try:
            changed.validate()
        except px.errors.ScheduleError:
            assert not runs, order
        else:
            assert runs, order
    assert found == {True, False}
