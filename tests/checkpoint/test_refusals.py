"""What is refused, and what is told: leaves that can't be saved, trees that don't fit, steps that are there."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import Manager, restore, save
from ptrainx.checkpoint.files import FileEvent, watch
from ptrainx.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DonationError,
    InputError,
    SpecError,
    TreeError,
)


def lines(error) -> list[str]:
    return [line.strip() for line in error.value.problem.splitlines()[1:]]


def test_leaves_that_cannot_be_saved_are_all_told(tmp_path):
    mesh = px.make_mesh(data=2, simulate=True)
    owed = px.device_put(torch.ones(2), P(unreduced=("data",)), mesh)
    tree = {"a": owed, "b": object(), "c": torch.ones(2, device="meta"), "d": torch.ones(2), "e": np.array(["x"])}
    tree["f"] = torch.eye(2).to_sparse()
    with pytest.raises(InputError) as error:
        save(tmp_path, tree, 1)
    told = lines(error)
    assert [line.partition(":")[0] for line in told] == ["['a']", "['b']", "['c']", "['e']", "['f']"]
    assert "owed" in told[0]
    assert not list(tmp_path.iterdir())


def test_keys_that_cannot_be_saved_are_told(tmp_path):
    with pytest.raises(TreeError, match=r"b'k', a bytes"):
        save(tmp_path, {b"k": 1}, 1)


def test_a_donated_value_is_not_saved(tmp_path):
    mesh = px.make_mesh(data=2, simulate=True)
    w = px.device_put(torch.ones(2), P("data"), mesh)
    px.jit(lambda w: w + 1, mesh=mesh, donate_argnums=0)(w)
    with pytest.raises(DonationError):
        save(tmp_path, {"w": w}, 1)


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None])
def test_a_step_is_an_integer(tmp_path, step):
    with pytest.raises(InputError, match="a step is an integer"):
        save(tmp_path, {}, step)


def test_a_step_is_never_overwritten(tmp_path):
    save(tmp_path, {"n": 1}, 5)
    with pytest.raises(CheckpointError, match="step 5 exists already"):
        save(tmp_path, {"n": 2}, 5)
    assert restore(tmp_path, like={"n": 0}) == {"n": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000000005"]


def test_the_first_of_two_writers_wins(tmp_path):
    """Another writer commits the step just before this one's rename."""
    seen = []

    def other(event: FileEvent) -> None:
        if event.kind == "rename" and not seen:
            seen.append(event)
            save(tmp_path, {"n": 2}, 5)

    with watch(other), pytest.raises(CheckpointError, match="step 5 exists already"):
        save(tmp_path, {"n": 1}, 5)
    assert restore(tmp_path, like={"n": 0}) == {"n": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000000005"]


def test_everything_that_does_not_fit_is_told_at_once(tmp_path):
    save(tmp_path, {"w": torch.ones(2, 3), "bias": torch.ones(3), "n": 1, "k": np.ones(2), "old": 2.0, "m": 1}, 1)
    like = {"w": torch.ones(3, 2), "bais": torch.ones(3), "n": 1.0, "k": torch.ones(2), "m": 2}
    with pytest.raises(CheckpointMismatchError) as error:
        restore(tmp_path, like=like)
    assert lines(error) == [
        "['bais']: not in the checkpoint; it has ['bias']",
        "['bias']: in the checkpoint, not in like",
        "['old']: in the checkpoint, not in like",
        "['k']: numpy f64[2] in the checkpoint, like has f32[2]",
        "['n']: int in the checkpoint, like has float",
        "['w']: f32[2,3] in the checkpoint, like has f32[3,2]",
    ]


def test_kinds_of_containers_are_told_apart(tmp_path):
    save(tmp_path, {"layers": [torch.ones(1)]}, 1)
    with pytest.raises(CheckpointMismatchError, match=re.escape("['layers'][0]: not in the checkpoint")):
        restore(tmp_path, like={"layers": {0: torch.ones(1)}})


def test_a_dtype_is_never_converted(tmp_path):
    save(tmp_path, {"w": torch.ones(2)}, 1)
    with pytest.raises(CheckpointMismatchError, match=re.escape("f32[2] in the checkpoint, like has bf16[2]")):
        restore(tmp_path, like={"w": torch.ones(2, dtype=torch.bfloat16)})


def test_partial_takes_what_is_there_and_keeps_the_rest(tmp_path):
    mesh = px.make_mesh(data=2, simulate=True)
    save(tmp_path, {"body": torch.ones(2), "old_head": torch.ones(5)}, 1)
    like = {"body": torch.zeros(2), "head": torch.full((4,), 7.0)}
    found = restore(tmp_path, like=like, partial=True)
    assert found["body"].tolist() == [1, 1]
    assert found["head"] is like["head"]
    placed = restore(tmp_path, like=like, specs=P("data"), mesh=mesh, partial=True)
    assert [px.spec_of(placed[name]) for name in like] == [P("data"), P("data")]
    assert px.device_get(placed["head"]).tolist() == [7.0] * 4
    with pytest.raises(CheckpointMismatchError, match="head'\\]: not in the checkpoint"):
        restore(tmp_path, like={"head": px.ShapeDtypeStruct((4,), torch.float32)}, partial=True)
    with pytest.raises(CheckpointMismatchError, match="like has f32"):
        restore(tmp_path, like={"body": torch.zeros(3)}, partial=True)


def test_specs_that_do_not_fit_are_refused_before_anything_is_read(tmp_path):
    save(tmp_path, {"w": torch.ones(3)}, 1)
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    with pytest.raises(SpecError, match="not divisible"):
        restore(tmp_path, like={"w": torch.ones(3)}, specs=P(("data", "model")), mesh=mesh)


def test_a_missing_checkpoint_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        restore(tmp_path / "nowhere", like={})
    save(tmp_path, {}, 1)
    save(tmp_path, {}, 2)
    with pytest.raises(CheckpointError, match=r"no step 3 in(.|\n)*one of 1, 2"):
        restore(tmp_path, like={}, step=3)
    assert restore(tmp_path / "step-000000000001", like={}) == {}


@pytest.mark.parametrize("setting", [{"keep": 0}, {"every": -1}, {"best": 1.5}, {"mode": "less"}])
def test_settings_of_a_manager_are_checked(tmp_path, setting):
    with pytest.raises(InputError):
        Manager(tmp_path, **setting)


def test_a_step_with_other_files_in_it_is_not_removed(tmp_path):
    manager = Manager(tmp_path, keep=1)
    manager.save(1, {"n": 1})
    (tmp_path / "step-000000000001" / "notes.txt").write_text("mine")
    with pytest.warns(RuntimeWarning, match=r"step 1 is not removed: .* holds notes.txt"):
        manager.save(2, {"n": 2})
    assert manager.all_steps() == [1, 2]


def test_what_a_dead_writer_left_is_removed_by_the_next_and_a_living_one_is_left_alone(tmp_path):
    dead = tmp_path / ".new-step-000000000001-0123abcd"
    dead.mkdir()
    (dead / "rank-00000.safetensors").write_bytes(b"half")
    seen = []

    def look(event: FileEvent) -> None:
        if event.kind == "rename" and not seen:
            seen.append(event)
            save(tmp_path, {"n": 2}, 2)  # sweeps while the first writer is at work

    with watch(look):
        save(tmp_path, {"n": 1}, 1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000000000001", "step-000000000002"]


@pytest.mark.parametrize("kind", ["make_folder", "create", "write", "sync", "sync_folder", "rename"])
def test_a_disk_that_fails_is_told_and_nothing_is_left(tmp_path, kind):
    save(tmp_path, {"w": torch.ones(2)}, 1)

    def fail(event: FileEvent) -> None:
        if event.kind == kind:
            raise OSError(28, "No space left on device")

    with watch(fail), pytest.raises(CheckpointError, match=r"can't write(.|\n)*No space left on device"):
        save(tmp_path, {"w": torch.zeros(2)}, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000000001"]
    assert restore(tmp_path, like={"w": torch.zeros(2)})["w"].tolist() == [1, 1]
