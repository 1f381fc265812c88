"""Sums over ranks that a loop adds up are paid once, after it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import ptrainx as px
from ptrainx import P
from tests.compile.programs import assert_close, values

STEPS, D = 3, 4
XS = values(STEPS, 2, 8, D)
ROW = D * 4  # bytes of what is added up
PAID = 2 * ROW // 2  # what an all-reduce of it over two ranks sends


def _total(xs: torch.Tensor, term: Any, init: torch.Tensor | None = None) -> torch.Tensor:
    start = torch.ones(D) if init is None else init
    return px.scan(lambda c, x: (term(c, x), None), start, xs)[0]


def added(xs: torch.Tensor) -> torch.Tensor:
    return _total(xs, lambda c, x: c + px.reshard(x.sum((0, 1)), P()))


def scaled(xs: torch.Tensor) -> torch.Tensor:
    return _total(xs, lambda c, x: c - px.reshard(x.sum((0, 1)), P()) * 0.5 / 4)


def two_carries(xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def body(c: Any, x: torch.Tensor) -> Any:
        return (c[0] + px.reshard(x.sum((0, 1)), P()), c[1] + px.reshard(x.exp().sum((0, 1)), P())), None

    return px.scan(body, (torch.zeros(D), torch.ones(D)), xs)[0]


def two_terms(xs: torch.Tensor) -> torch.Tensor:
    return _total(xs, lambda c, x: c + (px.reshard(x.sum((0, 1)), P()) + px.reshard(x.exp().sum((0, 1)), P())))


def nested(xs: torch.Tensor) -> torch.Tensor:
    def outer(c: torch.Tensor, x: torch.Tensor) -> Any:
        return c + _total(x, lambda c, y: c + px.reshard(y.sum(0), P()), torch.zeros(D)), None

    return px.scan(outer, torch.ones(D), xs)[0]


def carry_read_otherwise(xs: torch.Tensor) -> torch.Tensor:
    return _total(xs, lambda c, x: c + px.reshard((x * c).sum((0, 1)), P()))


def not_linear(xs: torch.Tensor) -> torch.Tensor:
    return _total(xs, lambda c, x: c + px.reshard(x.sum((0, 1)), P()).exp())


def read_each_step(xs: torch.Tensor) -> Any:
    def body(c: torch.Tensor, x: torch.Tensor) -> Any:
        y = px.reshard(x.sum((0, 1)), P())
        return c + y, y

    return px.scan(body, torch.ones(D), xs)


class Row(NamedTuple):
    """A program over two ranks, its rows sharded; how many all-reduces it runs, of how many bytes together."""

    fn: Any
    count: int
    bytes: int


TABLE = {
    "added": Row(added, 1, PAID),
    "scaled": Row(scaled, 1, PAID),
    "two carries": Row(two_carries, 1, 2 * PAID),  # in one bucket
    "two terms": Row(two_terms, 1, PAID),
    "nested": Row(nested, 1, PAID),
    "carry read otherwise": Row(carry_read_otherwise, STEPS, STEPS * PAID),
    "not linear": Row(not_linear, STEPS, STEPS * PAID),
    "read each step": Row(read_each_step, STEPS, STEPS * PAID),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_what_a_loop_sends(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTRAINX_CHECK_PASSES", "1")
    step = px.jit(row.fn, mesh=px.make_mesh(data=2, simulate=True), in_specs=P(None, None, "data"))
    report = step.comms(XS)
    assert {c.kind for c in report} <= {"all_reduce"}
    assert (sum(c.count for c in report), report.total_bytes) == (row.count, row.bytes)
    got = step(XS)
    monkeypatch.setattr(px, "reshard", lambda value, specs: value)
    assert_close(got, row.fn(XS))
