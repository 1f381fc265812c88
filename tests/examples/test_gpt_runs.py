"""The GPT example as a user runs it: the same losses on every mesh, every launcher, what it writes, what it refuses."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.examples.gpt import FOLDER, TINY, load

pytestmark = pytest.mark.processes

ROOT = FOLDER.parents[1]
STEPS = 4
LINE = {"step", "loss", "tokens_per_s", "step_s", "rss_mib"}
RUN = {"mesh", "backend", "world", "zero", "comm_bytes"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Some Python source, short enough to be scored at once."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(Path(argparse.__file__).read_text()[:20_000])
    return path


def run(arguments):
    """A whole run in this process."""
    gpt = load()
    gpt.train.train(gpt.train.options([*TINY, *map(str, arguments)]))


def results(out):
    """(lines of the metrics, parameters by name) that a run wrote."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines, load_file(out / "params.safetensors")


def program(*command, status=0):
    """Runs a command in the project's folder and returns its (output, errors)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """One process, started as a plain program: (its folder, its output)."""
    out = tmp_path_factory.mktemp("alone") / "run"
    arguments = [*TINY, "--data", text, "--steps", STEPS, "--val-every", 2, "--out", out]
    return out, program("examples/gpt/train.py", *arguments)[0]


@pytest.fixture(scope="module")
def at_first(pool, text, tmp_path_factory):
    """What `--steps 0` writes: (metrics, parameters)."""
    out = tmp_path_factory.mktemp("first")
    pool.run(run, 1, ["--data", text, "--steps", 0, "--mesh", "data=2", "--simulate", "--zero", 3, "--out", out])
    return results(out)


def test_what_a_run_writes(alone):
    out, _ = alone
    assert sorted(file.name for file in out.iterdir()) == ["loss.png", "metrics.jsonl", "params.safetensors"]
    lines, parameters = results(out)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line.keys() >= LINE for line in lines)
    assert {name: lines[0][name] for name in RUN} == {
        "mesh": {"data": 1},
        "backend": "graph",
        "world": 1,
        "zero": 0,
        "comm_bytes": 0,
    }
    assert ["val_loss" in line for line in lines] == [False, True, False, True]
    assert lines[0]["parameters"] == sum(tensor.numel() for tensor in parameters.values())
    for line in lines:
        assert line["tokens_per_s"] * line["step_s"] == pytest.approx(8 * 16)
        assert line["rss_mib"] > 50


def test_what_a_run_says(alone):
    out, output = alone
    lines, _ = results(out)
    assert f"train  step {STEPS}/{STEPS}  loss {lines[-1]['loss']:.4f}" in output
    assert f"validation loss {lines[-1]['val_loss']:.4f} nats a byte" in output
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", output), "what the model wrote reached the terminal raw"


def test_evaluate_scores_held_out_text_as_the_run_did(alone, text, tmp_path):
    out, _ = alone
    held_out = tmp_path / "held_out.py"
    data = text.read_bytes()
    held_out.write_bytes(data[len(data) - len(data) // 20 :])
    output, _ = program("examples/gpt/evaluate.py", "--params", out / "params.safetensors", "--data", held_out)
    score = float(re.fullmatch(r"([\d.]+) nats a byte over 1,000 bytes\n", output)[1])
    assert score == pytest.approx(results(out)[0][-1]["val_loss"], abs=1e-4)


def test_no_steps_write_the_initial_parameters(at_first):
    gpt = load()
    lines, parameters = at_first
    config = gpt.model.Config(width=16, layers=1, heads=4, context=16)
    expected = gpt.model.init(gpt.train.px.random.key(0), config)
    pairs, _ = gpt.train.px.tree.flatten_with_path(expected)
    assert len(pairs) == len(parameters)
    for path, leaf in pairs:
        assert parameters[gpt.train.px.tree.path_str(path)].equal(leaf)
    assert [line["step"] for line in lines] == [0]
    assert lines[0].keys() >= RUN


# (processes, options)
MESHES = {
    "model=2": (2, ["--mesh", "data=1,model=2"]),
    "data=2, ZeRO 1": (2, ["--mesh", "data=2", "--zero", 1]),
    "data=2, ZeRO 3": (2, ["--mesh", "data=2", "--zero", 3]),
    "data=2,model=2": (4, ["--mesh", "data=2,model=2"]),
}


@pytest.mark.parametrize("name", MESHES)
def test_the_mesh_changes_neither_initial_parameters_nor_losses(pool, text, alone, at_first, name):
    world, options = MESHES[name]
    initial, losses = pool.run(first_steps, world, [*options, "--data", text, "--steps", STEPS], timeout=240)[0]
    assert initial.keys() == at_first[1].keys()
    assert [path for path, tensor in initial.items() if not tensor.equal(at_first[1][path])] == []
    assert losses == pytest.approx([line["loss"] for line in results(alone[0])[0]], rel=2e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_halves_change_losses_by_their_rounding_and_no_initial_parameter(pool, text, alone, at_first, precision):
    options = ["--mesh", "data=2", "--simulate", "--zero", 3, "--precision", precision]
    initial, losses = pool.run(first_steps, 1, [*options, "--data", text, "--steps", STEPS], timeout=240)[0]
    assert [path for path, tensor in initial.items() if not tensor.equal(at_first[1][path])] == []
    assert losses == pytest.approx([line["loss"] for line in results(alone[0])[0]], rel=5e-3)


def first_steps(arguments):
    """(initial parameters as plain tensors by path, losses), without anything that a run does besides."""
    gpt = load()
    px = gpt.train.px
    o = gpt.train.options([*TINY, *map(str, arguments)])
    config = gpt.model.Config(width=o.width, layers=o.layers, heads=o.heads, context=o.context)
    mesh = gpt.sharding.make_mesh(o.mesh, o.simulate)
    windows = px.data.ByteWindows(gpt.train.texts(o.data)[0], o.context)
    batches = iter(px.data.Loader(windows, o.batch, mesh=mesh, seed=o.seed))
    init, step, _ = gpt.train.make_step(o, config, mesh)
    state = init(px.random.key(o.seed))
    pairs, _ = px.tree.flatten_with_path(px.device_get(state.params))
    losses = []
    for _ in range(o.steps):
        state, values = step(state, next(batches))
        losses.append(float(values["loss"]))
    return {px.tree.path_str(path): leaf for path, leaf in pairs}, losses


@pytest.mark.long
def test_ptrainx_run(text, alone, tmp_path):
    arguments = [*TINY, "--data", text, "--steps", STEPS, "--out", tmp_path / "run"]
    output, _ = program("-m", "ptrainx.cli", "run", "-n", 2, "examples/gpt/train.py", *arguments)
    assert output.count("validation loss") == 1
    lines, reference = results(tmp_path / "run")[0], results(alone[0])[0]
    assert (lines[0]["world"], lines[0]["mesh"]) == (2, {"data": 2})
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in reference], rel=2e-5)
    assert lines[-1]["val_loss"] == pytest.approx(reference[-1]["val_loss"], rel=2e-5)


def test_time_is_up(pool, text, tmp_path):
    pool.run(run, 2, ["--data", text, "--steps", 1000, "--minutes", 1e-6, "--out", tmp_path])
    lines, _ = results(tmp_path)
    assert [line["step"] for line in lines] == [1]
    assert "val_loss" in lines[0]


def test_the_default_text_is_the_standard_library_with_enough_held_out():
    text, held_out = load().train.texts(None)
    assert len(text) > 5_000_000
    assert len(held_out) >= 200_000


def test_a_folder_is_text_too(tmp_path):
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text(f"file {i}" * 10)
    text, held_out = load().train.texts(str(tmp_path))
    assert bytes(text).startswith(b"file 0")
    assert bytes(held_out).endswith(b"file 29")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no/such/file.txt"], r"DataError: there is no file no/such/file.txt"),
        (["--mesh", "data=64"], r"MeshError: .*64[\s\S]*ptrainx run -n 64[\s\S]*simulate=True"),
    ],
)
def test_a_mistake_ends_in_a_message_without_a_traceback(arguments, message):
    _, errors = program("examples/gpt/train.py", *TINY, *arguments, status=1)
    assert re.search(message, errors)
    assert "Traceback" not in errors


def test_an_empty_file_and_an_unknown_backend(pool, text, tmp_path):
    (tmp_path / "empty.txt").touch()
    px = load().train.px
    with pytest.raises(px.errors.DataError, match=r"empty\.txt is empty"):
        load().train.texts(str(tmp_path / "empty.txt"))
    with pytest.raises(px.errors.BackendError, match="'fast'"):
        pool.run(run, 1, ["--data", text, "--backend", "fast", "--out", tmp_path])


class Stopped(Exception):
    """Ends a run in the middle."""


def whole_and_resumed(text, folder):
    """One run to its end; another that is stopped after 5 steps, and started again."""
    gpt = load()
    picture, sample, out_of_time = gpt.train.picture, gpt.train.sample, gpt.train.out_of_time
    steps = iter(range(5))

    def stop(began, minutes):
        if next(steps, None) is None:
            raise Stopped
        return False

    arguments = ["--data", text, "--steps", 8, "--save-every", 2, "--resume", "--out"]
    try:
        gpt.train.picture = gpt.train.sample = lambda *arguments: None
        run([*arguments, folder / "whole"])
        gpt.train.out_of_time = stop
        with pytest.raises(Stopped):
            run([*arguments, folder / "stopped"])
        gpt.train.out_of_time = out_of_time
        run([*arguments, folder / "stopped"])
    finally:
        gpt.train.picture, gpt.train.sample, gpt.train.out_of_time = picture, sample, out_of_time


def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not_stopped(pool, text, tmp_path):
    """`tests/examples/resumes.py` does it with processes that are killed."""
    pool.run(whole_and_resumed, 2, text, tmp_path)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert (whole / "params.safetensors").read_bytes() == (stopped / "params.safetensors").read_bytes()
    lines = [results(out)[0] for out in (whole, stopped)]
    assert [line["step"] for line in lines[1]] == list(range(1, 9))
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    checkpoints = [out / "checkpoints" / "step-000000000008" for out in (whole, stopped)]
    for file in checkpoints[0].iterdir():
        assert file.read_bytes() == (checkpoints[1] / file.name).read_bytes()
    assert sorted(step.name for step in checkpoints[1].parent.iterdir()) == ["step-000000000006", "step-000000000008"]


@pytest.mark.parametrize("arguments", [["--resume"], ["--save-every", "0"]])
def test_options_of_checkpoints_are_checked(arguments):
    with pytest.raises(SystemExit):
        load().train.options(arguments)
