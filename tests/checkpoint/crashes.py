"""What a crash may leave of a run that saves and prunes: recorded, replayed, cut at every moment.

The operations of a real run are recorded. A model of a disk takes them up to some moment, then loses any of what was
not yet brought to the disk: of each file any unsynced writes, or parts of them; of each folder any unsynced entries.
Each such state is laid out as real files, and must hold every step whose save had returned, whole, and no step that is
not whole.

    python -m tests.checkpoint.crashes 2000
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from ptrainx.checkpoint import Manager, restore
from ptrainx.checkpoint.files import FileEvent, watch
from ptrainx.checkpoint.manager import kept
from ptrainx.checkpoint.steps import found_steps

__all__ = ["run"]

KEEP = 2
STEPS = (0, 1, 2, 3, 4)


def tree(step: int) -> dict[str, torch.Tensor]:
    """What is saved as a step; more than one block of writes."""
    return {"w": torch.full((64,), float(step)), "v": torch.full((400_000,), float(step)), "n": torch.tensor(step)}


class File:
    """A file of the model: what is on the disk, what is still on its way."""

    def __init__(self) -> None:
        self.safe = bytearray()
        self.pending: list[tuple[int, bytes]] = []

    def sync(self) -> None:
        for offset, data in self.pending:
            _put(self.safe, offset, data)
        self.pending.clear()

    def after_crash(self, rng: random.Random) -> bytes:
        data = bytearray(self.safe)
        for offset, part in self.pending:
            fate = rng.choice(["lost", "there", "torn"])
            if fate != "lost":
                _put(data, offset, part if fate == "there" else part[: rng.randrange(len(part) + 1)])
        return bytes(data)


def _put(data: bytearray, offset: int, part: bytes) -> None:
    data.extend(b"\0" * (offset + len(part) - len(data)))
    data[offset : offset + len(part)] = part


class Folder:
    """A folder of the model: its entries on the disk, and changes on their way, in order."""

    def __init__(self) -> None:
        self.safe: dict[str, Any] = {}
        self.now: dict[str, Any] = {}
        self.pending: list[tuple[str, str, Any]] = []

    def change(self, kind: str, name: str, what: Any) -> None:
        _apply(self.now, kind, name, what)
        self.pending.append((kind, name, what))

    def sync(self) -> None:
        self.safe = dict(self.now)
        self.pending.clear()

    def after_crash(self, rng: random.Random) -> dict[str, Any]:
        entries = dict(self.safe)
        order = rng.choice([0.0, 0.5, 1.0])  # none, some, all of what is on its way
        for kind, name, what in self.pending:
            if rng.random() < order:
                _apply(entries, kind, name, what)
        return entries


def _apply(entries: dict[str, Any], kind: str, name: str, what: Any) -> None:
    if kind == "add":
        entries[name] = what
    elif kind == "remove":
        entries.pop(name, None)
    elif name in entries:
        entries[what] = entries.pop(name)


class Disk:
    """A model of a disk, from the operations that were made on it."""

    def __init__(self, root: str):
        self.root, self.top = root, Folder()

    def find(self, path: str) -> Any:
        node: Any = self.top
        for part in Path(path).relative_to(self.root).parts:
            node = node.now[part]
        return node

    def take(self, event: FileEvent) -> None:
        path = Path(event.path)
        if event.kind in ("make_folder", "create"):
            new = Folder() if event.kind == "make_folder" else File()
            self.find(str(path.parent)).change("add", path.name, new)
        elif event.kind == "write":
            self.find(event.path).pending.append((event.offset, bytes(event.data)))
        elif event.kind in ("sync", "sync_folder"):
            self.find(event.path).sync()
        elif event.kind == "rename":
            self.find(str(path.parent)).change("rename", path.name, Path(event.target).name)
        elif event.kind in ("remove", "remove_folder"):
            self.find(str(path.parent)).change("remove", path.name, None)

    def lay_out(self, folder: Path, rng: random.Random) -> None:
        """A state after a crash at this moment, as real files."""
        _lay_out(self.top, folder, rng)


def _lay_out(node: Folder, folder: Path, rng: random.Random) -> None:
    folder.mkdir()
    for name, child in node.after_crash(rng).items():
        if isinstance(child, File):
            (folder / name).write_bytes(child.after_crash(rng))
        else:
            _lay_out(child, folder / name, rng)


def record(folder: str) -> list[FileEvent | int]:
    """The operations of a run of saves with pruning; a number stands where the save of that step has returned."""
    events: list[FileEvent | int] = []

    def take(event: FileEvent) -> None:
        if event.kind != "read":
            events.append(event._replace(data=bytes(event.data)))

    manager = Manager(folder, keep=KEEP)
    with watch(take):
        for step in STEPS:
            manager.save(step, tree(step))
            events.append(step)
    return events


def check(folder: Path, returned: list[int]) -> None:
    """Every step that should be there is, and every one that is there is whole."""
    there = found_steps(folder)
    needed = kept(returned, KEEP)
    if returned and max(returned) < STEPS[-1]:
        needed = kept([*returned, max(returned) + 1], KEEP) - {max(returned) + 1}  # the next may be committed already
    assert needed <= set(there), (needed, there)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in there:
            found = restore(folder, tree(0), step=step)
            assert all(found[name].equal(value) for name, value in tree(step).items()), step
        if there:
            assert int(restore(folder, tree(0))["n"]) == there[-1] >= max(returned, default=0)


def run(times: int, seed: int = 0) -> int:
    """Makes and checks so many states, at moments spread over the whole run; returns how many."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "real")
        root.mkdir()
        events = record(str(root / "run"))
        moments = sorted(rng.randrange(len(events) + 1) for _ in range(times))
        disk, returned, taken = Disk(str(root)), [], 0
        for number, moment in enumerate(moments):
            for event in events[taken:moment]:
                if isinstance(event, FileEvent):
                    disk.take(event)
                else:
                    returned.append(event)
            taken = moment
            state = Path(scratch, f"state-{number}")
            disk.lay_out(state, rng)
            if (state / "run").is_dir() or returned:
                check(state / "run", returned)
            _remove(state)
    return times


def _remove(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            _remove(entry)
        else:
            entry.unlink()
    folder.rmdir()


if __name__ == "__main__":
    print(f"{run(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)} states after a crash, none bad")
