"""The GPT example's parts, each against what it has to be on plain tensors in one process."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import ptrainx as px
from tests.examples.gpt import TINY, load

gpt = load()
CONFIG = gpt.model.Config(width=16, layers=2, heads=4, context=16)


@pytest.fixture(scope="module")
def params():
    return gpt.model.init(px.random.key(0), CONFIG)


def tokens(rows, length, seed=0):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_at_first_every_byte_is_about_as_likely_as_any_other(params):
    loss = gpt.model.mean_loss(params, (tokens(8, 16), tokens(8, 16, seed=1)), CONFIG)
    assert loss.item() == pytest.approx(math.log(256), rel=0.1)


@pytest.mark.parametrize("position", [0, 3, 15])
def test_no_prediction_sees_what_comes_after(params, position):
    before = tokens(2, 16)
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % 256
    same = (gpt.model.logits(params, before, CONFIG) == gpt.model.logits(params, after, CONFIG)).all(-1).all(0)
    assert same.tolist() == [t < position for t in range(16)]


def test_a_short_text_is_predicted_as_the_start_of_a_long_one(params):
    text = tokens(1, 16)
    for length in (1, 2, 7):
        short = gpt.model.logits(params, text[:, :length], CONFIG)
        torch.testing.assert_close(short, gpt.model.logits(params, text, CONFIG)[:, :length])


def test_gradients_are_those_of_finite_differences():
    config = gpt.model.Config(width=8, layers=1, heads=2, context=5)
    params = px.tree.map(torch.Tensor.double, gpt.model.init(px.random.key(1), config))
    batch = tokens(2, 5), tokens(2, 5, seed=1)

    def loss(params):
        return gpt.model.mean_loss(params, batch, config)

    direction = px.tree.map(lambda w: torch.randn(w.shape, dtype=w.dtype), params)
    slope = sum((g * d).sum() for g, d in zip(px.tree.leaves(px.grad(loss)(params)), px.tree.leaves(direction)))
    up, down = (loss(px.tree.map(lambda w, d, h=h: w + h * d, params, direction)) for h in (1e-5, -1e-5))
    torch.testing.assert_close(slope, (up - down) / 2e-5, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sizes", [{"heads": 3}, {"layers": 0}, {"width": -4}])
def test_sizes_that_make_no_model(sizes):
    with pytest.raises(px.errors.InputError, match="no such model"):
        gpt.model.Config(**{"width": 16, "heads": 4, **sizes})


@pytest.mark.parametrize("length", [2, 16, 17, 18, 100, 16 * 8 + 1, 16 * 8 + 2])
def test_windows_hold_every_byte_but_the_first_once(length):
    text = np.random.default_rng(0).integers(1, 256, length).astype(np.uint8)
    inputs, targets, counts = gpt.scoring.windows(text, 16, 4)
    assert len(inputs) % 4 == 0
    chosen = counts.bool()
    assert bytes(targets[chosen].tolist()) == bytes(text[1:])
    assert bytes(inputs[chosen].tolist()) == bytes(text[:-1])


def test_the_score_is_the_mean_over_all_bytes(params):
    text = tokens(1, 700)[0].numpy().astype(np.uint8)
    mesh = px.make_mesh(data=2, simulate=True)
    specs = px.tree.map(lambda _: px.P(), params)
    score = gpt.scoring.make_score(specs, CONFIG, mesh)(px.device_put(params, specs, mesh), text)
    total = 0.0
    for start in range(0, 699, 16):
        window = torch.from_numpy(text[start : start + 17].astype(np.int64))
        log_p = gpt.model.logits(params, window[None, :-1], CONFIG)[0].log_softmax(-1)
        total -= log_p[torch.arange(len(window) - 1), window[1:]].sum().item()
    assert score == pytest.approx(total / 699, rel=1e-6)


def test_one_byte_cannot_be_scored():
    with pytest.raises(px.errors.DataError, match="one byte"):
        gpt.scoring.windows(np.zeros(1, np.uint8), 16, 1)


def test_a_cold_sample_takes_the_likeliest_byte(params):
    written = list(b"\n\n")
    for _ in range(30):
        written.append(int(gpt.model.logits(params, torch.tensor([written[-16:]]), CONFIG)[0, -1].argmax()))
    text = gpt.sampling.generate(params, CONFIG, px.random.key(0), 30, temperature=1e-4)
    assert text == bytes(written[2:])


def test_a_sample_is_fixed_by_its_key(params):
    first, again, other = (gpt.sampling.generate(params, CONFIG, px.random.key(k), 20) for k in (0, 0, 1))
    assert first == again != other


def test_parameters_survive_a_file(params, tmp_path):
    gpt.weights.save(tmp_path / "p.safetensors", params, CONFIG)
    loaded, config = gpt.weights.load(tmp_path / "p.safetensors")
    assert config == CONFIG
    assert px.tree.structure(loaded) == px.tree.structure(params)
    assert all(a.equal(b) for a, b in zip(px.tree.leaves(loaded), px.tree.leaves(params)))


def test_the_file_names_tensors_by_their_paths(params, tmp_path):
    from safetensors.numpy import load_file

    gpt.weights.save(tmp_path / "p.safetensors", params, CONFIG)
    names = load_file(tmp_path / "p.safetensors")
    assert names["blocks/1/down"].shape == (64, 16)
    assert set(names) == {px.tree.path_str(path) for path, _ in px.tree.flatten_with_path(params)[0]}


@pytest.mark.parametrize("content", [None, b"", b"not safetensors" * 10])
def test_a_file_that_holds_no_parameters(tmp_path, content):
    if content is not None:
        (tmp_path / "p").write_bytes(content)
    with pytest.raises(px.errors.DataError, match="holds no parameters"):
        gpt.weights.load(tmp_path / "p")


AXES = {
    "heads": (px.P(None, "model"), ("q", "k", "v")),
    "out of heads": (px.P("model"), ("o",)),
    "hidden": (px.P(None, "model"), ("up",)),
    "out of hidden": (px.P("model"), ("down",)),
    "replicated": (px.P(), ("norm_attention", "norm_mlp")),
}


@pytest.mark.parametrize("kind", AXES)
def test_tensor_parallel_specs(params, kind):
    spec, names = AXES[kind]
    specs = gpt.sharding.tensor_parallel(params, CONFIG, px.AbstractMesh(data=2, model=2))
    assert {name: specs["blocks"][1][name] for name in names} == dict.fromkeys(names, spec)
    assert specs["embed"] == specs["head"] == specs["position"] == px.P()


def test_heads_that_the_axis_does_not_divide_are_replicated(params):
    specs = gpt.sharding.tensor_parallel(params, CONFIG, px.AbstractMesh(data=1, model=8))
    assert specs["blocks"][0]["q"] == px.P()
    assert specs["blocks"][0]["up"] == px.P(None, "model")


def spread(spec, shape, devices):
    value = px.ShapeDtypeStruct(shape, torch.float32)
    return gpt.sharding.spread_over_data(spec, value, px.AbstractMesh(data=devices, model=2))


@pytest.mark.parametrize(
    ("spec", "shape", "devices", "expected"),
    [
        (px.P(), (4, 8), 2, px.P(None, "data")),
        (px.P(None, "model"), (4, 8), 2, px.P("data", "model")),
        (px.P("model"), (8, 4), 2, px.P("model", "data")),
        (px.P(), (3, 8), 4, px.P(None, "data")),
        (px.P(), (3, 5), 2, px.P()),
        (px.P(), (), 2, px.P()),
        (px.P(), (4, 8), 1, px.P()),
    ],
)
def test_one_more_dim_goes_over_data(spec, shape, devices, expected):
    assert spread(spec, shape, devices) == expected


def planned(axes, zero):
    """(what a step sends, bytes of its parameters), worked out without devices."""
    options = gpt.train.options([*TINY, "--zero", str(zero)])
    config = gpt.model.Config(**{f.name: getattr(options, f.name) for f in dataclasses.fields(gpt.model.Config)})
    init, step, _ = gpt.train.make_step(options, config, px.AbstractMesh(axes))
    state = px.eval_shape(init, px.random.key(0))
    batch = (px.ShapeDtypeStruct((8, 16), torch.int64),) * 2
    return step.comms(state, batch), 4 * sum(math.prod(w.shape) for w in px.tree.leaves(state.params))


def sent(comms, kind, axis):
    return sum(c.bytes for c in comms if (c.kind, c.axis) == (kind, axis))


SCALAR = 4  # a loss, or a norm for clipping


def test_data_parallel_reduces_each_gradient_once():
    comms, size = planned({"data": 4}, zero=0)
    assert {c.kind for c in comms} == {"all_reduce"}
    assert sent(comms, "all_reduce", "data") == pytest.approx(2 * 3 / 4 * (size + SCALAR), abs=SCALAR)


@pytest.mark.parametrize("zero", [1, 3])
def test_zero_scatters_gradients_and_gathers_parameters(zero):
    comms, size = planned({"data": 4}, zero)
    assert sent(comms, "reduce_scatter", "data") == sent(comms, "all_gather", "data") == 3 / 4 * size
    assert sent(comms, "all_reduce", "data") <= 2 * 2 * SCALAR


def test_tensor_parallel_sums_activations_twice_a_layer_and_pass():
    comms, _ = planned({"data": 1, "model": 2}, zero=0)
    activations = 8 * 16 * 16 * 4
    assert {(c.kind, c.axis) for c in comms} == {("all_reduce", "model")}
    assert sent(comms, "all_reduce", "model") == pytest.approx(4 * activations, abs=2 * SCALAR)


@pytest.mark.parametrize(("axes", "zero"), [({"data": 2}, 0), ({"data": 2}, 3), ({"data": 2, "model": 2}, 1)])
def test_nothing_but_norms_is_sent_unasked(axes, zero):
    comms, _ = planned(axes, zero)
    # A norm goes over all axes at once.
    assert all(c.asked or c.bytes <= 2 * SCALAR for c in comms), str(comms)


@pytest.mark.parametrize("text", ["model=2", "data=2,rows=2", "data", "data=two", "data=0"])
def test_a_mesh_that_is_none(text):
    with pytest.raises(px.errors.MeshError):
        gpt.sharding.make_mesh(text, simulate=True)
