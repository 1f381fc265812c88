"""What calls leave behind: nothing, over thousands of them, told by counts; and that what is placed alike is one."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections import Counter
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from tests.compile.programs import values

ONE, SIMULATED = {"data": 1}, {"data": 1, "simulate": True}


def objects() -> Counter:
    """Live objects that the collector knows, by type; tensors and their storages among them."""
    gc.collect()
    return Counter(type(o).__qualname__ for o in gc.get_objects())


@pytest.mark.parametrize(
    ("axes", "donate", "calls"),
    [(ONE, True, 10_000), (ONE, False, 2_000), (SIMULATED, True, 1_000)],
    ids=["one device, donated", "one device, kept", "simulated"],
)
def test_thousands_of_calls_leave_nothing(axes: dict[str, Any], donate: bool, calls: int) -> None:
    mesh = px.make_mesh(**axes)
    step = px.jit(
        lambda s, x, n: ({"w": s["w"] + x, "n": s["n"] + n}, s["w"].sum()),
        mesh=mesh,
        donate_argnums=0 if donate else (),
    )
    state: Any = {"w": px.device_put(values(4), P(), mesh), "n": 0}
    x = values(4, seed=1)

    def run(times: int) -> None:
        nonlocal state
        for _ in range(times):
            state, _ = step(state, x, 1)

    run(500)
    before = objects()
    run(calls)
    after = objects()
    # Python and torch keep a few weak references that they reuse; one of every hundredth call would be more.
    assert {kind: n for kind, n in (after - before).items() if n > calls // 100} == {}
    assert after["DTensor"] == before["DTensor"]

    tracemalloc.start()
    held = []
    for _ in range(4):
        run(300)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # A tensor takes some hundred bytes: not one of every call is left. Free lists of Python's still fill.
    assert min(later - earlier for earlier, later in itertools.pairwise(held)) < 64 * 300
    assert int(state["n"]) == calls + 1700


def test_values_placed_alike_have_one_spec() -> None:
    """So that a call compares arguments by identity: what was placed, and what came out of a step."""
    mesh = px.make_mesh(data=1)
    a, b = (px.device_put(values(4, seed=i), P(), mesh) for i in range(2))
    c, d = px.jit(lambda a, b: (a + b, a[None]), mesh=mesh)(a, b)
    assert a._spec is b._spec is c._spec
    assert d._spec is not a._spec
    assert px.device_put(values(4).double(), P(), mesh)._spec is not a._spec


def test_a_fake_argument_is_traced_through() -> None:
    step = px.jit(lambda x: x * 2, mesh=px.make_mesh(data=1))
    assert px.eval_shape(step, torch.ones(2, 3)) == px.ShapeDtypeStruct((2, 3), torch.float32)


def test_programs_are_found_again_in_any_order_until_they_are_forgotten() -> None:
    traced = []

    def fn(x: Any) -> Any:
        traced.append(tuple(x.shape))
        return x + 1

    step = px.jit(fn, mesh=px.make_mesh(data=1))
    for n in (2, 3, 2, 2, 3):
        assert torch.equal(px.device_get(step(torch.ones(n))), torch.full((n,), 2.0))
    assert traced == [(2,), (3,)]
    step.clear_cache()
    step(torch.ones(3))
    step(torch.ones(3))
    assert traced == [(2,), (3,), (3,)]


def test_each_of_many_donated_leaves_refuses_under_its_own_name() -> None:
    mesh = px.make_mesh(data=1)
    state = {"a": px.device_put(values(4), P(), mesh), "b": px.device_put(values(4), P(), mesh), "n": torch.tensor(0)}
    state |= {"m": torch.tensor(1)}
    step = px.jit(lambda s: px.tree.map(lambda x: x + 1, s), mesh=mesh, donate_argnums=0)
    after = step(state)
    for name in state:
        assert f"s['{name}']" in repr(state[name])
        with pytest.raises(px.errors.DonationError, match=rf"s\['{name}'\]"):
            state[name] + 1
    assert (int(after["n"]), int(after["m"])) == (1, 2)
