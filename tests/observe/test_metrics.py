"""Metrics: one JSON object a line, on disk at once, from rank 0 alone."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from ptrainx import P, device_put, initialize, make_mesh
from ptrainx.errors import DataError, InputError
from ptrainx.observe import MetricsWriter, read_metrics, rss_mib


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (0.1, 0.1),
        (True, True),
        (None, None),
        ("data", "data"),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(7), 7),
        (np.float32(0.25), 0.25),
        (np.array(4), 4),
        (math.nan, None),
        (math.inf, None),
        (torch.tensor(-math.inf), None),
        ([1, torch.tensor(2.0)], [1, 2.0]),
        ({"data": 2, "model": np.int64(1)}, {"data": 2, "model": 1}),
    ],
)
def test_a_value_is_written_as_json(tmp_path, value, expected):
    with MetricsWriter(tmp_path / "m.jsonl") as metrics:
        metrics.write({"x": value})
    line = (tmp_path / "m.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"x": expected}


def test_each_record_is_a_line_and_on_disk_at_once(tmp_path):
    path = tmp_path / "new" / "folder" / "m.jsonl"
    with MetricsWriter(path) as metrics:
        for step in range(3):
            metrics.write({"step": step})
            assert path.read_text().splitlines()[step:] == [f'{{"step": {step}}}']


def test_an_earlier_run_is_replaced(tmp_path):
    for step in (1, 2):
        with MetricsWriter(tmp_path / "m.jsonl") as metrics:
            metrics.write({"step": step})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 2}]


@pytest.mark.parametrize(("value", "name"), [(torch.ones(2), "x"), ({"y": object()}, "x.y"), ([np.ones(3)], r"x\[0\]")])
def test_what_json_cannot_hold_is_refused_by_name(tmp_path, value, name):
    with MetricsWriter(tmp_path / "m.jsonl") as metrics, pytest.raises(InputError, match=name):
        metrics.write({"x": value})


def test_a_placed_value_is_refused(tmp_path):
    value = device_put(torch.ones(2), P("data"), make_mesh(data=2, simulate=True))
    with MetricsWriter(tmp_path / "m.jsonl") as metrics, pytest.raises(InputError, match="device_get"):
        metrics.write({"x": value})


def test_a_closed_writer_says_so(tmp_path):
    metrics = MetricsWriter(tmp_path / "m.jsonl")
    metrics.close()
    with pytest.raises(InputError, match="closed"):
        metrics.write({"x": 1})


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't be written"):
        MetricsWriter(tmp_path / "file" / "m.jsonl")


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1}]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no records"), ("[1]\n", "line 1 .* no JSON object"), ("{}\nx\n{}\n", "line 2 .* no JSON"), ("{", "line 1")],
)
def test_a_malformed_file(tmp_path, text, message):
    (tmp_path / "m.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read_metrics(tmp_path / "m.jsonl")


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="can't be read"):
        read_metrics(tmp_path / "m.jsonl")


def write_on_every_rank(path):
    rank = initialize().rank
    with MetricsWriter(path) as metrics:
        metrics.write({"rank": rank})


@pytest.mark.processes
def test_only_rank_0_writes(pool, tmp_path):
    pool.run(write_on_every_rank, 2, str(tmp_path / "m.jsonl"))
    assert read_metrics(tmp_path / "m.jsonl") == [{"rank": 0}]


def test_resident_memory_grows_with_what_is_held():
    before = rss_mib()
    held = np.ones(64 * 2**20 // 8)
    assert 50 < rss_mib() - before < 100
    assert held[0] == 1
