"""Text as bytes: files and folders in, one uint8 array out, and windows of it as samples for a language model.

The default data set is at hand wherever Python is: the source of its own standard library.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ptrainx.core.errors import DataError, InputError

__all__ = ["SEPARATOR", "ByteWindows", "python_stdlib_files", "read_bytes"]

SEPARATOR = b"\n\n"
"""What stands between two files: blank lines, so that the whole stays text and a prompt of them asks for a new file."""

_NOT_LIBRARY = {"encodings", "idlelib", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT_EVERY = 20


def read_bytes(path: str | os.PathLike | Sequence[str | os.PathLike], suffix: str | None = None) -> np.ndarray:
    """Reads a file, all files of a folder, or a list of files.

    Args:
        path: a file; a folder, read with its subfolders in the order of the relative paths, without what is hidden (a
            leading dot); or a sequence of files, in its own order.
        suffix: of a folder, only files with names that end so, such as ".py".

    Returns:
        uint8 [number of bytes], files joined by `SEPARATOR`; empty files are left out.

    Raises:
        DataError: a path is missing or can't be read, no file matches, or there is nothing in them.

    >>> len(read_bytes(os.__file__)) == os.path.getsize(os.__file__)
    True
    """
    if isinstance(path, (str, os.PathLike)):
        root = Path(path)
        files = _files_of(root, suffix) if root.is_dir() else [root]
    else:
        files = [Path(p) for p in path]
    if not files:
        raise DataError("read_bytes was given no files", got=repr(path), fix="pass a file, a folder or a list of files")
    texts = [text for text in map(_read, files) if text]
    if not texts:
        what = f"{files[0]} is" if len(files) == 1 else f"all {len(files)} files, such as {files[0]}, are"
        raise DataError(f"{what} empty", expected="text", fix="check that the file was written, or pass another one")
    return np.frombuffer(SEPARATOR.join(texts), dtype=np.uint8)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            f"there is no file {file}",
            got=f"working directory {Path.cwd()}" if not file.is_absolute() else None,
            fix="check the path for a typing mistake, or give an absolute one",
        ) from error
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}", fix="pass a file that this user may read") from error


def _files_of(folder: Path, suffix: str | None) -> list[Path]:
    files = [f for f in _walk(folder, skip=lambda name: name.startswith(".")) if not f.name.startswith(".")]
    chosen = [f for f in files if f.name.endswith(suffix or "")]
    if not chosen:
        found = sorted({f.suffix or f.name for f in files})
        raise DataError(
            f"the folder {folder} holds no file" + (f" with suffix {suffix!r}" if suffix else ""),
            got=f"suffixes {', '.join(found[:10])}" if found else "an empty folder",
            fix="pass another suffix, or None for all files" if found else "check the path",
        )
    return chosen


def _walk(folder: Path, skip: Any) -> list[Path]:
    """The files below a folder, ordered by relative path; folders whose name `skip` accepts are left out."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not skip(name)]
        found += [Path(here, name) for name in names]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def python_stdlib_files() -> tuple[list[Path], list[Path]]:
    """The default data set: the source files of the running Python's standard library.

    Without `encodings` (tables), `idlelib`, tests and installed packages, ordered by path; every 20th file is held out.
    The files are the same for everyone with the same Python.

    Returns:
        (files to train on, held-out files), for `read_bytes`.

    Raises:
        DataError: this Python comes without its source.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _walk(library, skip=_NOT_LIBRARY.__contains__) if file.suffix == ".py"]
    if len(files) < _HELD_OUT_EVERY:
        raise DataError(
            "this Python comes without the source of its standard library",
            got=f"{len(files)} .py files in {library}",
            fix="pass text of your own: px.data.read_bytes(file_or_folder)",
        )
    held_out = files[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    return [file for i, file in enumerate(files) if (i + 1) % _HELD_OUT_EVERY], held_out


class ByteWindows:
    """Windows of a byte array as samples for next-byte prediction; a source for `Loader`.

    Sample i is `(inputs, targets)`, both int64 [length]: the bytes from `i * stride` on, and the bytes after them.

    Args:
        data: uint8 [n], for instance from `read_bytes`, or a memmap.
        length: bytes in a window.
        stride: between the starts of two windows; `stride=length` covers the data once.

    Raises:
        DataError: not a uint8 vector, or too short for one window.
        InputError: `length` or `stride` below 1.

    >>> windows = ByteWindows(np.frombuffer(b"hello", np.uint8), length=3)
    >>> len(windows), [bytes(part.astype(np.uint8)) for part in windows[1]]
    (2, [b'ell', b'llo'])
    """

    def __init__(self, data: np.ndarray, length: int, stride: int = 1):
        if length < 1 or stride < 1:
            raise InputError("ByteWindows: no such windows", got=f"length={length}, stride={stride}", expected=">= 1")
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
            got = f"{data.dtype} {list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
            raise DataError(
                "ByteWindows takes a vector of bytes",
                got=got,
                expected="a numpy array uint8 [n]",
                fix="read it with px.data.read_bytes(path), or np.frombuffer(data, np.uint8)",
            )
        if len(data) <= length:
            raise DataError(
                f"the text is too short for a window of {length} bytes and its targets",
                got=f"{len(data)} bytes",
                expected=f"at least {length + 1}",
                fix="use more text, or shorter windows",
            )
        self._windows = np.lib.stride_tricks.sliding_window_view(data, length + 1)[::stride]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int | slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One sample, or with a slice or an index array [k] the samples stacked, each part [k, length]."""
        windows = self._windows[index].astype(np.int64)
        return windows[..., :-1], windows[..., 1:]

    def read_samples(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Many samples at once, as `Loader` asks for them: each part int64 [k, length]."""
        return self[np.asarray(indices)]
