"""Saves beside the program: what is saved is the tree of the moment of the call, and no failure goes unseen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import Manager, restore, save_async
from ptrainx.checkpoint.async_save import _saver, finish_saves
from ptrainx.checkpoint.files import FileEvent, watch
from ptrainx.errors import CheckpointError, InputError
from tests.checkpoint.cases import assert_same, every_kind, state
from tests.checkpoint.exits import SCENES

ROOT = Path(__file__).resolve().parents[2]


class Gate:
    """Holds the writer back at its first file until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, event: FileEvent) -> None:
        if event.kind == "create":
            assert self.open.wait(30)


@pytest.fixture
def gate():
    held = Gate()
    with watch(held):
        yield held
        held.open.set()
        if _saver.latest is not None:
            _saver.latest._finished.wait()


def test_every_kind_of_leaf_is_saved_as_it_was_at_the_call(tmp_path, gate):
    tree = every_kind()
    handle = save_async(tmp_path, tree, 1)
    for leaf in px.tree.leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype.itemsize > 1:
            leaf.detach().fill_(-1)
    assert not handle.done()
    gate.open.set()
    assert handle.result().name == "step-000000000001"
    assert handle.done()
    expected = every_kind()
    expected["shapes"][3:] = [expected["tied"]["a"][:, 1], expected["tied"]["a"].t()]
    assert_same(restore(tmp_path, like=every_kind()), expected)


def test_values_may_be_donated_after_the_call(tmp_path, gate):
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    specs = {name: P(*["data"] * (name == "w")) for name in state()}
    values = px.device_put(state(), specs, mesh)
    update = px.jit(
        lambda s: px.tree.map(torch.zeros_like, s), mesh=mesh, in_specs=(specs,), out_specs=specs, donate_argnums=0
    )
    handle = save_async(tmp_path, values, 1)
    for _ in range(3):
        values = update(values)
    gate.open.set()
    handle.result()
    assert_same(restore(tmp_path, like=state()), state())


def test_memory_is_used_again(tmp_path):
    manager = Manager(tmp_path, keep=1)
    seen = set()
    for step in range(3):
        manager.save_async(step, {"w": torch.full((100_000,), float(step))}).result()
        seen.add((_saver.buffer._memory.data_ptr(), _saver.buffer.nbytes))
    assert len(seen) == 1
    assert manager.all_steps() == [2]
    assert restore(tmp_path, {"w": torch.zeros(100_000)})["w"].unique().tolist() == [2.0]


def test_the_next_save_waits_or_is_refused(tmp_path, gate):
    first = save_async(tmp_path, {"n": 1}, 1)
    with pytest.raises(CheckpointError, match="step 2 is not saved: an earlier save is still under way"):
        save_async(tmp_path, {"n": 2}, 2, when_busy="refuse")
    threading.Timer(0.1, gate.open.set).start()
    second = save_async(tmp_path, {"n": 2}, 2)
    assert first.done()
    second.result()
    assert restore(tmp_path, like={"n": 0}) == {"n": 2}
    with pytest.raises(InputError, match="when_busy"):
        save_async(tmp_path, {"n": 2}, 3, when_busy="later")


def test_a_failed_save_is_raised_by_the_next_call_once(tmp_path):
    def fail(event: FileEvent) -> None:
        if event.kind == "write":
            raise OSError(28, "No space left on device")

    manager = Manager(tmp_path)
    manager.save(1, {"n": 1})
    with watch(fail):
        manager.save_async(2, {"n": 2})._finished.wait()
    with pytest.raises(
        CheckpointError, match=r"step 2, which went on beside the program, has failed(.|\n)*No space left"
    ):
        manager.save_async(3, {"n": 3})
    with watch(fail):
        handle = manager.save_async(3, {"n": 3})
        with pytest.raises(CheckpointError, match="can't write"):
            handle.result()
    manager.save_async(4, {"n": 4})
    manager.wait()
    assert manager.all_steps() == [1, 4]
    with pytest.raises(InputError):
        manager.save_async(5, {"n": object()})
    finish_saves()


@pytest.mark.processes
def test_how_a_program_ends_while_a_save_is_under_way(tmp_path):
    """An unseen failure gives status 1; an ending program waits; a kill leaves the step unborn, the next one clean."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.exits", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    statuses = dict(line.split() for line in done.stdout.splitlines())
    assert {name: int(status) for name, status in statuses.items()} == {
        name: scene.status for name, scene in SCENES.items()
    }
    assert "ptrainx: the save of step 2 has failed:" in done.stderr
    assert "No space left on device" in done.stderr
    for name, scene in SCENES.items():
        manager = Manager(tmp_path / name)
        assert manager.all_steps() == scene.steps, name
        manager.save(9, {"w": torch.zeros(1000)})
        assert all(entry.name.startswith("step-") for entry in (tmp_path / name).iterdir())


def test_a_tree_of_the_same_form_is_copied_without_being_looked_at_again(tmp_path):
    def tree(step):
        w = torch.full((3, 4), float(step))
        return {"w": w, "t": w.double().t(), "step": step, "name": f"step {step}", "empty": torch.zeros(0)}

    save_async(tmp_path, tree(0), 0).result()
    recipe = _saver.recipe
    assert recipe is not None
    for step in (1, 2):
        save_async(tmp_path, tree(step), step).result()
        assert _saver.recipe is recipe
        assert_same(restore(tmp_path, like=tree(0)), tree(step))
    others = [
        {**tree(3), "w": torch.zeros(3, 5)}, {**tree(4), "w": torch.zeros(3, 4).bfloat16()}, {**tree(5), "step": 1.0},
        {**tree(6), "more": 1}, {**tree(7), "empty": None}, {**tree(8), "w": torch.ones(3, 4) * 1j},
    ]  # fmt: skip
    for step, other in enumerate(others, 3):
        save_async(tmp_path, other, step).result()
        assert_same(restore(tmp_path, like=other), other)
    tied = tree(0)["w"]
    save_async(tmp_path, {"a": tied, "b": tied.clone()}, 20).result()
    save_async(tmp_path, {"a": tied, "b": tied}, 21).result()
    found = restore(tmp_path, like={"a": tied, "b": tied})
    assert found["a"] is found["b"]


def both_async(folder: str) -> list[float]:
    """Parts of this rank after four saves: split, and of replicated values that two ranks share, contiguous or not."""
    mesh = px.make_mesh(data=2)
    manager = Manager(folder, keep=2)
    big = torch.arange(600_000.0).reshape(1000, 600)
    w = px.device_put(torch.arange(8.0), P("data"), mesh)
    for turned in (False, True):
        for step in range(4):
            plain = (big + step).t() if turned else big + step
            values = {"w": w + step, "big": px.device_put(big + step, P(), mesh), "plain": plain}
            manager.save_async(step + 10 * turned, {**values, "step": step})
        manager.wait()
        like = {"w": w, "big": values["big"], "plain": plain, "step": 0}
        found = manager.restore(like=like)
        assert found["step"] == 3
        assert found["big"].to_local().equal(big + 3)
        assert found["plain"].equal(plain)
    return found["w"].to_local().tolist()


@pytest.mark.processes
def test_two_processes_save_beside_their_steps(pool, tmp_path):
    assert pool.run(both_async, 2, str(tmp_path)) == [[3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0]]
    assert Manager(tmp_path).all_steps() == [12, 13]
