"""Checkpoints that are not as they were written: found before a value is given; the step before is read, loudly."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import Manager, restore, save
from ptrainx.checkpoint.files import FileEvent, ReadFolder, watch
from ptrainx.checkpoint.manifest_reader import parse_manifest, read_manifest
from ptrainx.errors import CheckpointDamageError, CheckpointError
from tests.checkpoint.damage import run

W = torch.arange(6.0)


def spoil(path, name, change):
    file = path / name
    file.write_bytes(change(file.read_bytes()))


def test_flipped_bits_and_cut_files_are_found():
    assert run(60) == 60


def test_a_damaged_newest_step_gives_way_to_the_one_before(tmp_path):
    manager = Manager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, {"w": W * step})
    spoil(tmp_path / "step-000000000003", "rank-00000.safetensors", lambda data: data[:-1] + b"\x01")
    spoil(tmp_path / "step-000000000002", "manifest.json", lambda data: data.replace(b"w", b"v"))
    with pytest.warns(RuntimeWarning) as told:
        found = manager.restore(like={"w": W})
    assert found["w"].equal(W)
    first, second = (str(warning.message) for warning in told)
    assert re.match(r"step 3: .*rank-00000.safetensors: a block is not as it was written.* in 0\[0:6\]", first)
    assert re.match(r"step 2: .*manifest.json is damaged: it is not the one that was committed", second)
    with pytest.raises(CheckpointDamageError, match="a block is not as it was written"):
        manager.restore(3, like={"w": W})
    spoil(tmp_path / "step-000000000001", "commit.json", lambda data: b"{}")
    with (
        pytest.raises(CheckpointDamageError, match=r"(?s)no step that is as it was written.*step 3.*step 2.*step 1"),
        pytest.warns(),
    ):
        manager.restore(like={"w": W})


def test_a_damaged_step_makes_way_when_it_is_saved_again(tmp_path):
    save(tmp_path, {"w": W}, 1)
    spoil(tmp_path / "step-000000000001", "rank-00000.safetensors", lambda data: data[:-1] + b"\x01")
    with pytest.warns(RuntimeWarning, match="step 1 is there but damaged"):
        save(tmp_path, {"w": W + 1}, 1)
    assert restore(tmp_path, like={"w": W})["w"].equal(W + 1)
    assert len(list(tmp_path.glob("damaged-step-000000000001-*"))) == 1


@pytest.mark.parametrize("name", ["commit.json", "manifest.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "missing"])
def test_only_regular_files_of_the_folder_are_opened(tmp_path, name, kind):
    path = save(tmp_path / "run", {"w": W}, 1)
    outside = tmp_path / name
    (path / name).rename(outside)
    if kind == "link":
        (path / name).symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "folder":
        (path / name).mkdir()
    with pytest.raises(CheckpointDamageError, match=re.escape(f"{path / name} ")):
        restore(path, like={"w": W})


def test_a_link_to_a_step_is_no_step(tmp_path):
    real = save(tmp_path / "elsewhere", {"w": W}, 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000000000001").symlink_to(real)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        restore(tmp_path / "run", like={"w": W})


def test_a_later_version_is_told_as_such(tmp_path):
    path = save(tmp_path, {"w": W}, 1)
    spoil(path, "commit.json", lambda data: data.replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(CheckpointError, match="later version of the format"):
        restore(tmp_path, like={"w": W})


def forge(path, record):
    """Writes a manifest with a commit record that vouches for it."""
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    (path / "manifest.json").write_bytes(data)
    commit = json.loads((path / "commit.json").read_bytes())
    commit["manifest"] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "commit.json").write_text(json.dumps(commit))


def set_at(record, place, value):
    *outer, last = place
    for key in outer:
        record = record[key]
    record[last] = value


CHUNK = ("tensors", 0, "chunks", 0)
HOSTILE = {
    "a name that leads out": (("files", 0, "name"), "../../etc/passwd", "not called"),
    "an absolute name": (("files", 0, "name"), "/etc/passwd", "not called"),
    "a huge file": (("files", 0, "bytes"), 1 << 60, "not filled"),
    "a huge header": (("files", 0, "header_bytes"), 1 << 40, "shorter than its header"),
    "a huge shape": (("tensors", 0, "shape"), [1 << 60, 1 << 60], "too large"),
    "a shape of many dims": (("tensors", 0, "shape"), [1] * 100, "more than 64"),
    "a negative size": (("tensors", 0, "shape"), [-2], "no integer"),
    "a float": (("tensors", 0, "shape"), [6.0], "no integer"),
    "a bool": (("tensors", 0, "shape"), [True], "no integer"),
    "an unknown dtype": (("tensors", 0, "dtype"), "object", "not known"),
    "a chunk outside": ((*CHUNK, "offset"), [3], "does not lie within"),
    "a chunk too few": (("tensors", 0, "chunks"), [], "0 of 6 elements"),
    "a begin outside": ((*CHUNK, "begin"), 1 << 50, "don't fit"),
    "an unknown file": ((*CHUNK, "file"), 7, "no integer from 0 to 0"),
    "checksums too many": ((*CHUNK, "crc32"), [1, 2, 3], "more than 1"),
    "checksums too few": ((*CHUNK, "crc32"), [], "not as many checksums"),
    "tiny blocks": (("block_bytes",), 0, "multiple of 16"),
    "a tensor that is not there": (("leaves", 0, "tensor"), 4, "no integer from 0 to 0"),
    "an unknown kind": (("leaves", 0, "kind"), "pickle", "not known"),
    "a path that is none": (("leaves", 0, "path"), [["key"]], "path"),
    "a very deep path": (("leaves", 0, "path"), [["index", 0]] * 1000, "at most 256"),
    "another step": (("step",), 2, "another step"),
    "a metric that is none": (("metric",), "x", "metric"),
    "a metric that no float holds": (("metric",), 10**400, "metric"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_forged_manifest_is_refused(tmp_path, case):
    place, value, text = HOSTILE[case]
    path = save(tmp_path, {"w": W}, 1)
    record = json.loads((path / "manifest.json").read_bytes())
    set_at(record, place, value)
    forge(path, record)
    opened = []
    with watch(lambda event: opened.append(event.path)), pytest.raises(CheckpointDamageError, match=text):
        restore(path, like={"w": W})
    assert set(opened) <= {str(path / "commit.json"), str(path / "manifest.json")}


@pytest.mark.parametrize(
    "data", [b"", b"[" * 100_000, b"{}", b"[]", b'{"step":1,"step":1}', b"\xff", b"NaN", b"1" * 5000]
)
def test_a_manifest_that_is_none_is_refused(tmp_path, data):
    path = save(tmp_path, {"w": W}, 1)
    forge(path, data)
    with pytest.raises(CheckpointDamageError, match=r"manifest.json is damaged"):
        restore(path, like={"w": W})


def test_chunks_that_overlap_are_refused(tmp_path):
    mesh = px.make_mesh(data=4, simulate=True)
    path = save(tmp_path, px.device_put({"w": torch.arange(16.0).reshape(4, 4)}, P("data"), mesh), 1)
    record = json.loads((path / "manifest.json").read_bytes())
    record["tensors"][0]["chunks"][1]["offset"] = [0, 0]
    forge(path, record)
    with pytest.raises(CheckpointDamageError, match="overlap"):
        restore(path, like={"w": torch.zeros(4, 4)})


def record_of(path):
    with ReadFolder(path) as folder:
        read_manifest(folder, 1)
    return json.loads((path / "manifest.json").read_bytes())


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    mesh = px.make_mesh(data=2, simulate=True)
    tree = {"w": px.device_put(torch.ones(4, 2), P("data"), mesh), "n": 3, "l": [torch.ones(2)]}
    return record_of(save(tmp_path_factory.mktemp("real"), tree, 1))


def places(record, at=()):
    """Every place in a record."""
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-2, 9) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(data=st.data())
def test_a_changed_manifest_is_refused_or_read_and_nothing_else(real, data):
    """Anything anywhere in a manifest: a ValueError, or a manifest whose parts fit; no other error."""
    record = copy.deepcopy(real)
    for place in data.draw(st.lists(st.sampled_from(list(places(real))), min_size=1, max_size=2)):
        try:
            set_at(record, place, data.draw(ANYTHING))
        except (KeyError, IndexError, TypeError):
            continue
    try:
        manifest = parse_manifest(json.dumps(record).encode(), 1)
    except (ValueError, RecursionError, CheckpointError):  # the last of a later version
        return
    for tensor in manifest.tensors:
        assert sum(chunk.box.size for chunk in tensor.chunks) == torch.Size(tensor.shape).numel()


def bytes_read(read):
    """Bytes of tensors that are read, over all files, headers apart."""
    seen: list[FileEvent] = []
    with watch(seen.append):
        read()
    return sum(event.size for event in seen if event.kind == "read" and event.offset and "rank-" in event.path)


def test_only_the_blocks_that_are_needed_are_read(tmp_path):
    """Of a matrix of 32 MiB in blocks of 4: rows are read as rows; a column needs every block."""
    mesh = px.make_mesh(data=2, simulate=True)
    whole = torch.arange(1 << 23, dtype=torch.float32).reshape(1024, 8192)
    save(tmp_path, {"w": px.device_put(whole, P("data"), mesh), "x": torch.ones(1000)}, 1)
    like = {"w": whole, "x": torch.ones(1000)}
    assert bytes_read(lambda: restore(tmp_path, like=like)) == (32 << 20) + 4000
    assert bytes_read(lambda: restore(tmp_path, like={"x": like["x"]}, partial=True)) == 4000
