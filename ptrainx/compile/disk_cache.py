"""What compiling has found out, kept in files for the next process.

The folder is `PTRAINX_CACHE_DIR`, by default `ptrainx` in the user's cache folder. It is made with mode 0700, and one
that other people can write to is not used: entries are unpickled. An entry is written beside its place and then moved
there, so that processes may write one at the same time; it carries a digest of itself, and one that does not match is
as good as missing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

from ptrainx.core import flags

__all__ = ["CacheFolderWarning", "DiskCache", "open_cache"]

_MAGIC = b"ptrainx cache entry 1\n"
_DIGEST = 32


class CacheFolderWarning(UserWarning):
    """The cache folder can't be used, so this process keeps its own."""


class DiskCache:
    """A folder of named byte strings.

    Args:
        folder: made, with mode 0700, if it is not there.

    Attributes:
        hits, misses, writes: how often entries were found, not found (or damaged), and written by this object.

    >>> cache = DiskCache(Path(tempfile.mkdtemp()) / "cache")
    >>> cache.write("numbers", "pi", b"3.14")
    >>> cache.read("numbers", "pi")
    b'3.14'
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.hits = self.misses = self.writes = 0
        _make_private(folder)

    def subfolder(self, name: str) -> Path:
        """A folder inside, made if it is not there."""
        return _make_private(self.folder / name)

    def read(self, kind: str, key: str) -> bytes | None:
        """What was written under this name; None if nothing was, or if it is damaged."""
        try:
            data = (self.folder / kind / key).read_bytes()
        except OSError:
            data = b""
        body = data[len(_MAGIC) + _DIGEST :]
        if data[: len(_MAGIC) + _DIGEST] != _MAGIC + _digest(body):
            self.misses += 1
            return None
        self.hits += 1
        return body

    def write(self, kind: str, key: str, body: bytes) -> None:
        """Keeps a byte string under a name; what was there is replaced. A full or read-only disk is no error."""
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(dir=self.subfolder(kind), prefix=".new-")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_MAGIC + _digest(body) + body)
                os.replace(name, self.folder / kind / key)
            except BaseException:
                os.unlink(name)
                raise
            self.writes += 1


def open_cache() -> DiskCache:
    """The cache in the folder that the environment names now."""
    return _open(flags.cache_dir())


@functools.cache
def _open(folder: Path) -> DiskCache:
    try:
        problem = _unsafe(folder)
        if problem is None:
            return DiskCache(folder)
    except OSError as error:
        problem = str(error)
    own = Path(tempfile.mkdtemp(prefix="ptrainx-cache-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    warnings.warn(
        f"the cache folder {folder} can't be used: {problem}; this process compiles into a folder of its own. "
        "Set PTRAINX_CACHE_DIR to a folder that only you can write to",
        CacheFolderWarning,
        stacklevel=2,
    )
    return DiskCache(own)


def _unsafe(folder: Path) -> str | None:
    """Why an existing folder can't be trusted; None if it can, or is not there."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}, not to you"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _make_private(folder: Path) -> Path:
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()
