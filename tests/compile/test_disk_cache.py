"""Compiled code on disk: found by the next process, safe against damage, other versions and writers at one time."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ptrainx as px
from ptrainx.compile import disk_cache, inductor
from ptrainx.compile.disk_cache import CacheFolderWarning, DiskCache, open_cache
from ptrainx.core import flags
from tests.support.pool import Pool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache")


def test_what_is_written_is_read(cache: DiskCache) -> None:
    assert cache.read("kind", "key") is None
    cache.write("kind", "key", b"value")
    cache.write("kind", "other", b"")
    assert cache.read("kind", "key") == b"value"
    assert cache.read("kind", "other") == b""
    assert DiskCache(cache.folder).read("kind", "key") == b"value"
    assert (cache.hits, cache.misses, cache.writes) == (2, 1, 2)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_entry_is_as_good_as_missing(cache: DiskCache, damage: str) -> None:
    cache.write("kind", "key", b"value" * 100)
    file = cache.folder / "kind" / "key"
    data = file.read_bytes()
    file.write_bytes(
        {"cut": data[:-7], "flip": data[:-1] + bytes([data[-1] ^ 1]), "empty": b"", "other": b"value"}[damage]
    )
    assert cache.read("kind", "key") is None
    cache.write("kind", "key", b"again")
    assert cache.read("kind", "key") == b"again"


WRITER = """
import sys
from pathlib import Path
from ptrainx.compile.disk_cache import DiskCache
cache, letter = DiskCache(Path(sys.argv[1])), sys.argv[2].encode()
print("ready", flush=True)
sys.stdin.readline()
for n in range(400):
    cache.write("kind", "key", letter * (1000 + n))
    body = cache.read("kind", "key")
    assert body is not None and len(set(body)) == 1 and len(body) >= 1000, body and body[:20]
print("done", cache.writes)
"""


def test_two_processes_write_one_entry_at_a_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "cache")]
    both = [
        subprocess.Popen([*command, letter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for letter in "ab"
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = []
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        outputs.append(process.communicate(timeout=120)[0])
    assert outputs == ["done 400\n"] * 2
    assert [file.name for file in (tmp_path / "cache" / "kind").iterdir()] == ["key"], "no temporary file is left"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTRAINX_CACHE_DIR", str(tmp_path / "a" / "b"))
    cache = open_cache()
    cache.write("kind", "key", b"")
    assert cache.folder == tmp_path / "a" / "b"
    assert {mode(cache.folder), mode(cache.folder / "kind")} == {0o700}


def test_the_folder_is_the_users_own_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PTRAINX_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert flags.cache_dir() == tmp_path / ".cache" / "ptrainx"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert flags.cache_dir() == tmp_path / "x" / "ptrainx"
    monkeypatch.setenv("PTRAINX_CACHE_DIR", "~/y")
    assert flags.cache_dir() == tmp_path / "y"


@pytest.mark.parametrize("problem", ["writable", "file", "foreign"])
def test_a_folder_that_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    folder = tmp_path / "cache"
    if problem == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        os.chmod(folder, 0o777 if problem == "writable" else 0o700)
    if problem == "foreign":
        monkeypatch.setattr(disk_cache.os, "getuid", lambda: 12345)
    monkeypatch.setenv("PTRAINX_CACHE_DIR", str(folder))
    with pytest.warns(CacheFolderWarning, match="PTRAINX_CACHE_DIR"):
        cache = open_cache()
    monkeypatch.undo()
    assert cache.folder != folder
    assert mode(cache.folder) == 0o700
    cache.write("kind", "key", b"value")
    assert cache.read("kind", "key") == b"value"


PROGRAM = """
import json, sys, torch, ptrainx as px
scale = float(sys.argv[1])
def fn(x):
    return (x * scale + 2).tanh(), (x - scale).exp().sum(0)
step = px.jit(fn, mesh=px.make_mesh(data=1), backend="inductor")
x = torch.arange(12.0).view(3, 4) / 12
a, b = px.device_get(step(x))
torch.testing.assert_close(a, (x * scale + 2).tanh())
torch.testing.assert_close(b, (x - scale).exp().sum(0))
(compiled,) = step._cache.values()
report = compiled.kernels().regions
numbers = [report.regions, report.compiled, report.from_disk, report.failed]
print(json.dumps([*numbers, "torch._inductor.compile_fx" in sys.modules]))
"""


def start(folder: Path, scale: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning:ptrainx", "-c", PROGRAM, str(scale)],
        env={**os.environ, "PTRAINX_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def result_of(process: subprocess.Popen[str]) -> list[int]:
    """[regions, compiled, from the cache folder, failed, whether Inductor was imported]."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which one process has compiled."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    assert result_of(start(folder, 0.5)) == [1, 1, 0, 0, True]
    return folder


@pytest.mark.long
def test_a_second_process_finds_what_the_first_has_compiled(filled: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in filled.rglob("*.so")}
    assert result_of(start(filled, 0.5)) == [1, 0, 1, 0, False]  # and does not even import Inductor
    assert {file: file.stat().st_mtime_ns for file in filled.rglob("*.so")} == before


@pytest.mark.long
def test_everything_lies_in_the_private_folder(filled: Path) -> None:
    assert mode(filled) == 0o700
    assert {path.name for path in filled.iterdir()} == {"inductor", "regions"}
    assert list((filled / "inductor").rglob("*.so"))


def compiled_by_a_rank(folder: str, scale: float) -> tuple[int, int]:
    """(regions that are from the cache folder, that failed): ranks 0 and 1 compile at a time, rank 2 after them."""
    os.environ["PTRAINX_CACHE_DIR"] = folder
    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        dist.barrier()
    step = px.jit(lambda x: (x * scale + 2).tanh(), mesh=px.make_mesh(data=1, simulate=True), backend="inductor")
    x = torch.arange(12.0)
    torch.testing.assert_close(px.device_get(step(x)), (x * scale + 2).tanh())
    (compiled,) = step._cache.values()
    if dist.get_rank() != 2:
        dist.barrier()
    report = compiled.kernels().regions
    return report.from_disk, report.failed


@pytest.mark.long
def test_two_processes_compile_one_program_at_a_time(filled: Path, pool: Pool) -> None:
    *both, third = pool.run(compiled_by_a_rank, 3, str(filled), 0.7519, timeout=300)
    assert [failed for _, failed in both] == [0, 0]
    assert third == (1, 0)


@pytest.mark.long
@pytest.mark.long
def test_machine_code_that_has_changed_is_made_again(filled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(filled, folder)
    for entry in (folder / "regions").iterdir():
        alone, _ = pickle.loads(DiskCache(folder).read("regions", entry.name) or b"")
        for _, library, _ in json.loads(alone)["kernels"].values():
            (folder / "inductor" / library).write_bytes(b"damaged")
    assert result_of(start(folder, 0.5)) == [1, 0, 1, 0, True]


@contextlib.contextmanager
def counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A program compiled in this process, as if for the first time; gives its report."""
    monkeypatch.setenv("PTRAINX_CACHE_DIR", str(folder))
    known = dict(inductor._known)
    inductor._known.clear()
    step = px.jit(lambda x: ((x * 3.5).sin() + x).cos(), mesh=px.make_mesh(data=1), backend="inductor")
    x = torch.arange(6.0)
    torch.testing.assert_close(px.device_get(step(x)), ((x * 3.5).sin() + x).cos())
    (compiled,) = step._cache.values()
    yield [compiled.kernels().regions]
    inductor._known.update(known)


def compiled_now(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    with counted(folder, monkeypatch) as (report,):
        return report.compiled, report.from_disk


@pytest.mark.long
def test_another_version_of_the_code_or_of_torch_misses(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_now(filled, monkeypatch) == (1, 0)
    assert compiled_now(filled, monkeypatch) == (0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(inductor, "code_version", lambda: "another")
        assert compiled_now(filled, patch) == (1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        assert compiled_now(filled, patch) == (1, 0)
    assert compiled_now(filled, monkeypatch) == (0, 1)


@pytest.mark.long
def test_a_damaged_region_is_compiled_again(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_now(filled, monkeypatch)
    for file in (filled / "regions").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    assert compiled_now(filled, monkeypatch) == (1, 0)
    assert compiled_now(filled, monkeypatch) == (0, 1)
