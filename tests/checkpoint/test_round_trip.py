"""What is saved comes back: every kind of leaf, from every mesh onto every other, bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, Shard

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import Manager, restore, save
from ptrainx.core import torch_compat as tc
from ptrainx.mesh.simulated import wrap_all
from tests.checkpoint.cases import MESHES, assert_same, bits, every_kind, specs_of, state


def test_every_kind_of_leaf_comes_back_with_its_type(tmp_path):
    tree = every_kind()
    save(tmp_path, tree, 3)
    found = restore(tmp_path, like=every_kind())
    assert_same(found, tree)
    assert found["tied"]["a"] is found["tied"]["b"][0]
    assert found["tied"]["b"][1] is not found["tied"]["a"]
    assert found["nodes"].w.nu is None
    assert found["nodes"].b == [None, {}, (), []]


def test_any_safetensors_reader_opens_the_files(tmp_path):
    w, z = torch.arange(6.0).reshape(2, 3), torch.tensor([1 - 2j])
    path = save(tmp_path, {"w": w, "z": z, "tied": w, "n": 5}, 0)
    assert sorted(file.name for file in path.iterdir()) == ["commit.json", "manifest.json", "rank-00000.safetensors"]
    found = load_file(path / "rank-00000.safetensors")
    assert set(found) == {"0[0:2,0:3]", "1[0:1]"}
    assert found["0[0:2,0:3]"].equal(w)
    assert found["1[0:1]"].tolist() == [[1.0, -2.0]]
    manifest = json.loads((path / "manifest.json").read_text())
    assert [leaf.get("tensor") for leaf in manifest["leaves"]] == [None, 0, 0, 1]


@pytest.mark.parametrize("before", MESHES)
def test_every_mesh_to_every_other(tmp_path, before):
    sizes, _ = MESHES[before]
    mesh = px.make_mesh(sizes, simulate=True)
    save(tmp_path, px.device_put(state(), specs_of(before), mesh), 1)
    assert_same(restore(tmp_path, like=state()), state())
    for name, (sizes, _) in MESHES.items():
        other = px.make_mesh(sizes, simulate=True)
        expected = px.device_put(state(), specs_of(name), other)
        assert_same(restore(tmp_path, like=px.eval_shape(state), specs=specs_of(name), mesh=other), expected)
        assert_same(restore(tmp_path, like=expected), expected)


def test_copies_share_the_work_and_each_rank_has_its_own_file(tmp_path):
    mesh = px.make_mesh(data=4, simulate=True)
    value = torch.arange(1 << 20, dtype=torch.int64).reshape(1024, 1024)  # 8 MiB
    path = save(
        tmp_path, px.device_put({"copied": value, "split": value}, {"copied": P(), "split": P("data")}, mesh), 1
    )
    files = [load_file(path / f"rank-{rank:05d}.safetensors") for rank in range(4)]
    for rank, held in enumerate(files):
        rows = slice(256 * rank, 256 * rank + 256)
        assert set(held) == {f"{i}[{rows.start}:{rows.stop},0:1024]" for i in (0, 1)}
        assert all(part.equal(value[rows]) for part in held.values())


UNEVEN = [(5,), (3, 2), (1, 4), (0, 3), (7, 3)]


def test_uneven_and_empty_shards(tmp_path):
    """Placements that DTensor has and specs have not: chunks of different sizes, ranks with nothing."""
    mesh = px.make_mesh(data=4, model=2, simulate=True)
    whole = [torch.arange(torch.Size(shape).numel()).reshape(shape) for shape in UNEVEN]
    placements = [Shard(0), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(1)]
    for number, chosen in enumerate(placements):
        tree = []
        for value in whole:
            ways = [p if isinstance(p, Replicate) or p.dim < value.ndim else Replicate() for p in chosen]
            replicated = px.device_put(value, P(), mesh)
            tree.append(replicated.redistribute(mesh.device_mesh, ways))
        save(tmp_path, tree, number)
        found = restore(tmp_path, like=tree, step=number)
        for got, expected, value in zip(found, tree, whole):
            assert got.placements == expected.placements
            assert bits(px.device_get(got)) == bits(value)
        assert_same(restore(tmp_path, like=whole, step=number), whole)


def test_a_train_state_goes_on_where_it_was(tmp_path):
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    optimizer = px.optim.chain(px.optim.clip_by_global_norm(1.0), px.optim.adamw(1e-2))

    def init(key):
        params = {"w": px.random.normal(key, (4, 8))}
        return px.TrainState(step=0, params=params, opt_state=optimizer.init(params), key=key)

    shapes = px.eval_shape(init, px.random.key(0))
    specs = px.match_rules([(r"\bw$", P("data", "model")), (r".*", P())], shapes)

    @px.jit(mesh=mesh, in_specs=(specs,), out_specs=specs, backend="eager")
    def step(state):
        grads = px.grad(lambda p: (p["w"] ** 2).sum())(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = px.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state)

    state = step(px.device_put(init(px.random.key(0)), specs, mesh))
    save(tmp_path, state, int(state.step))
    found = restore(tmp_path, like=shapes, specs=specs, mesh=mesh)
    assert_same(found, state)
    assert_same(step(found), step(state))


def test_a_loader_goes_on_where_it_was(tmp_path):
    def make():
        return px.data.Loader(np.arange(32), 4, mesh=px.make_mesh(data=2, simulate=True), seed=3)

    rows = [px.device_get(batch).tolist() for batch in make()]
    loader = make()
    batches = iter(loader)
    first = [px.device_get(next(batches)).tolist() for _ in range(3)]
    save(tmp_path, {"loader": loader.state_dict()}, 3)
    other = make()
    other.load_state_dict(restore(tmp_path, like={"loader": other.state_dict()})["loader"])
    assert first + [px.device_get(batch).tolist() for batch in other] == rows


def test_the_manager_keeps_what_its_rules_say(tmp_path):
    metrics = {0: 5.0, 10: 1.0, 20: 3.0, 30: 2.0, 40: 4.0, 50: 6.0}
    manager = Manager(tmp_path / "run", keep=2, every=20, best=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "step-000000000005").mkdir()
    for step, metric in metrics.items():
        manager.save(step, {"step": step, "w": torch.full((2,), step)}, metric=metric)
    assert manager.all_steps() == [0, 10, 20, 30, 40, 50]
    assert manager.latest_step() == 50
    manager.save(70, {"step": 70, "w": torch.full((2,), 70)}, metric=9.0)
    manager.save(90, {"step": 90, "w": torch.full((2,), 90)}, metric=9.5)
    assert manager.all_steps() == [0, 10, 20, 30, 40, 70, 90]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "run" / "step-000000000005").is_dir()
    like = {"step": 0, "w": torch.zeros(2, dtype=torch.int64)}
    assert manager.restore(like=like)["step"] == 90
    assert_same(manager.restore(10, like=like), {"step": 10, "w": torch.full((2,), 10)})


def test_a_strided_placement_comes_back(tmp_path):
    """Columns that are interleaved, as tensor-parallel over data-parallel shards has them."""
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    whole = torch.arange(16.0).reshape(8, 2)
    # Rank (d, m) has, of each of the two halves that `model` makes, the part d: rows m*4 + d*2 and the next.
    locals_ = [whole[4 * m + 2 * d : 4 * m + 2 * d + 2] for d in (0, 1) for m in (0, 1)]
    strided = tc._StridedShard(0, split_factor=2)
    value = wrap_all(
        [part.clone() for part in locals_],
        tc.make_spec(mesh.device_mesh, (strided, Shard(0)), (8, 2), (2, 1), whole.dtype),
    )
    assert px.device_get(value).equal(whole)
    save(tmp_path, value, 0)
    assert restore(tmp_path, like=torch.zeros(8, 2)).equal(whole)
    back = restore(tmp_path, like=value)
    assert px.device_get(back).equal(whole)
    assert_same(
        restore(tmp_path, px.eval_shape(lambda: whole), specs=P("model"), mesh=mesh),
        px.device_put(whole, P("model"), mesh),
    )
