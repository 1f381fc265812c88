"""The picture of a loss."""

from __future__ import annotations

import sys

import matplotlib.image
import numpy as np
import pytest

from ptrainx.errors import BackendError, DataError
from ptrainx.observe import MetricsWriter, plot_loss
from ptrainx.observe.plot import smoothed


@pytest.fixture
def metrics(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 101):
            writer.write({"step": step, "loss": 5 / step**0.5, **({"val_loss": 0.6} if step % 50 == 0 else {})})
    return writer.path


def test_the_picture_lies_beside_the_metrics_and_has_both_curves(metrics):
    path = plot_loss(metrics, unit="nats a byte")
    assert path == metrics.parent / "loss.png"
    pixels = matplotlib.image.imread(path)[..., :3].reshape(-1, 3)
    for colour in ("#1f77b4", "#ff7f0e"):
        wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels - wanted).max(1) < 0.02).sum() > 100


def test_another_place_and_format(metrics, tmp_path):
    path = plot_loss(metrics, tmp_path / "other.svg")
    assert "<svg" in path.read_text()


@pytest.mark.parametrize("record", [{"step": 1, "loss": 3.0}, {"step": 0, "val_loss": 5.0}])
def test_one_point_is_enough(tmp_path, record):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(record)
    assert plot_loss(writer.path).stat().st_size > 1000


def test_no_loss_in_the_records(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write({"step": 1, "loss": float("nan")})
    with pytest.raises(DataError, match="no record"):
        plot_loss(writer.path)


def test_without_matplotlib_the_extra_is_named(metrics, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendError, match=r"pip install 'ptrainx\[plot\]'"):
        plot_loss(metrics)


@pytest.mark.parametrize("reach", [0, 1, 7, 100])
def test_smoothing_averages_over_both_sides(reach):
    values = np.random.default_rng(0).normal(size=40)
    expected = [values[max(0, i - reach) : i + reach + 1].mean() for i in range(40)]
    assert smoothed(list(values), reach) == pytest.approx(expected)
    assert smoothed([], reach) == []
