"""Mutated manifests, commit records and headers that vouch for themselves: refused, or read, and nothing else.

Each mutation is restored from and verified. No other error than a `CheckpointError` comes out, in bounded time, with no
more memory than the files and `like` account for, and nothing outside the step's folder is opened.

    python -m tests.checkpoint.mutations 20000
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import signal
import struct
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import ptrainx as px
from ptrainx import P
from ptrainx.checkpoint import restore, save
from ptrainx.checkpoint.files import watch
from ptrainx.checkpoint.read import OpenStep
from ptrainx.errors import CheckpointError

__all__ = ["forge", "run", "set_at"]

MEMORY = 1 << 20
"""Bytes that reading a checkpoint of a few kilobytes may take at most."""
SECONDS = 5
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-2, 9) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64, 10**400, 16, 4 << 20, 1 << 30])
NAMES = st.sampled_from(["../x", "/etc/passwd", "rank-00001.safetensors", "commit.json", "..", "", "a\0b", "object"])
VALUES = ANYTHING | NUMBERS | NAMES | st.lists(NUMBERS, min_size=1, max_size=3)


def forge(path: Path, record: Any) -> None:
    """Writes a manifest with a commit record that vouches for it."""
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    (path / "manifest.json").write_bytes(data)
    commit = json.loads((path / "commit.json").read_bytes())
    commit["manifest"] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "commit.json").write_text(json.dumps(commit))


def set_at(record: Any, place: tuple[Any, ...], value: Any) -> None:
    """Puts a value at a place of a record."""
    *outer, last = place
    for key in outer:
        record = record[key]
    record[last] = value


def places(record: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a record."""
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(record: Any, data: Any) -> Any:
    """The record with one to three places set to anything, taken out, or doubled."""
    record = copy.deepcopy(record)
    for place in data.draw(st.lists(st.sampled_from(list(places(record))), min_size=1, max_size=3)):
        *outer, last = place
        try:
            held: Any = record
            for key in outer:
                held = held[key]
            how = data.draw(st.sampled_from(["set", "set", "set", "drop", "double"]))
            if how == "set":
                held[last] = data.draw(VALUES)
            elif how == "drop":
                del held[last]
            elif isinstance(held, list):
                held.append(held[last])
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken the place away
    return record


def spoiled(text: bytes, data: Any) -> bytes:
    """Bytes with a run of them replaced."""
    at = data.draw(st.integers(0, len(text)))
    return text[:at] + data.draw(st.binary(max_size=6)) + text[at + data.draw(st.integers(0, 6)) :]


class Victim:
    """A small checkpoint of two files that is mutated over and over."""

    def __init__(self, folder: Path):
        mesh = px.make_mesh(data=2, simulate=True)
        self.like = {"w": torch.ones(4, 2), "n": 3, "l": [torch.ones(2)]}
        tree = {**self.like, "w": px.device_put(self.like["w"], P("data"), mesh)}
        self.path = save(folder, tree, 1)
        self.whole = {file.name: file.read_bytes() for file in self.path.iterdir()}
        self.manifest = json.loads(self.whole["manifest.json"])
        self.commit = json.loads(self.whole["commit.json"])

    def mutate(self, data: Any) -> None:
        """Makes one mutation."""
        for name, content in self.whole.items():
            (self.path / name).write_bytes(content)
        KINDS[data.draw(st.sampled_from(sorted(KINDS)))](self, data)

    def _manifest(self, data: Any) -> None:
        forge(self.path, changed(self.manifest, data))

    def _text(self, data: Any) -> None:
        forge(self.path, spoiled(self.whole["manifest.json"], data))

    def _commit(self, data: Any) -> None:
        (self.path / "commit.json").write_text(json.dumps(changed(self.commit, data)))

    def _header(self, data: Any) -> None:
        """A header that is other JSON, or no JSON, of any length; lengths and checksum in the manifest fit it."""
        about = data.draw(st.sampled_from([0, 1]))
        record = copy.deepcopy(self.manifest)
        file = record["files"][about]
        old = self.whole[file["name"]]
        text = old[8 : file["header_bytes"]]
        if data.draw(st.booleans()):
            text = json.dumps(
                data.draw(ANYTHING) if data.draw(st.booleans()) else changed(json.loads(text), data)
            ).encode()
        else:
            text = spoiled(text, data)
        size = data.draw(st.just(len(text)) | NUMBERS.map(lambda n: n % 2**64))
        head = struct.pack("<Q", size) + text
        grown = len(head) - file["header_bytes"]
        (self.path / file["name"]).write_bytes(head + old[file["header_bytes"] :])
        file["bytes"] += grown
        file["header_bytes"] += grown
        file["header_crc32"] = zlib.crc32(head)
        for chunk in (chunk for tensor in record["tensors"] for chunk in tensor["chunks"]):
            chunk["begin"] += grown * (chunk["file"] == about)
        forge(self.path, record)

    def read(self) -> bool:
        """Restores and verifies; whether a tree came out."""
        opened: list[str] = []
        tracemalloc.start()
        signal.alarm(SECONDS)
        try:
            with watch(lambda event: opened.append(event.path)):
                whole = self._restored()
                self._verified()
        finally:
            signal.alarm(0)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < MEMORY, f"{peak:,} bytes"
        assert all(Path(path).parent == self.path for path in opened), opened
        return whole

    def _restored(self) -> bool:
        try:
            found = restore(self.path, self.like)
        except CheckpointError:
            return False
        assert found["w"].shape == (4, 2)
        assert found["l"][0].shape == (2,)
        return True

    def _verified(self) -> None:
        try:
            with OpenStep(self.path, 1) as step:
                list(step.problems())
        except CheckpointError:
            pass


KINDS: dict[str, Callable[[Victim, Any], None]] = {
    "manifest": Victim._manifest,
    "text": Victim._text,
    "commit": Victim._commit,
    "header": Victim._header,
}


def run(times: int, start: int = 0) -> int:
    """So many mutations, drawn from a seed; returns how many of them could be read all the same."""
    read = 0

    def stop(signum: int, frame: object) -> None:
        raise AssertionError(f"a mutation was not read in {SECONDS} s")

    with tempfile.TemporaryDirectory() as folder:
        victim = Victim(Path(folder))

        @seed(start)
        @settings(max_examples=times, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(data=st.data())
        def mutated(data: Any) -> None:
            nonlocal read
            victim.mutate(data)
            read += victim.read()

        before = signal.signal(signal.SIGALRM, stop)
        try:
            mutated()
        finally:
            signal.signal(signal.SIGALRM, before)
    return read


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("times", type=int, nargs="?", default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    readable = run(chosen.times, chosen.seed)
    print(f"{chosen.times} mutations: {readable} could be read, the others were refused")
