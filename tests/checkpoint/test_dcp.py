"""Distributed checkpoints of PyTorch: what `torch.distributed.checkpoint` writes is read, what is written it reads."""

from __future__ import annotations

import os
import pickle
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import dcp_shapes, export_dcp, import_dcp
from ptrainx.checkpoint.files import watch
from ptrainx.errors import CheckpointDamageError, CheckpointError, CheckpointMismatchError, InputError
from tests.checkpoint.cases import DTYPES, assert_same, random_bytes

PLACED = {
    "rows": ((6, 5), torch.float32, [Shard(0)], P(None, "data")),
    "columns": ((4, 7), torch.bfloat16, [Shard(1)], P("data")),
    "uneven": ((5, 3), torch.float64, [Shard(0)], P()),
    "some empty": ((1, 4), torch.int32, [Shard(0)], P(None, "data")),
    "everywhere": ((3, 2), torch.float16, [Replicate()], P("data")),
    "cube": ((4, 3, 6), torch.complex64, [Shard(1)], P(None, None, "data")),
}
"""Name -> shape, dtype, how PyTorch has it placed, where ours has it."""


def value(name: str) -> torch.Tensor:
    shape, dtype, *_ = PLACED[name]
    return random_bytes(*shape, dtype=dtype, seed=len(name))


def theirs(mesh, fill: bool) -> dict:
    """A state dict as training programs have them: nested, placed and plain values, numbers and strings."""
    placed = {
        name: distribute_tensor(value(name) if fill else torch.zeros_like(value(name)), mesh, placements)
        for name, (_, _, placements, _) in PLACED.items()
    }
    plain = torch.arange(6.0).reshape(2, 3) if fill else torch.zeros(2, 3)
    return {
        "model": {"layers": [placed]},
        "plain": plain.t(),
        "step": 7 if fill else 0,
        "lr": 0.1 if fill else 0.0,
        "name": "run" if fill else "",
    }


def like() -> dict:
    shapes = {name: px.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype, *_) in PLACED.items()}
    return {"model": {"layers": [shapes]}, "plain": torch.zeros(3, 2), "step": 0, "lr": 0.0, "name": ""}


def specs() -> dict:
    placed = {name: spec for name, (*_, spec) in PLACED.items()}
    return {"model": {"layers": [placed]}, "plain": None, "step": None, "lr": None, "name": None}


def wanted(mesh: px.Mesh) -> dict:
    placed = {name: px.device_put(value(name), spec, mesh) for name, (*_, spec) in PLACED.items()}
    plain = px.device_put(torch.arange(6.0).reshape(2, 3).t(), P(), mesh)
    return {"model": {"layers": [placed]}, "plain": plain, "step": 7, "lr": 0.1, "name": "run"}


def both_ways(folder: str) -> None:
    mesh = px.make_mesh(data=2)
    dcp.save(theirs(mesh.device_mesh, fill=True), checkpoint_id=f"{folder}/theirs")
    found = import_dcp(f"{folder}/theirs", like(), specs=specs(), mesh=mesh)
    assert_same(found, wanted(mesh))
    export_dcp(f"{folder}/ours", found)
    loaded = theirs(mesh.device_mesh, fill=False)
    dcp.load(loaded, checkpoint_id=f"{folder}/ours")
    for name, placed in loaded["model"]["layers"][0].items():
        whole = placed.full_tensor()
        assert whole.view(torch.uint8).equal(value(name).view(torch.uint8)), name
    assert loaded["plain"].equal(torch.arange(6.0).reshape(2, 3).t())
    assert (loaded["step"], loaded["lr"], loaded["name"]) == (7, 0.1, "run")
    with pytest.raises(CheckpointError, match="holds a distributed checkpoint already"):
        export_dcp(f"{folder}/ours", found)
    with pytest.raises(CheckpointError, match="the ranks would save different trees"):
        export_dcp(f"{folder}/unlike", {"a": mesh.coords[0]})


@pytest.mark.processes
def test_two_processes_both_ways(pool, tmp_path):
    """Also onto a mesh of four, in one process, from what the two wrote, by either."""
    pool.run(both_ways, 2, str(tmp_path))
    mesh = px.make_mesh(data=4, simulate=True)
    for folder in ("theirs", "ours"):
        assert_same(import_dcp(tmp_path / folder, like(), specs=specs(), mesh=mesh), wanted(mesh))
    assert len(list((tmp_path / "ours").glob("*.distcp"))) == 2
    assert not (tmp_path / "unlike" / ".metadata").exists()


def save(tree: dict, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(tree, checkpoint_id=folder)
    return folder


def load(tree: dict, folder: Path) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tree, checkpoint_id=folder)
    return tree


def test_every_dtype_and_shape(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tree = {str(dtype): random_bytes(3, 5, dtype=dtype) for dtype in DTYPES}
    tree |= {"zero": torch.tensor(2.5), "empty": torch.empty(0, 3), "view": base[1:3, ::2], "turned": base.t()}
    shapes = {name: px.ShapeDtypeStruct(tuple(tensor.shape), tensor.dtype) for name, tensor in tree.items()}
    assert dcp_shapes(save(tree, tmp_path / "theirs")) == shapes
    found = import_dcp(tmp_path / "theirs", shapes)
    contiguous = {name: tensor.contiguous() for name, tensor in tree.items()}
    assert_same(found, contiguous)
    loaded = load({name: torch.zeros_like(t) for name, t in contiguous.items()}, export_dcp(tmp_path / "ours", tree))
    assert_same(loaded, contiguous)


def test_numpy_ties_and_dataclasses(tmp_path):
    tied = torch.ones(2, 3)
    state = px.TrainState(step=3, params={"a": tied, "b": tied}, opt_state=(np.arange(3, dtype="<i4"),), key=None)
    out = export_dcp(tmp_path / "out", state)
    assert sum(file.stat().st_size for file in out.iterdir()) < 8000
    loaded = load({"step": 0, "params": {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}}, out)
    assert loaded["step"] == 3
    assert loaded["params"]["a"].equal(tied)
    assert loaded["params"]["b"].equal(tied)
    assert_same(import_dcp(out, state).opt_state, state.opt_state)
    assert list(dcp_shapes(out)) == ["params.a", "params.b", "opt_state.0"]


def test_only_what_is_needed_is_read(tmp_path):
    """One tensor of two, of 4 MB: its bytes, the metadata, and the records of the archive."""
    tensor = torch.arange(1 << 20, dtype=torch.int32).reshape(1024, 1024)
    save({"w": tensor, "unused": torch.ones(1 << 20)}, tmp_path)
    mesh = px.make_mesh(model=2, simulate=True)
    like = {"w": px.ShapeDtypeStruct((1024, 1024), torch.int32)}
    read: list[int] = []
    with watch(lambda event: read.append(event.size if event.kind == "read" else 0)):
        found = import_dcp(tmp_path, like, specs=P("model"), mesh=mesh)
    assert px.device_get(found["w"]).equal(tensor)
    metadata = (tmp_path / ".metadata").stat().st_size
    assert sum(read) - tensor.nbytes - metadata < 4000


def read_own(folder: str) -> int:
    """Bytes that this rank of a `model` axis of two reads."""
    mesh = px.make_mesh(model=2)
    like = {"w": px.ShapeDtypeStruct((1024, 1024), torch.int32)}
    read: list[int] = []
    with watch(lambda event: read.append(event.size if event.kind == "read" else 0)):
        import_dcp(folder, like, specs=P(None, "model"), mesh=mesh)
    return sum(read)


@pytest.mark.processes
def test_each_rank_reads_its_own(pool, tmp_path):
    save({"w": torch.zeros(1024, 1024, dtype=torch.int32)}, tmp_path)
    metadata = (tmp_path / ".metadata").stat().st_size
    for count in pool.run(read_own, 2, str(tmp_path)):
        assert 0 < count - (1 << 21) - metadata < 4000


def test_what_does_not_fit_is_told_at_once(tmp_path):
    save({"model": {"w": torch.ones(2, 3)}, "step": 3, "run": {"when": [1, 2]}}, tmp_path)
    like = {"model": {"w": torch.ones(2, 3).double(), "ww": 1}, "step": "3", "run": {"when": torch.ones(2)}}
    with pytest.raises(CheckpointMismatchError) as error:
        import_dcp(tmp_path, like)
    assert [line.strip() for line in error.value.problem.splitlines()[1:]] == [
        "model.w: f32[2,3] in the checkpoint, like has f64[2,3]",
        "model.ww: not in the checkpoint; it has model.w",
        "run.when: no tensor in the checkpoint, like has f32[2]",
        "step: int in the checkpoint, like has str",
    ]
    with pytest.raises(CheckpointError, match="there is no distributed checkpoint of PyTorch"):
        import_dcp(tmp_path / "elsewhere", like)
    with pytest.raises(InputError, match=r"names for several leaves:\n *a.b"):
        export_dcp(tmp_path / "out", {"a.b": 1, "a": {"b": 2}})


class Evil:
    """What must never be called."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_pickles_call_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = save({"w": torch.ones(2), "o": 3}, tmp_path / "c")
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Evil()}))
    with pytest.raises(CheckpointDamageError, match=r"(?s)not the metadata.*names posix.mkdir"):
        import_dcp(folder, {"w": torch.ones(2)})
    (folder / ".metadata").write_bytes(b"\x80\x04r\xff\xff\xff\xff.")
    with pytest.raises(CheckpointDamageError, match="asks for more memory than the file is long"):
        import_dcp(folder, {"w": torch.ones(2)})
    folder = save({"w": Evil()}, tmp_path / "d")
    with pytest.raises(CheckpointDamageError, match="w is no plain value"):
        import_dcp(folder, {"w": 3})
    assert not (tmp_path / "evil").exists()


def test_damage_is_told_or_harmless(tmp_path):
    """Bits turned and files cut, at places drawn from a seed: an error of ours, or the values that were written."""
    tensor = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    folder = save({"w": tensor, "step": 3}, tmp_path)
    like = {"w": torch.zeros(4, 6, dtype=torch.int32), "step": 0}
    draw = random.Random(0)
    told = 0
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for _ in range(150):
            data = bytearray(whole)
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            file.write_bytes(data if draw.random() < 0.8 else data[: draw.randrange(len(data))])
            try:
                found = import_dcp(folder, like)
            except CheckpointError:
                told += 1
            else:
                assert found["w"].equal(tensor)
        file.write_bytes(whole)
    assert told > 100
    assert import_dcp(folder, like)["step"] == 3


def test_a_file_that_is_gone(tmp_path):
    folder = save({"w": torch.ones(2)}, tmp_path)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointDamageError) as error:
        import_dcp(folder, {"w": torch.ones(2)})
    assert error.value.problem.endswith("__0_0.distcp can't be read: No such file or directory")


def test_a_full_disk_leaves_nothing(tmp_path):
    def fail(event):
        if event.kind == "sync":
            raise OSError(28, "No space left on device")

    with watch(fail), pytest.raises(CheckpointError, match="No space left on device"):
        export_dcp(tmp_path / "out", {"w": torch.ones(2)})
    assert list((tmp_path / "out").iterdir()) == []
