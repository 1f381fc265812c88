"""Passes that remove, merge and move collectives: what is sent before and after, and the function's own result."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.graph import is_collective, is_wait, schema_name
from ptrainx.compile.passes.common import share_common
from ptrainx.compile.passes.flatten_axes import flatten_axes
from ptrainx.compile.passes.shared_gathers import share_gathers
from tests.compile.programs import assert_close, values

X, W = values(8, 8), values(8, 8, seed=1)
SIZE = 8 * 8 * 4  # bytes of either


class Row(NamedTuple):
    """A program, and what a rank sends: (kind, axis, bytes, count) of the graph as it runs."""

    fn: Any
    axes: dict[str, int]
    in_specs: Any
    out_specs: Any
    sent: list[tuple[str, str, int, int]]
    args: tuple = (X, W)


def owed(x, w):
    return px.reshard(x.t() @ w, P())


def part_of_sum(x, w):
    return px.reshard(owed(x, w), P("data"))


def columns_of_sum(x, w):
    return px.reshard(owed(x, w), P(None, "data"))


def sum_and_part(x, w):
    z = owed(x, w)
    return z, px.reshard(z, P("data"))


def first_rows_of_sum(x, w):
    return owed(x, w)[:4] * 1


def other_part_of_sum(x, w):
    return px.reshard(owed(x, w), P("model"))


def scattered_then_gathered(x, w):
    return px.reshard(px.reshard(x.t() @ w, P("data")), P())


def scattered_read_and_gathered(x, w):
    part = px.reshard(x.t() @ w, P("data"))
    return part.exp(), px.reshard(part, P())


def cut_then_gathered(x, w):
    return px.reshard(px.reshard(x * w, P("data")), P()), px.reshard(px.reshard(x + w, P(None, "data")), P())


def gathered_then_cut(x, w):
    return px.reshard(px.reshard(x, P()), P("data")) * 2, px.reshard(px.reshard(w, P()), P(None, "data")) * 2


def gathered_first_rows(x, w):
    return px.reshard(x, P())[:4] * 1


def gathered_in_three_ways(x, w):
    return px.reshard(x, P()), px.reshard(x.reshape(8, 2, 4), P()) * 2, px.reshard(x.double(), P()) + 1


def both_axes(x, w):
    return owed(x, w), px.reshard(w, P()).exp()


def both_axes_largest(x, w):
    return px.reshard(x.amax(0), P())


def sums_of_sums(x, w):
    a, b, c = (px.reshard((x * k).t() @ w, P()) for k in (1.0, 2.0, 3.0))
    return (a * 0.5 - (-b)) + torch.eye(8) + c / 4


def one_sum_read_twice(x, w):
    a, b = px.reshard(x.sum(0), P()), px.reshard(w.sum(0), P())
    return a + b, a


D2, D4, D22 = {"data": 2}, {"data": 4}, {"data": 2, "model": 2}
ROWS, BOTH = (P("data"), P("data")), (P(("data", "model")), P(("data", "model")))
TABLE = {
    # A reduce-scatter sends (n-1)/n of its operand, an all-reduce twice that.
    "own part of a sum": Row(part_of_sum, D2, ROWS, None, [("reduce_scatter", "data", SIZE // 2, 1)]),
    "own part of four": Row(part_of_sum, D4, ROWS, None, [("reduce_scatter", "data", SIZE * 3 // 4, 1)]),
    "own columns": Row(columns_of_sum, D2, ROWS, None, [("reduce_scatter", "data", SIZE // 2, 1)]),
    "own columns of four": Row(columns_of_sum, D4, ROWS, None, [("reduce_scatter", "data", SIZE * 3 // 4, 1)]),
    "part on a grid": Row(part_of_sum, D22, ROWS, None, [("reduce_scatter", "data", SIZE // 2, 1)]),
    "another axis's part": Row(other_part_of_sum, D22, ROWS, None, [("all_reduce", "data", SIZE, 1)]),
    "the sum is read whole too": Row(sum_and_part, D2, ROWS, None, [("all_reduce", "data", SIZE, 1)]),
    "a slice that looks like a part": Row(first_rows_of_sum, D2, ROWS, None, [("all_reduce", "data", SIZE, 1)]),
    "scattered, then gathered": Row(scattered_then_gathered, D2, ROWS, None, [("all_reduce", "data", SIZE, 1)]),
    "scattered, read, gathered": Row(
        scattered_read_and_gathered,
        D2,
        ROWS,
        None,
        [("reduce_scatter", "data", SIZE // 2, 1), ("all_gather", "data", SIZE // 2, 1)],
    ),
    "cut, then gathered": Row(cut_then_gathered, D4, (P(), P()), None, []),
    "cut on a grid": Row(cut_then_gathered, D22, (P(), P()), None, []),
    "gathered, then cut": Row(gathered_then_cut, D4, (P("data"), P(None, "data")), None, []),
    "a slice of what is gathered": Row(gathered_first_rows, D2, ROWS, None, [("all_gather", "data", SIZE // 2, 1)]),
    "gathered in three ways": Row(gathered_in_three_ways, D2, ROWS, None, [("all_gather", "data", SIZE // 2, 1)]),
    # 2 (n-1)/n of the operand over n = 4 at once; a gather sends a quarter to three others.
    "sums over two axes": Row(
        both_axes,
        D22,
        BOTH,
        None,
        [("all_gather", "data*model", SIZE * 3 // 4, 1), ("all_reduce", "data*model", SIZE * 3 // 2, 1)],
    ),
    "maxima over two axes": Row(both_axes_largest, D22, BOTH, None, [("all_reduce", "data*model", 48, 1)]),
    "a sum of sums": Row(sums_of_sums, D2, ROWS, None, [("all_reduce", "data", SIZE, 1)]),
    "a sum of sums over two axes": Row(sums_of_sums, D22, BOTH, None, [("all_reduce", "data*model", SIZE * 3 // 2, 1)]),
    "a sum that is read twice": Row(one_sum_read_twice, D2, ROWS, None, [("all_reduce", "data", 64, 1)]),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_what_is_sent(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    step = px.jit(row.fn, mesh=px.make_mesh(row.axes, simulate=True), in_specs=row.in_specs, out_specs=row.out_specs)
    report = step.comms(*row.args)
    assert sorted((c.kind, c.axis, c.bytes, c.count) for c in report) == sorted(row.sent)
    got = step(*row.args)
    monkeypatch.setattr(px, "reshard", lambda value, specs: value)  # on plain tensors, on one device
    assert_close(got, row.fn(*row.args))


def test_before_there_is_more() -> None:
    """The same programs as they are traced: every row above has something to remove, but for those about refusals."""
    kept = {"another axis's part", "the sum is read whole too", "scattered, read, gathered"}
    kept |= {"a slice that looks like a part", "a slice of what is gathered"}
    for name, row in TABLE.items():
        step = px.jit(row.fn, mesh=px.make_mesh(row.axes, simulate=True), in_specs=row.in_specs)
        traced = step.trace(*row.args).graphs[0]
        kinds = [schema_name(n) for n in traced.module.graph.nodes if is_collective(n)]
        after = sum(count for *_, count in row.sent)
        same = name in kept or name.startswith(("own", "part"))  # these change in kind, not in number
        assert len(kinds) == after if same else len(kinds) > after, name


@pytest.mark.parametrize(("flat", "count"), [(True, 2), (False, 4)])
def test_axes_with_backends_of_their_own_stay_apart(flat: bool, count: int) -> None:
    row = TABLE["sums over two axes"]
    step = px.jit(row.fn, mesh=px.make_mesh(row.axes, simulate=True), in_specs=row.in_specs)
    graph = step.trace(*row.args).graphs[0]
    graph.flat = flat
    after = flatten_axes(graph)
    assert sum(is_collective(n) for n in after.module.graph.nodes) == count


# --- marks of a remat ------------------------------------------------------------------------------------------------


def two_gathers() -> Any:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return px.reshard(x, P()).exp(), px.reshard(x, P()).cos()

    return px.jit(fn, mesh=px.make_mesh(D2, simulate=True), in_specs=P("data")).trace(X).graphs[0]


@pytest.mark.parametrize("one", [share_common, share_gathers])
@pytest.mark.parametrize("marked", [False, True])
def test_what_is_recomputed_on_purpose_is_not_shared(one: Any, marked: bool) -> None:
    graph = two_gathers()
    gathers = [n for n in graph.module.graph.nodes if is_collective(n)]
    assert len(gathers) == 2
    if marked:
        for node in [gathers[1], *gathers[1].users]:
            node.meta["recomputed"] = 1
    one(graph)
    assert sum(is_collective(n) for n in graph.module.graph.nodes) == 1 + marked
    assert sum(is_wait(n) for n in graph.module.graph.nodes) == 1 + marked
