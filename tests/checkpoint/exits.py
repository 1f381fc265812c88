"""Programs that end while a save is under way: forks of one process, each a scene, its exit status printed.

python -m tests.checkpoint.exits FOLDER
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ptrainx.checkpoint import Manager
from ptrainx.checkpoint.files import FileEvent, watch

__all__ = ["SCENES"]


stays = contextlib.ExitStack()
"""What a scene leaves in place for the end of its process."""


def fail(event: FileEvent) -> None:
    """The disk is full."""
    if event.kind == "write":
        raise OSError(28, "No space left on device")


def slow(event: FileEvent) -> None:
    """A file takes a while."""
    if event.kind == "write":
        time.sleep(0.3)


def leave(signum: int, frame: object) -> None:
    """Ends the program as a handler of SIGTERM does that cleans up."""
    sys.exit(0)


def ends(watcher: Callable[[FileEvent], None]) -> Callable[[Manager], None]:
    """A program that ends right after it has started a save."""

    def scene(manager: Manager) -> None:
        stays.enter_context(watch(watcher))
        manager.save_async(2, {"w": torch.ones(1000)})

    return scene


def terminated(manager: Manager) -> None:
    """A program that is sent SIGTERM."""
    ends(slow)(manager)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)


def terminated_with_a_handler(manager: Manager) -> None:
    """The same with a handler that raises."""
    signal.signal(signal.SIGTERM, leave)
    terminated(manager)


class Scene(NamedTuple):
    """A program, the status that it ends with, the steps that are there then."""

    run: Callable[[Manager], None]
    status: int
    steps: list[int]


SCENES = {
    "ends": Scene(ends(slow), 0, [1, 2]),
    "fails": Scene(ends(fail), 1, [1]),
    "terminated": Scene(terminated, -signal.SIGTERM, [1]),
    "handled": Scene(terminated_with_a_handler, 0, [1, 2]),
}


def main(folder: Path) -> None:
    """Plays every scene in a fork."""
    for name, scene in SCENES.items():
        child = os.fork()
        if child == 0:
            manager = Manager(folder / name)
            manager.save(1, {"w": torch.zeros(1000)})
            scene.run(manager)
            return
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
