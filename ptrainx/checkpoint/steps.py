"""A folder of steps: which are there, where one is being written, how one is taken away.

    runs/a/step-000000000100/            a committed step: it is there whole, or not at all
    runs/a/.new-step-000000000200-4f1c   one that is being written, or whose writer has died
    runs/a/.old-step-000000000000-93ab   one that is being removed
    runs/a/damaged-step-000000000150-07  one that was found damaged when its step was saved again

Whatever else lies in the folder is nobody's business here.
"""

from __future__ import annotations

import os
import re
import secrets
import warnings
from pathlib import Path

from ptrainx.checkpoint import files
from ptrainx.checkpoint.manifest import COMMIT, MANIFEST, file_name, step_name, step_of
from ptrainx.checkpoint.manifest_reader import read_commit, read_manifest
from ptrainx.core.errors import CheckpointError

__all__ = [
    "committed_steps",
    "discard",
    "found_steps",
    "new_folder",
    "remove_step",
    "set_aside",
    "step_folder",
    "sweep",
]

_LEFTOVER = re.compile(r"\.(new|old)-step-[0-9]{12,19}-[0-9a-f]{8}")
_OURS = re.compile(r"rank-[0-9]{5,}\.safetensors")


def step_folder(folder: Path, step: int) -> Path:
    """Where a step lies, or will lie."""
    return folder / step_name(step)


def found_steps(folder: Path) -> list[int]:
    """The steps that have a folder, in order, damaged or not."""
    if not files.is_folder(folder):
        return []
    with os.scandir(folder) as entries:
        found = [step_of(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(step for step in found if step is not None)


def committed_steps(folder: Path) -> list[int]:
    """The steps that have a commit record, in order."""
    return [step for step in found_steps(folder) if _is_committed(folder, step)]


def _is_committed(folder: Path, step: int) -> bool:
    try:
        with files.ReadFolder(step_folder(folder, step)) as opened:
            read_commit(opened, step)
    except CheckpointError:
        return False
    return True


def new_folder(folder: Path, step: int) -> tuple[Path, int | None]:
    """(a new folder to write a step into, a lock that tells others that its writer lives)."""
    files.make_folder(folder, parents=True)
    while True:
        path = folder / f".new-{step_name(step)}-{secrets.token_hex(4)}"
        files.make_folder(path)
        lock = files.lock_folder(path) if files.is_folder(path) else None
        if files.is_folder(path):  # else another's sweep came between
            return path, lock


def sweep(folder: Path) -> None:
    """Removes what writers and removers have left that died."""
    with os.scandir(folder) as entries:
        left = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False) and _LEFTOVER.fullmatch(e.name)]
    for path in left:
        try:
            lock = files.lock_folder(path)
        except OSError:
            continue  # gone, or not ours to open
        if lock is not None:
            try:
                _empty(path)
            finally:
                os.close(lock)


def _empty(path: Path) -> None:
    for name in os.listdir(path):
        if _is_ours(name):
            files.remove_file(path / name)
    files.remove_folder(path)


def _is_ours(name: str) -> bool:
    return name in (COMMIT, MANIFEST) or _OURS.fullmatch(name) is not None


def discard(path: Path) -> None:
    """Removes a folder of `new_folder` that will not be committed."""
    if files.is_folder(path):
        _empty(path)


def remove_step(folder: Path, step: int) -> bool:
    """Removes a committed step; at no time is a part of it taken for the whole.

    Returns:
        whether it did: a step is left alone if it can't be read, or holds files that no save has written.
    """
    path = step_folder(folder, step)
    try:
        with files.ReadFolder(path) as opened:
            manifest = read_manifest(opened, step)
            known = {COMMIT, MANIFEST, *(file_name(file.rank) for file in manifest.files)}
            foreign = sorted(set(opened.names()) - known)
    except CheckpointError as error:
        warnings.warn(f"step {step} is not removed: {error.problem}", RuntimeWarning, stacklevel=2)
        return False
    if foreign:
        warnings.warn(
            f"step {step} is not removed: {path} holds {', '.join(foreign[:4])}, which no save has written",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    going = folder / f".old-{step_name(step)}-{secrets.token_hex(4)}"
    files.rename_folder(path, going)
    files.sync_folder(folder)
    _empty(going)
    return True


def set_aside(folder: Path, step: int) -> Path:
    """Gives a damaged step another name, so that its step can be saved again; returns the new place."""
    aside = folder / f"damaged-{step_name(step)}-{secrets.token_hex(4)}"
    files.rename_folder(step_folder(folder, step), aside)
    files.sync_folder(folder)
    return aside
