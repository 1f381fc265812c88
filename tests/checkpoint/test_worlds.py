"""Worlds of several processes: who writes what, who reads what, what becomes of a save in which a rank fails."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import restore, save
from ptrainx.checkpoint.files import FileEvent, watch
from ptrainx.errors import CheckpointDamageError, CheckpointError, CheckpointMismatchError
from tests.checkpoint.cases import MESHES, bits, specs_of, state

pytestmark = pytest.mark.processes

WORLDS = {1: ["one"], 2: ["pair"], 4: ["data=4", "data=2,model=2"]}
PAIR = ({"data": 2}, {"w": P("data"), "e": P(None, "data"), "t": P("data")})


def placed(name: str):
    """(state on a real mesh, specs, mesh)."""
    sizes, own = {**MESHES, "pair": PAIR}[name]
    mesh = px.make_mesh(sizes)
    specs = {leaf: own.get(leaf, P()) for leaf in state()}
    return px.device_put(state(), specs, mesh), specs, mesh


def save_worlds(folder: str, names: list[str]) -> None:
    for number, name in enumerate(names):
        values, _, _ = placed(name)
        save(Path(folder, name), {**values, "n": 7}, number)


def restore_worlds(folder: str, names: list[str], saved: list[str]) -> bool:
    for name in names:
        _, specs, mesh = placed(name)
        for other in saved:
            like = {**px.eval_shape(state), "n": 0}
            found = restore(Path(folder, other), like, specs={**specs, "n": None}, mesh=mesh)
            assert found.pop("n") == 7
            expected, _, _ = placed(name)
            assert all(bits(found[leaf]) == bits(value) for leaf, value in expected.items()), (name, other)
    return True


def test_every_world_restores_what_any_other_saved(pool, tmp_path):
    saved = [name for names in WORLDS.values() for name in names]
    for world, names in WORLDS.items():
        pool.run(save_worlds, world, str(tmp_path), names)
    for world, names in WORLDS.items():
        assert all(pool.run(restore_worlds, world, str(tmp_path), names, saved))
    # One process that plays four devices writes the very same files as four processes.
    for name in WORLDS[4]:
        mesh = px.make_mesh(MESHES[name][0], simulate=True)
        values = px.device_put(state(), specs_of(name), mesh)
        path = save(tmp_path / "simulated", {**values, "n": 7}, WORLDS[4].index(name))
        real = tmp_path / name / path.name
        assert {file.name: file.read_bytes() for file in path.iterdir()} == {
            file.name: file.read_bytes() for file in real.iterdir()
        }


def read_bytes(folder: str) -> tuple[int, set[str]]:
    """(bytes of tensors, files) that this rank reads when it restores by rows what was saved by columns."""
    mesh = px.make_mesh(data=2)
    seen: list[FileEvent] = []
    like = {"rows": px.ShapeDtypeStruct((2048, 2048), torch.float32)}
    with watch(seen.append):
        found = restore(folder, like, specs=P("data"), mesh=mesh)
    whole = torch.arange(1 << 22, dtype=torch.float32).reshape(2048, 2048)
    assert found["rows"].to_local().equal(whole[1024 * mesh.rank :][:1024])
    reads = [event for event in seen if event.kind == "read" and event.offset and "rank-" in event.path]
    return sum(event.size for event in reads), {Path(event.path).name for event in reads}


def test_a_rank_reads_its_own_blocks_only(pool, tmp_path):
    mesh = px.make_mesh(data=4, simulate=True)
    whole = torch.arange(1 << 22, dtype=torch.float32).reshape(2048, 2048)  # 16 MiB, in four files
    save(tmp_path, {"rows": px.device_put(whole, P("data"), mesh)}, 1)
    half = 8 << 20
    assert pool.run(read_bytes, 2, str(tmp_path)) == [
        (half, {"rank-00000.safetensors", "rank-00001.safetensors"}),
        (half, {"rank-00002.safetensors", "rank-00003.safetensors"}),
    ]


def fail_in(folder: str) -> list[str]:
    """What each kind of failure on one rank tells on this one."""
    px.initialize()
    rank, told = dist.get_rank(), []
    values, _, _ = placed("pair")

    def full(event: FileEvent) -> None:
        if rank == 1 and event.kind == "write" and "rank-00001" in event.path:
            raise OSError(122, "Disk quota exceeded")

    def attempt(tree, watcher=lambda event: None, timeout=None) -> None:
        began = time.monotonic()
        try:
            with watch(watcher):
                save(folder, tree, 2, timeout=timeout)
        except CheckpointError as error:
            told.append(f"{error.problem} | {error.got}")
        assert time.monotonic() - began < 20

    save(folder, values, 1)
    attempt(values, full)
    attempt({**values, "n": rank})
    attempt({**values, "key": px.random.key(rank)})
    attempt(values if rank == 0 else {**values, "more": 1})
    if rank == 0:
        attempt(values, timeout=0.5)  # the other rank skips the call
    dist.barrier()
    return told


def test_a_rank_that_fails_is_told_on_every_rank_and_earlier_steps_stay(pool, tmp_path):
    first, second = pool.run(fail_in, 2, str(tmp_path))
    assert "rank 1 can't write | OSError: [Errno 122] Disk quota exceeded" in second[0]
    assert "rank 1 failed | CheckpointError: saving step 2: rank 1 can't write" in first[0]
    for i, text in ((1, "['n']: int 0x"), (2, "['key']: tensor i32[2]"), (3, "['more']: int 0x1")):
        assert all("the ranks would save different trees" in told[i] and text in told[i] for told in (first, second))
    assert "rank 1 gave no sign of life | waited 0.5 s" in first[4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000000001"]


def die_in(folder: str) -> str:
    values, _, mesh = placed("pair")
    save(folder, values, 1)

    def die(event: FileEvent) -> None:
        if mesh.rank == 1 and event.kind == "sync":
            os._exit(9)

    with watch(die):
        try:
            save(folder, values, 2, timeout=1.0)
        except CheckpointError as error:
            return error.problem
    return "no error"


def test_a_rank_that_dies_is_named(pool, tmp_path):
    first, second = pool.run_outcomes(die_in, 2, str(tmp_path))
    assert first.result == "saving step 2: rank 1 gave no sign of life"
    assert "exit status 9" in str(second.error)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000000001"]


def restore_damaged(folder: str) -> tuple[list[str], float]:
    """Rank 1's own file of step 2 is damaged: both ranks go back to step 1."""
    mesh = px.make_mesh(data=2)
    for step in (1, 2):
        save(folder, {"w": px.device_put(torch.full((1024, 512), float(step)), P("data"), mesh)}, step)
    if mesh.rank == 1:
        file = Path(folder, "step-000000000002", "rank-00001.safetensors")
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    dist.barrier()
    like = {"w": px.ShapeDtypeStruct((1024, 512), torch.float32)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = restore(folder, like, specs=P("data"), mesh=mesh)
    with pytest.raises(CheckpointDamageError) as damaged:  # whichever rank is the first to see it
        restore(folder, like, specs=P("data"), mesh=mesh, step=2)
    with pytest.raises(CheckpointMismatchError) as other:
        restore(folder, {"v" if mesh.rank else "w": like["w"]}, step=1)
    told += [damaged.value, other.value]
    return [str(getattr(t, "message", t)) for t in told], float(found["w"].to_local().max())


def test_ranks_fall_back_together(pool, tmp_path):
    outcomes = pool.run(restore_damaged, 2, str(tmp_path))
    assert "rank 1 failed" in outcomes[0][0][2]
    assert "['v']: not in the checkpoint; it has ['w']" in outcomes[1][0][2]
    for told, value in outcomes:
        assert value == 1.0
        assert "step 2: " in told[0]
        assert "rank-00001.safetensors: a block is not as it was written" in told[0]
        assert "(rank 1)" in told[0]
        assert "no step that is as it was written" in told[1]
