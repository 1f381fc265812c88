"""Text as bytes: reading, the standard library as a data set, windows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ptrainx.core.errors import DataError, InputError
from ptrainx.data import ByteWindows, python_stdlib_files, read_bytes


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {
        "z.txt": "last",
        "a.txt": "first",
        "b/m.py": "middle",
        "b/empty.txt": "",
        ".hidden": "no",
        ".git/x.txt": "no",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_file_is_read_as_it_is(folder):
    data = read_bytes(folder / "a.txt")
    assert data.dtype == np.uint8
    assert data.tobytes() == b"first"
    assert read_bytes(str(folder / "a.txt")).tobytes() == b"first"


@pytest.mark.parametrize(
    ("suffix", "text"), [(None, b"first\n\nmiddle\n\nlast"), (".txt", b"first\n\nlast"), (".py", b"middle")]
)
def test_a_folder_is_read_in_the_order_of_its_paths_without_what_is_hidden_or_empty(folder, suffix, text):
    assert read_bytes(folder, suffix).tobytes() == text


def test_a_list_of_files_is_read_in_its_own_order(folder):
    assert read_bytes([folder / "z.txt", folder / "a.txt"]).tobytes() == b"last\n\nfirst"


@pytest.mark.parametrize(
    ("path", "suffix", "message"),
    [
        ("missing.txt", None, r"there is no file .*missing\.txt\n(.|\n)*fix: .*check the path"),
        ("", ".md", r"holds no file with suffix '\.md'\n.*suffixes .*\.py, \.txt\n.*fix:"),
        ("b/empty.txt", None, r"empty\.txt is empty\n(.|\n)*fix:"),
        ("nothing", None, r"nothing holds no file\n.*an empty folder\n"),
    ],
)
def test_missing_and_empty_text_is_refused_with_what_to_do(folder, path, suffix, message):
    (folder / "nothing").mkdir()
    with pytest.raises(DataError, match=message):
        read_bytes(folder / path, suffix)


def test_a_relative_path_that_is_missing_tells_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"there is no file data.txt\n.*working directory {tmp_path}"):
        read_bytes("data.txt")


def test_a_list_of_no_files_and_of_empty_files_is_refused(tmp_path):
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.touch()
    with pytest.raises(DataError, match="was given no files"):
        read_bytes([])
    with pytest.raises(DataError, match=r"all 2 files, such as .*a, are empty"):
        read_bytes(files)


def test_the_standard_library_is_split_as_documented():
    library = Path(os.__file__).parent
    barred = {"encodings", "idlelib", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    expected = sorted(f.relative_to(library).as_posix() for f in library.glob("**/*.py"))
    expected = [name for name in expected if not barred & set(name.split("/")[:-1])]
    train, held_out = python_stdlib_files()
    assert [f.relative_to(library).as_posix() for f in held_out] == expected[19::20]
    assert sorted([*train, *held_out], key=lambda f: f.relative_to(library).as_posix()) == [
        library / n for n in expected
    ]
    assert {"os.py", "json/decoder.py", "unittest/case.py"} <= set(expected)
    assert python_stdlib_files() == (train, held_out)


def test_enough_of_the_standard_library_is_held_out():
    train, held_out = python_stdlib_files()
    assert len(read_bytes(held_out)) >= 200_000
    assert len(read_bytes(train)) >= 5_000_000
    assert not set(train) & set(held_out)


def test_a_python_without_its_source_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"without the source of its standard library\n(.|\n)*text of your own"):
        python_stdlib_files()


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (4, 1), (4, 3), (4, 4), (9, 2), (99, 1)])
def test_windows_are_the_bytes_and_the_bytes_after_them(length, stride):
    data = np.random.default_rng(0).integers(0, 256, 100, dtype=np.uint8)
    windows = ByteWindows(data, length, stride)
    starts = list(range(0, len(data) - length, stride))
    assert len(windows) == len(starts)
    for i, start in enumerate(starts):
        inputs, targets = windows[i]
        assert inputs.dtype == targets.dtype == np.int64
        assert inputs.tolist() == list(data[start : start + length])
        assert targets.tolist() == list(data[start + 1 : start + 1 + length])


def test_windows_are_read_many_at_once():
    windows = ByteWindows(np.arange(50, dtype=np.uint8), 5)
    wanted = np.array([3, 0, 44, 3])
    for inputs, targets in (windows[wanted], windows.read_samples(wanted)):
        assert np.array_equal(inputs, np.stack([windows[i][0] for i in wanted]))
        assert np.array_equal(targets, inputs + 1)
    assert windows[2:4][0].shape == (2, 5)
    with pytest.raises(IndexError):
        windows[46]


def test_windows_of_a_memmap_do_not_load_it(tmp_path):
    np.arange(200, dtype=np.uint8).tofile(tmp_path / "x.bin")
    windows = ByteWindows(np.memmap(tmp_path / "x.bin", np.uint8, "r"), 8)
    assert windows[7][0].tolist() == list(range(7, 15))


@pytest.mark.parametrize(
    ("data", "length", "error", "message"),
    [
        (np.zeros(5, np.uint8), 5, DataError, r"too short for a window of 5 bytes.*\n.*5 bytes\n.*at least 6"),
        (np.zeros(5, np.int64), 2, DataError, r"takes a vector of bytes\n.*int64 \[5\]"),
        (np.zeros((5, 5), np.uint8), 2, DataError, r"takes a vector of bytes\n.*uint8 \[5, 5\]"),
        (b"hello", 2, DataError, r"takes a vector of bytes\n.*got: +bytes\n(.|\n)*np\.frombuffer"),
        (np.zeros(5, np.uint8), 0, InputError, "length=0"),
    ],
)
def test_windows_that_can_not_be_are_refused(data, length, error, message):
    with pytest.raises(error, match=message):
        ByteWindows(data, length)
