"""Every operation on files that this room makes, in one place.

What is written is written into new files only, and reaches the disk before it counts. What is read is read through a
folder that is held open, by plain names, regular files only: no link leads out of it. `watch` shows every operation,
for tests that count bytes or replay a crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ptrainx.core.errors import CheckpointDamageError

__all__ = [
    "FileEvent",
    "NewFile",
    "ReadFolder",
    "is_folder",
    "lock_folder",
    "make_folder",
    "remove_file",
    "remove_folder",
    "rename_folder",
    "sync_folder",
    "watch",
    "write_file",
]

BUFFER = 1 << 20
"""Bytes of small writes that are gathered into one."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class FileEvent(NamedTuple):
    """One operation.

    Attributes:
        kind: `create write sync sync_folder make_folder rename remove remove_folder read`.
        path: of the file or folder.
        offset: in bytes, of a read or write.
        size: in bytes, of a read or write.
        data: what a write wrote.
        target: of a rename.
    """

    kind: str
    path: str
    offset: int = 0
    size: int = 0
    data: bytes | memoryview = b""
    target: str = ""


_watchers: list[Callable[[FileEvent], None]] = []


@contextlib.contextmanager
def watch(callback: Callable[[FileEvent], None]) -> Iterator[None]:
    """Inside, `callback` is called with each operation, just before it is made; what it raises is raised there.

    >>> with watch(print):
    ...     _ = is_folder("/")
    """
    _watchers.append(callback)
    try:
        yield
    finally:
        _watchers.remove(callback)


def _tell(event: FileEvent) -> None:
    for callback in tuple(_watchers):
        callback(event)


class NewFile:
    """A file that did not exist, being written; `with` closes it, `sync` brings it to the disk."""

    def __init__(self, path: Path):
        self.path = str(path)
        _tell(FileEvent("create", self.path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)
        self._small = bytearray()
        self._written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._fd)

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        if len(self._small) + len(data) < BUFFER:
            self._small += data
            return
        self._flush()
        self._put(memoryview(data))

    def _flush(self) -> None:
        self._put(memoryview(bytes(self._small)))
        self._small.clear()

    def _put(self, data: memoryview) -> None:
        if data:
            _tell(FileEvent("write", self.path, self._written, len(data), data))
        while data:
            n = os.write(self._fd, data)
            self._written += n
            data = data[n:]

    def sync(self) -> None:
        """Writes what is gathered, and waits until the file is on the disk."""
        self._flush()
        _tell(FileEvent("sync", self.path))
        os.fsync(self._fd)


def write_file(path: Path, data: bytes) -> None:
    """A whole new file, on the disk."""
    with NewFile(path) as file:
        file.write(data)
        file.sync()


def sync_folder(path: Path) -> None:
    """Waits until a folder's entries are on the disk, where the file system can be asked to."""
    _tell(FileEvent("sync_folder", str(path)))
    fd = os.open(path, _FOLDER & ~os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Makes a folder; with `parents`, those above it too, each on the disk, and it may exist."""
    if parents and is_folder(path):
        return
    if parents:
        make_folder(path.parent, parents=True)
    _tell(FileEvent("make_folder", str(path)))
    try:
        path.mkdir()
    except FileExistsError:
        if not parents:
            raise
    if parents:
        sync_folder(path.parent)


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder, or a link to one."""
    return Path(path).is_dir()


def rename_folder(path: Path, target: Path) -> None:
    """Gives a folder another name beside its own; raises FileExistsError where that name is taken.

    An empty folder of that name is replaced: nothing of ours is ever empty.
    """
    _tell(FileEvent("rename", str(path), target=str(target)))
    try:
        os.rename(path, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        raise


def remove_file(path: Path) -> None:
    """Removes one file; it may be gone."""
    _tell(FileEvent("remove", str(path)))
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> bool:
    """Removes an empty folder; False if something is in it."""
    _tell(FileEvent("remove_folder", str(path)))
    try:
        path.rmdir()
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        if error.errno != errno.ENOENT:
            raise
    return True


def lock_folder(path: Path) -> int | None:
    """Marks a folder as in use by this process until the descriptor is closed or the process ends, however it ends.

    Returns:
        the descriptor; None if another holds it, or the file system has no locks.
    """
    fd = os.open(path, _FOLDER)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


class ReadFolder:
    """A folder held open for reading.

    Args:
        path: of the folder.
        links: whether it and the files in it may be symbolic links, as in the caches of other tools.

    Raises:
        CheckpointDamageError: what should be a folder or a regular file is none.
    """

    def __init__(self, path: Path, *, links: bool = False):
        self.path = path
        self._links = links
        self._open: dict[str, int] = {}
        try:
            self._fd = os.open(path, _FOLDER & ~os.O_NOFOLLOW if links else _FOLDER)
        except OSError as error:
            raise CheckpointDamageError(f"{path} can't be read: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for fd in (*self._open.values(), self._fd):
            os.close(fd)
        self._open.clear()

    def names(self) -> list[str]:
        """What is in the folder."""
        return sorted(os.listdir(self._fd))

    def size(self, name: str) -> int:
        """Bytes of a regular file."""
        return self._checked(name, lambda: os.stat(name, dir_fd=self._fd, follow_symlinks=self._links)).st_size

    def _checked(self, name: str, ask: Callable[[], os.stat_result]) -> os.stat_result:
        try:
            found = ask()
        except OSError as error:
            raise CheckpointDamageError(f"{self.path / name} can't be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointDamageError(f"{self.path / name} is no regular file")
        return found

    def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""
        size = self.size(name)
        if size > limit:
            raise CheckpointDamageError(f"{self.path / name} is too long", got=f"{size:,} bytes")
        data = bytearray(size)
        self.read_into(name, 0, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills `target` with the bytes of a file from `offset` on."""
        fd = self._descriptor(name)
        _tell(FileEvent("read", str(self.path / name), offset, len(target)))
        while target:
            try:
                n = os.preadv(fd, [target], offset)
            except OSError as error:
                raise CheckpointDamageError(f"{self.path / name} can't be read: {error.strerror}") from error
            if n == 0:
                raise CheckpointDamageError(f"{self.path / name} ends early", got=f"{offset:,} bytes")
            target, offset = target[n:], offset + n

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= 64:  # as many as may be open at once
                os.close(self._open.pop(next(iter(self._open))))
            try:
                # Without O_NONBLOCK, opening a pipe would wait for a writer.
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if self._links else os.O_NOFOLLOW)
                fd = os.open(name, flags, dir_fd=self._fd)
            except OSError as error:
                raise CheckpointDamageError(f"{self.path / name} can't be read: {error.strerror}") from error
            self._open[name] = fd
            self._checked(name, lambda: os.fstat(fd))
        return self._open[name]
