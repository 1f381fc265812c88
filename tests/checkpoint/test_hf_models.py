"""Models of transformers: its files and logits (`hf`, made by `with_transformers.py`) are the right answers."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import Architecture, Row, export_hf, hf_shapes, import_hf, register_adapter
from ptrainx.checkpoint.files import watch
from ptrainx.errors import CheckpointDamageError, CheckpointError, CheckpointMismatchError, InputError
from tests.checkpoint.cases import assert_same
from tests.checkpoint.hf_models import GOLDEN, config_in, example, logits, random_tree, read

MODELS = ["gpt2", "gpt2-untied", "llama", "llama-tied", "qwen2", "qwen2-tied"]
TOLERANCE = {"rtol": 0, "atol": 1e-5}
"""Logits are up to 5 in size, float32."""

each_model = pytest.mark.parametrize("name", MODELS)


@each_model
def test_logits_are_those_of_transformers(name):
    answers, config = load_file(GOLDEN / name / "answers.safetensors"), config_in(GOLDEN / name)
    params, _ = read(GOLDEN / name)
    torch.testing.assert_close(logits(params, answers["tokens"], config), answers["logits"], **TOLERANCE)
    stacked, _ = read(GOLDEN / name, stacked=True)
    torch.testing.assert_close(logits(stacked, answers["tokens"], config), answers["logits"], **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "stacked"),
    [("qwen2", True), ("gpt2-untied", False), pytest.param("llama-tied", False, marks=pytest.mark.long)],
)
def test_logits_on_a_mesh(name, stacked):
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    answers, config = load_file(GOLDEN / name / "answers.safetensors"), config_in(GOLDEN / name)
    params, specs = read(GOLDEN / name, mesh, stacked=stacked)
    found = logits(params, answers["tokens"], config, mesh, specs)
    torch.testing.assert_close(found, answers["logits"], **TOLERANCE)


@each_model
@pytest.mark.parametrize("form", [{}, {"stacked": True, "joined": True}], ids=str)
def test_what_is_written_is_what_transformers_wrote(name, form, tmp_path):
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    params, _ = read(GOLDEN / name, mesh, **form)
    out = export_hf(tmp_path / "out", params, config=GOLDEN / name)
    assert_same(load_file(out / "model.safetensors"), load_file(GOLDEN / name / "model.safetensors"))
    assert config_in(out) == config_in(GOLDEN / name)


def test_the_config_says_the_dtype_that_was_written(tmp_path):
    params = px.tree.map(lambda w: w.bfloat16(), read(GOLDEN / "gpt2")[0])
    out = export_hf(tmp_path / "out", params, config=config_in(GOLDEN / "gpt2"))
    assert config_in(out) == {**config_in(GOLDEN / "gpt2"), "dtype": "bfloat16"}
    assert_same(import_hf(out), params)


def test_forms_of_a_tree():
    """What a leaf is, in each form, by hand from the tensors of the files."""
    stored = load_file(GOLDEN / "qwen2" / "model.safetensors")
    q, k, v = (stored[f"model.layers.1.self_attn.{n}_proj.weight"].t() for n in "qkv")
    listed, _ = read(GOLDEN / "qwen2")
    assert listed["layers"][1]["q"].equal(q)
    assert listed["layers"][1]["k_bias"].equal(stored["model.layers.1.self_attn.k_proj.bias"])
    both, _ = read(GOLDEN / "qwen2", stacked=True, joined=True)
    assert both["layers"]["qkv"][1].equal(torch.cat([q, k, v], dim=1))
    assert sorted(both["layers"]) == ["down", "gate_up", "norm_attention", "norm_mlp", "o", "qkv", "qkv_bias"]
    stored = load_file(GOLDEN / "gpt2" / "model.safetensors")
    split, _ = read(GOLDEN / "gpt2", stacked=True)
    fused = stored["transformer.h.0.attn.c_attn.weight"]
    assert [split["layers"][n][0].equal(part) for n, part in zip("qkv", fused.chunk(3, dim=1))] == [True] * 3
    assert "head" not in split


def test_without_like_the_config_says_what_there_is(tmp_path):
    assert_same(import_hf(GOLDEN / "llama"), read(GOLDEN / "llama")[0])
    assert_same(hf_shapes(GOLDEN / "llama"), hf_shapes(config_in(GOLDEN / "llama")))
    half = hf_shapes({**config_in(GOLDEN / "gpt2"), "dtype": "bfloat16"})
    assert half["layers"][0]["up"] == px.ShapeDtypeStruct((16, 64), torch.bfloat16)


def test_a_tied_head_may_be_asked_for():
    embed = load_file(GOLDEN / "gpt2" / "model.safetensors")["transformer.wte.weight"]
    like = {"head": px.ShapeDtypeStruct((16, 26), torch.float32)}
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    found = import_hf(GOLDEN / "gpt2", like, specs=P("data", "model"), mesh=mesh, adapter="gpt2")
    assert px.device_get(found["head"]).equal(embed.t())


def test_files_of_a_model_without_its_head(tmp_path):
    """`GPT2Model.save_pretrained` leaves out the prefix; old files hold masks as well. A folder of links is fine."""
    stored = {n.removeprefix("transformer."): w for n, w in load_file(GOLDEN / "gpt2" / "model.safetensors").items()}
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    save_file({**stored, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "blobs" / "a")
    shutil.copy(GOLDEN / "gpt2" / "config.json", tmp_path / "blobs" / "b")
    (tmp_path / "model" / "model.safetensors").symlink_to("../blobs/a")
    (tmp_path / "model" / "config.json").symlink_to("../blobs/b")
    assert_same(import_hf(tmp_path / "model"), import_hf(GOLDEN / "gpt2"))


def large(folder: Path) -> dict:
    """A GPT-2 of one layer, 12.7 MB, of which a rank of a model axis reads parts of rows."""
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 512, "n_positions": 8, "n_layer": 1}
    tree = random_tree(hf_shapes(config))
    export_hf(folder, tree, config=config)
    return tree


def read_own(folder: str) -> tuple[int, int]:
    """(bytes that this rank reads, bytes of its shards), onto a `model` axis of two."""
    mesh = px.make_mesh(model=2)
    shapes = hf_shapes(folder)
    specs = px.match_rules(example("sharding").RULES, shapes)
    sizes: list[int] = []
    with watch(lambda event: sizes.append(event.size if event.kind == "read" else 0)):
        params = import_hf(folder, shapes, specs=specs, mesh=mesh, adapter="gpt2")
    held = [value.to_local() if hasattr(value, "to_local") else value for value in px.tree.leaves(params)]
    whole = px.device_get(params)
    assert_same(whole["layers"][0], random_tree(shapes)["layers"][0])
    # Onto one folder from both, joined on the mesh and written by rank 0.
    out = export_hf(f"{folder}-again", params, config=folder, max_shard_bytes=3_000_000)
    assert_same(import_hf(out), import_hf(folder))
    return sum(sizes), sum(value.nbytes for value in held)


@pytest.mark.processes
def test_each_rank_reads_its_own_bytes(pool, tmp_path):
    large(tmp_path / "model")
    header = 8 + int.from_bytes((tmp_path / "model" / "model.safetensors").read_bytes()[:8], "little")
    total = (tmp_path / "model" / "model.safetensors").stat().st_size
    for count, held in pool.run(read_own, 2, str(tmp_path / "model")):
        assert count == held + header
        assert count < 0.55 * total
    assert len(list((tmp_path / "model-again").glob("model-*.safetensors"))) > 3


def test_what_is_no_tree_of_the_model_is_told_at_once(tmp_path):
    config = config_in(GOLDEN / "llama-tied")
    params, _ = read(GOLDEN / "llama-tied")
    first = dict(params["layers"][0])
    first["qkv"], first["up"] = torch.cat([first["q"], first["k"], first["v"]], 1), first["up"].t()
    first["gatee"] = first.pop("gate")
    tree = {**params, "head": params["embed"].t(), "layers": [first, params["layers"][1]]}
    with pytest.raises(InputError) as error:
        export_hf(tmp_path, tree, config=config)
    assert [line.strip() for line in error.value.problem.splitlines()] == [
        "export_hf: leaves that are not those of a LlamaForCausalLM:",
        "head: the config ties it to the embedding (tie_word_embeddings)",
        "layers/0/gatee: no such leaf; it has layers/0/gate and layers/1/gate",
        "layers/0/up: [20, 16], the config has [16, 20]",
        "model.layers.0.self_attn.q_proj.weight: in several leaves: layers/0/q, layers/0/qkv",
        "model.layers.0.self_attn.k_proj.weight: in several leaves: layers/0/k, layers/0/qkv",
        "model.layers.0.self_attn.v_proj.weight: in several leaves: layers/0/qkv, layers/0/v",
        *(f"model.layers.0.mlp.{n}_proj.weight: some or all of it is in no leaf" for n in ("gate", "up")),
    ]
    assert list(tmp_path.iterdir()) == []
    like = {"layers": {"q": torch.zeros(2, 16, 8), "r": torch.zeros(1)}, "embed": torch.zeros(26, 16).double()}
    with pytest.raises(CheckpointMismatchError) as mismatch:
        import_hf(GOLDEN / "llama", like, adapter="llama")
    assert [line.strip() for line in mismatch.value.problem.splitlines()[1:]] == [
        "embed: model.embed_tokens.weight: F32[26, 16] in the files, like has f64[26,16]",
        "layers/q: the model has [2, 16, 16], like has f32[2,16,8]",
        "layers/r: no leaf of a LlamaForCausalLM; it has layers/v and layers/q",
    ]


def test_files_that_do_not_fit_the_config(tmp_path):
    shutil.copytree(GOLDEN / "llama", tmp_path / "model")
    config = config_in(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "vocab_size": 27}))
    with pytest.raises(CheckpointMismatchError) as error:
        import_hf(tmp_path / "model")
    told = error.value.problem
    assert told.count("not in the files") == 9
    assert "embed: model.embed_tokens.weight: F32[26, 16] in the files, the config has [27, 16]" in told
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"(?s)no adapter for this model.*model_type None.*one of gpt2, .*llama"):
        import_hf(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=r"(?s)does not describe such a model.*no 'vocab_size'"):
        hf_shapes(tmp_path / "model")
    for text, told in (("[1]", "is no config"), ("{", "is no config")):
        (tmp_path / "model" / "config.json").write_text(text)
        with pytest.raises(InputError, match=told):
            import_hf(tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json can't be read: No such file"):
        import_hf(tmp_path / "model")


HEADERS = {
    "no JSON": b"{",
    "a list": b"[]",
    "no entry": b'{"w": 3}',
    "no offsets": b'{"w": {"dtype": "F32", "shape": [1]}}',
    "beyond the file": b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
    "backwards": b'{"w": {"dtype": "F32", "shape": [0], "data_offsets": [4, 0]}}',
    "another length": b'{"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
    "negative": b'{"w": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}',
    "a bool": b'{"w": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}',
    "huge": b'{"w": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 8]}}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_headers_that_are_not_believed(header, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointDamageError, match="not one of a safetensors file"):
        import_hf(tmp_path, {"w": torch.zeros(1)})


def test_an_index_that_promises_too_much(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointDamageError, match=r"(?s)lacks tensors that the index says it has.*b"):
        import_hf(tmp_path, {"a": torch.ones(1)})


class Plugin:
    """An entry point of a package."""

    name = "mlp"

    def load(self):
        return lambda: register_adapter("test-mlp", mlp)


def mlp(config):
    n = config["width"]
    rows = (Row("layers/*/w", "net.*.weight", (n, n), transposed=True), Row("out", "out", (n,)))
    return Architecture("Mlp", rows, layers=config["depth"])


def test_adapters_come_from_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Plugin()] * (group == "ptrainx.adapters"))
    weights = {"net.0.weight": torch.arange(4.0).reshape(2, 2), "net.1.weight": torch.ones(2, 2), "out": torch.ones(2)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "test-mlp", "width": 2, "depth": 2}')
    found = import_hf(tmp_path)
    assert found["layers"][0]["w"].tolist() == [[0, 2], [1, 3]]
    out = export_hf(tmp_path / "out", found, config=tmp_path)
    assert_same(load_file(out / "model.safetensors"), weights)
    assert re.search(r'"architectures": \[\s*"Mlp"', (out / "config.json").read_text())
