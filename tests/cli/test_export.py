"""`ptrainx checkpoint export`: what it writes is what the tools it is for read."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ptrainx as px
from ptrainx import P
from ptrainx.cli.main import main
from tests.checkpoint.cases import assert_same
from tests.checkpoint.hf_models import GOLDEN, example


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with a Llama's parameters, layers stacked, on four devices, and more."""
    folder = tmp_path_factory.mktemp("run")
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    shapes = px.checkpoint.hf_shapes(GOLDEN / "llama", stacked=True)
    specs = px.match_rules(example("sharding").RULES, shapes)
    params = px.checkpoint.import_hf(GOLDEN / "llama", shapes, specs=specs, mesh=mesh, adapter="llama")
    moments = {"mu": px.device_put(torch.arange(10.0), P("data"), mesh), "nu": torch.ones(3)}
    px.checkpoint.save(folder, {"params": params, "moments": moments, "step": 4, "name": "run"}, 4)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main(["checkpoint", "export", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_to_hugging_face(folder, tmp_path, capsys):
    config = GOLDEN / "llama" / "config.json"
    status, out = run(capsys, folder, tmp_path / "out", "--to", "hf", "--tree", "params", "--config", config)
    assert (status, out) == (0, f"step 4: 20.3 kB in 2 files in {tmp_path / 'out'}\n")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), load_file(GOLDEN / "llama" / "model.safetensors"))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(config.read_text())


def test_to_safetensors_with_dotted_names(folder, tmp_path, capsys):
    options = ["--step", 4, "--to", "hf", "--tree", "moments/", "--max-shard-bytes", 40]
    status, _ = run(capsys, folder, tmp_path / "out", *options)
    assert status == 0
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert load_file(tmp_path / "out" / "model-00001-of-00002.safetensors")["mu"].equal(torch.arange(10.0))


def test_to_dcp(folder, tmp_path, capsys):
    status, _ = run(capsys, folder, tmp_path / "out", "--to", "dcp")
    assert status == 0
    like = {"params": {"embed": torch.zeros(26, 16)}, "moments": {"mu": torch.zeros(10)}, "step": 0, "name": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(like, checkpoint_id=tmp_path / "out")
    embed = load_file(GOLDEN / "llama" / "model.safetensors")["model.embed_tokens.weight"]
    assert_same(like, {"params": {"embed": embed}, "moments": {"mu": torch.arange(10.0)}, "step": 4, "name": "run"})


REFUSED = {
    "no tensors": (
        ["--to", "hf"],
        "leaves that are no tensors:\n    name: str\n    step: int",
        "--tree moments or params",
    ),
    "no such part": (["--to", "dcp", "--tree", "param"], "has nothing below 'param'; it has params", "moments, name"),
    "not the config's": (["--to", "hf", "--config", GOLDEN / "gpt2", "--tree", "params"], "GPT2LMHeadModel", "gate"),
    "config for DCP": (["--to", "dcp", "--config", "x"], "--config is for --to hf", "leave --config out"),
    "no config": (["--to", "hf", "--config", "x.json", "--tree", "params"], "x.json can't be read", "check the path"),
    "no step": (["--to", "dcp", "--step", "5"], "there is no step 5", "one of 4"),
    "no size": (["--to", "hf", "--max-shard-bytes", "0"], "less than 1", "a positive integer"),
}


@pytest.mark.parametrize(("options", "told", "more"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(folder, tmp_path, capsys, options, told, more):
    status, out = run(capsys, folder, tmp_path / "out", *options)
    assert status != 0
    assert told in out
    assert more in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", [["hf", "--tree", "params"], ["dcp"]], ids=str)
def test_a_damaged_step_leaves_nothing(folder, tmp_path, capsys, to):
    shutil.copytree(folder, tmp_path / "run")
    for file in (tmp_path / "run" / "step-000000000004").glob("rank-*"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    status, out = run(capsys, tmp_path / "run", tmp_path / "out", "--to", *to)
    assert status != 0
    assert "a block is not as it was written" in out
    assert list((tmp_path / "out").iterdir()) == []
