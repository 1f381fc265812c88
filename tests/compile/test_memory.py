"""Who owns memory: nothing aliases, donated values give theirs up and refuse every later use, nothing is kept."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.core import torch_compat as tc
from ptrainx.errors import DonationError
from ptrainx.mesh.simulated import local_tensors
from tests.compile.programs import assert_close, values

X = values(4, 4)
MESHES = ({"data": 2, "simulate": True}, {"data": 1})


def storages(tree: Any) -> list[int]:
    """The identity of every storage under a tree."""
    found = []
    for leaf in px.tree.leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            continue
        local = getattr(leaf, "_local_tensor", leaf)
        parts = local_tensors(leaf).values() if isinstance(local, tc.LocalTensor) else [local]
        found += [tc.storage_id(part) for part in parts]
    return found


ALIASING = {
    "identity": lambda x: x,
    "twice": lambda x: (x, x),
    "views": lambda x: (x, x.view(-1), x.t(), x[1:], x.detach()),
    "of a temporary": lambda x: (lambda h: (h, h.t(), h[0]))(x * 2),
    "constant": lambda x: (CONSTANT, CONSTANT),
    "in place": lambda x: (lambda h: (h, h.add_(1)))(x.clone()),
    "0-d": lambda x: (x.sum(), x[0, 0], x.sum()),
}
CONSTANT = values(4)


@pytest.mark.parametrize("fn", ALIASING.values(), ids=ALIASING)
@pytest.mark.parametrize("backend", ["graph", "eager"])
@pytest.mark.parametrize("axes", MESHES, ids=["simulated", "one device"])
@pytest.mark.parametrize("placed", [False, True], ids=["plain", "placed"])
def test_nothing_aliases(fn: Any, backend: str, axes: dict, placed: bool) -> None:
    on = px.make_mesh(**axes)
    given = px.device_put(X, P("data"), on) if placed else X.clone()
    out = px.jit(fn, mesh=on, in_specs=P("data"), backend=backend)(given)
    seen = storages((given, out, CONSTANT))
    assert len(seen) == len(set(seen))
    assert_close(out, fn(X.clone()))


@pytest.mark.parametrize("axes", MESHES, ids=["simulated", "one device"])
def test_a_result_keeps_no_more_than_itself(axes: dict) -> None:
    """A row, and a sum that travelled with gradients: whoever keeps a loss does not keep a bucket."""

    def step(params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        loss, grads = px.value_and_grad(lambda p, y: (y @ p["a"] @ p["b"]).square().mean())(params, x)
        return loss, grads["a"], (2 * x)[1]

    on = px.make_mesh(**axes)
    out = px.jit(step, mesh=on, in_specs=(P(), P("data")))({"a": values(4, 4, seed=1), "b": values(4, 4, seed=2)}, X)
    for leaf in out:
        local = getattr(leaf, "_local_tensor", leaf)
        for part in local_tensors(leaf).values() if isinstance(local, tc.LocalTensor) else [local]:
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_a_result_can_be_written_into() -> None:
    on = px.make_mesh(data=1)
    given = px.device_put(X, P("data"), on)
    a, b = px.jit(lambda x: (x, x), mesh=on)(given)
    a.add_(1)
    assert_close((given, a, b), (X, X + 1, X))


def update(state: Any, x: torch.Tensor) -> Any:
    return px.tree.map(lambda w: w * 2 + x, state), x.sum()


@pytest.mark.parametrize("backend", ["graph", "eager"])
@pytest.mark.parametrize("axes", MESHES, ids=["simulated", "one device"])
def test_donation_changes_no_value(backend: str, axes: dict) -> None:
    on = px.make_mesh(**axes)
    step = px.jit(
        update, mesh=on, in_specs=(P("data"), P("data")), out_specs=(P("data"), P()), donate_argnums=0, backend=backend
    )
    state, want = {"a": X.clone(), "b": px.device_put(X * 3, P("data"), on)}, {"a": X, "b": X * 3}
    for _ in range(3):
        given = state
        state, _ = step(state, X)
        want, _ = update(want, X)
        assert_close(state, want)
        assert all("donated" in repr(leaf) for leaf in given.values())


SWAPS = {
    "swap": lambda s: {"a": s["b"], "b": s["a"]},
    "swap and write": lambda s: {"a": s["b"] * 2, "b": s["a"] + 1},
    "one twice": lambda s: {"a": s["a"], "b": s["a"]},
    "read after": lambda s: {"a": s["a"] * 2, "b": s["b"] + s["a"]},
    "view": lambda s: {"a": s["a"].t() * 1.0, "b": s["b"].view(-1)[:4] * 2},
}


@pytest.mark.parametrize("fn", SWAPS.values(), ids=SWAPS)
@pytest.mark.parametrize("axes", MESHES, ids=["simulated", "one device"])
def test_reuse_never_changes_a_result(fn: Any, axes: dict) -> None:
    on = px.make_mesh(**axes)
    for spec in (P(), P("data")):
        for placed in (False, True):
            given = {"a": X.clone(), "b": X + 10}
            want = fn({"a": X, "b": X + 10})
            state = px.device_put(given, spec, on) if placed else given
            assert_close(px.jit(fn, mesh=on, in_specs=spec, donate_argnums=0)(state), want)


def donate(leaf: Any, on: px.Mesh) -> Any:
    px.jit(lambda state: state["w"] + 1, mesh=on, donate_argnums=0)({"w": leaf})
    return leaf


USES = {
    "add": lambda v: v + 1,
    "radd": lambda v: 1 - v,
    "matmul": lambda v: X @ v,
    "index": lambda v: v[0],
    "assign": lambda v: v.__setitem__(0, 1),
    "in place": lambda v: v.add_(1),
    "to_local": lambda v: v.to_local(),
    "full_tensor": lambda v: v.full_tensor(),
    "numpy": lambda v: v.numpy(),
    "asarray": lambda v: np.asarray(v),
    "tolist": lambda v: v.tolist(),
    "float": lambda v: float(v),
    "bool": lambda v: bool(v),
    "clone": lambda v: v.clone(),
    "detach": lambda v: v.detach(),
    "cat": lambda v: torch.cat([X, v]),
    "iterate": lambda v: list(v),
    "pickle": lambda v: pickle.dumps(v),
    "deepcopy": lambda v: copy.deepcopy(v),
    "save": lambda v: torch.save(v, "/dev/null"),
    "jit": lambda v: px.jit(lambda x: x)(v),
    "jit in a tree": lambda v: px.jit(lambda x: x, mesh=px.make_mesh(data=1))([v]),
    "device_get": lambda v: px.device_get(v),
    "device_put": lambda v: px.device_put(v, P(), px.make_mesh(data=1)),
    "reshard": lambda v: px.reshard(v, P()),
    "grad": lambda v: px.grad(lambda x: x.sum())(v),
    "autograd": lambda v: torch.autograd.grad(v.sum(), v),
    "requires_grad_": lambda v: v.requires_grad_(),
    "data_ptr": lambda v: v.data_ptr(),
    "functional": lambda v: torch.nn.functional.relu(v),
}


@pytest.mark.parametrize("kind", ["simulated", "one device", "plain"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_a_donated_value_is_refused(use: Any, kind: str) -> None:
    on = px.make_mesh(data=2, simulate=True) if kind == "simulated" else px.make_mesh(data=1)
    leaf = donate(X.clone() if kind == "plain" else px.device_put(X, P("data"), on), on)
    if kind == "plain" and use in (USES["to_local"], USES["full_tensor"]):
        return
    with pytest.raises(DonationError, match=r"argument state\['w'\] of <lambda> was donated"):
        use(leaf)


def test_a_donated_value_still_tells_what_it_was() -> None:
    on = px.make_mesh(data=2, simulate=True)
    for leaf in (donate(X.clone(), on), donate(px.device_put(X, P("data"), on), on)):
        assert (tuple(leaf.shape), leaf.dtype, leaf.ndim) == ((4, 4), torch.float32, 2)
        assert str(leaf) == f"{leaf}" == "<donated value argument state['w'] of <lambda>>"
        assert "donated" in repr([leaf])


def test_what_cannot_be_donated() -> None:
    on = px.make_mesh(data=1)
    both = px.jit(lambda a, b: (a["x"] + 1, b), mesh=on, donate_argnums=(0, 1))
    with pytest.raises(DonationError, match=r"arguments a\['x'\] and b share one buffer, both donated"):
        both({"x": X}, X)
    one = px.jit(lambda a, b: (a + 1, b), mesh=on, donate_argnums=0)
    for pair in ((X, X), (X, X[1:]), (X.view(-1), X)):
        with pytest.raises(DonationError, match="arguments a and b share one buffer, one of them donated"):
            one(*pair)
    placed = px.device_put(X, P("data"), px.make_mesh(data=2, simulate=True))
    with pytest.raises(DonationError, match="share one buffer"):
        px.jit(lambda a, b: a + b, donate_argnums=0)(placed, placed)
    assert_close(placed, X)


def test_donation_by_keyword() -> None:
    value = X.clone()
    px.jit(lambda w: w + 1, mesh=px.make_mesh(data=1), donate_argnums=0)(w=value)
    with pytest.raises(DonationError):
        _ = value + 1


@pytest.mark.parametrize("axes", MESHES, ids=["simulated", "one device"])
def test_who_else_sees_donated_memory_keeps_the_value(axes: dict) -> None:
    on, array = px.make_mesh(**axes), X.numpy().copy()
    step = px.jit(lambda w: w * 0 + 7, mesh=on, donate_argnums=0)
    whole, shared = X.clone(), torch.from_numpy(array)
    view = whole[:2]
    for value in (whole, shared, array):
        assert_close(step(value), torch.full((4, 4), 7.0))
    assert view.equal(X[:2])
    assert (array == X.numpy()).all()


def test_donated_memory_is_free_while_the_step_runs() -> None:
    on = px.make_mesh(data=1)
    for given in (px.device_put(torch.ones(1000), P(), on), torch.ones(1000)):
        seen = weakref.ref(given.untyped_storage() if not hasattr(given, "_local_tensor") else given._local_tensor)
        before = storages(given)
        out = px.jit(lambda w: w + 1, mesh=on, donate_argnums=0)(given)
        assert storages(out) == before  # the result is where the argument was
        assert seen() is None or seen() is not given
        del out


def test_a_misplaced_successor_is_told_by_path() -> None:
    on = px.make_mesh(data=2, simulate=True)
    state = px.device_put({"w": X, "n": X * 2}, P("data"), on)
    step = px.jit(lambda s: ({"w": s["w"], "n": px.reshard(s["n"], P())}, 1), mesh=on, donate_argnums=0)
    with pytest.warns(
        UserWarning, match=r"s\['n'\] is donated at P\('data', None\), result\[0\]\['n'\] comes out at P"
    ):
        step(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        px.jit(lambda s: s, mesh=on, donate_argnums=0)(px.device_put({"w": X}, P("data"), on))


@pytest.mark.parametrize("axes", MESHES, ids=["simulated", "one device"])
def test_calls_keep_nothing(axes: dict) -> None:
    on = px.make_mesh(**axes)
    step = px.jit(lambda s, x: (px.tree.map(lambda w: w + x.sum(), s), x.mean()), mesh=on, donate_argnums=0)
    state: Any = {"a": torch.ones(2), "b": px.device_put(X, P("data"), on)}

    def run(times: int) -> int:
        nonlocal state
        for _ in range(times):
            state, _ = step(state, X)
        gc.collect()
        return len(gc.get_objects())

    run(20)
    before = run(20)
    assert abs(run(300) - before) < 50
