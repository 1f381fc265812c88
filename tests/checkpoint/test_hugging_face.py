"""Weights in the files of Hugging Face: what others wrote is read, what is written others read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import export_hf, import_hf
from ptrainx.checkpoint.files import watch
from ptrainx.errors import CheckpointDamageError, CheckpointError, CheckpointMismatchError, InputError
from tests.checkpoint.cases import assert_same


class Block(torch.nn.Module):
    """A layer with the names of a Llama's MLP."""

    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Linear(8, 16, bias=False)
        self.down_proj = torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down_proj(torch.relu(self.up_proj(x)))


def module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({"embed": torch.nn.Embedding(10, 8), "layers": torch.nn.Sequential(Block(), Block())})


def logits(model, tokens):
    return model["layers"](model["embed"](tokens))


def test_a_modules_state_dict_goes_both_ways(tmp_path):
    """A state dict that torch made, saved by safetensors in two files, as placed values; and back into a module."""
    model, state = module(0), module(0).state_dict()
    names = sorted(state)
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, own in files.items():
        save_file({name: state[name] for name in own}, tmp_path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    like = {name: px.ShapeDtypeStruct(tuple(value.shape), value.dtype) for name, value in state.items()}
    specs = px.match_rules([(r"up_proj", P("model")), (r"down_proj.weight", P(None, "model")), (r".*", P())], like)
    placed = import_hf(tmp_path, like, specs=specs, mesh=mesh)
    assert_same(placed, px.device_put(dict(state), specs, mesh))
    out = export_hf(tmp_path / "out", placed)
    assert [file.name for file in out.iterdir()] == ["model.safetensors"]
    again = module(1)
    again.load_state_dict(load_file(out / "model.safetensors"))
    tokens = torch.arange(10)
    assert logits(again, tokens).equal(logits(model, tokens))


def test_trees_have_dotted_names_and_large_ones_several_files(tmp_path):
    tree = {"model": {"layers": [{"w": torch.arange(6.0).reshape(2, 3)}, {"w": torch.ones(3).bfloat16()}]}}
    tree["scale"] = torch.tensor(2.5)
    out = export_hf(tmp_path, tree, max_shard_bytes=24)
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 34}
    assert index["weight_map"] == {
        "model.layers.0.w": files[0], "model.layers.1.w": files[1], "scale": files[1],
    }  # fmt: skip
    assert load_file(out / files[0])["model.layers.0.w"].equal(tree["model"]["layers"][0]["w"])
    assert_same(import_hf(tmp_path, tree), tree)


def export_and_import(folder: str) -> list[int]:
    mesh = px.make_mesh(data=2)
    w = px.device_put(torch.arange(8.0).reshape(4, 2), P("data"), mesh)
    out = export_hf(folder, {"w": w})
    assert load_file(out / "model.safetensors")["w"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(CheckpointError, match="FileExistsError"):
        export_hf(folder, {"w": w})
    return import_hf(folder, {"w": w}, specs=P(None, "data"), mesh=mesh)["w"].to_local().flatten().tolist()


@pytest.mark.processes
def test_two_processes(pool, tmp_path):
    assert pool.run(export_and_import, 2, str(tmp_path)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_what_does_not_fit_is_told_at_once(tmp_path):
    save_file({"a.weight": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError) as error:
        import_hf(tmp_path, {"a": {"wieght": torch.ones(2)}, "b": torch.ones(3).double(), "c": 1})
    assert [line.strip() for line in error.value.problem.splitlines()[1:]] == [
        "a.wieght: not in the files; it has a.weight",
        "b: F32[3] in the files, like has f64[3]",
        "c: not in the files",
    ]


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no model\.safetensors"):
        import_hf(tmp_path, {})
    index = tmp_path / "model.safetensors.index.json"
    for text, told in (("[]", "is no index"), ('{"weight_map": {"a": "../x.safetensors"}}', "none of the folder's")):
        index.write_text(text)
        with pytest.raises(CheckpointDamageError, match=told):
            import_hf(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointDamageError, match="no safetensors file"):
        import_hf(tmp_path, {})
    with pytest.raises(InputError, match=r"(?s)a.b: a name for several leaves.*|n: int"):
        export_hf(tmp_path / "out", {"n": 1, "a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


def test_a_full_disk_is_told(tmp_path):
    def fail(event):
        if event.kind == "write":
            raise OSError(28, "No space left on device")

    with watch(fail), pytest.raises(CheckpointError, match="No space left on device"):
        export_hf(tmp_path / "out", {"w": torch.ones(2)})
    assert list((tmp_path / "out").iterdir()) == []
