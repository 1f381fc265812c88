"""`Manager`: a folder of steps of one run: which are kept, which go."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ptrainx.checkpoint import steps
from ptrainx.checkpoint.async_save import SaveHandle, finish_saves, save_async
from ptrainx.checkpoint.files import ReadFolder
from ptrainx.checkpoint.manifest_reader import read_manifest
from ptrainx.checkpoint.restore import restore
from ptrainx.checkpoint.save import check_step, save
from ptrainx.core.errors import CheckpointError, InputError
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.spec_tree import SpecTree
from ptrainx.mesh.world import current_world

__all__ = ["Manager", "kept"]


def kept(
    found: list[int],
    keep: int | None,
    every: int | None = None,
    best: int | None = None,
    metrics: dict[int, float] | None = None,
    mode: str = "min",
) -> set[int]:
    """Which of some steps stay: the newest `keep`, multiples of `every`, the `best` by metric.

    >>> sorted(kept([0, 10, 20, 30, 40], keep=1, every=20))
    [0, 20, 40]
    """
    if keep is None:
        return set(found)
    stay = set(sorted(found)[-keep:])
    if every is not None:
        stay |= {step for step in found if step % every == 0}
    if best and metrics:
        sign = 1 if mode == "min" else -1
        ranked = sorted((step for step in found if step in metrics), key=lambda step: (sign * metrics[step], -step))
        stay |= set(ranked[:best])
    return stay


class Manager:
    """Saves steps into a folder, restores them, and removes those that are no longer needed.

    After a save has been committed, and has been read back as far as its manifest and the lengths of its files, steps
    go that no rule keeps. Nothing else in the folder is touched.

    Args:
        folder: of steps, seen by all processes; made if it is missing.
        keep: how many of the newest steps stay; None keeps all.
        every: steps that it divides stay for ever.
        best: how many of the best by `metric` stay too.
        mode: whether the least ("min") or the greatest ("max") metric is the best.
        timeout: seconds without a sign of life after which another rank is taken for dead.

    Raises:
        InputError: a setting out of range.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> manager = Manager(folder.name, keep=2)
    >>> for step in (1, 2, 3):
    ...     _ = manager.save(step, {"step": step})
    >>> manager.all_steps(), manager.restore(like={"step": 0})
    ([2, 3], {'step': 3})
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int | None = 3,
        every: int | None = None,
        best: int | None = None,
        mode: Literal["min", "max"] = "min",
        timeout: float | None = None,
    ):
        for name, value in (("keep", keep), ("every", every), ("best", best)):
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(
                    f"Manager: {name} is no positive integer", got=repr(value), expected="1 or more, or None"
                )
        if mode not in ("min", "max"):
            raise InputError("Manager: mode is neither 'min' nor 'max'", got=repr(mode), expected="'min' or 'max'")
        self.folder = Path(folder).absolute()
        self._rules = (keep, every, best)
        self._mode, self._timeout = mode, timeout
        self._metrics: dict[int, float | None] = {}

    def save(self, step: int, tree: Any, *, metric: float | None = None) -> Path:
        """`px.checkpoint.save` into the folder; then steps go that are no longer needed."""
        finish_saves()
        path = save(self.folder, tree, step, metric=metric, timeout=self._timeout)
        self._prune(step)
        return path

    def save_async(
        self, step: int, tree: Any, *, metric: float | None = None, when_busy: Literal["wait", "refuse"] = "wait"
    ) -> SaveHandle:
        """`px.checkpoint.save_async` into the folder; once it is committed, steps go that are no longer needed."""
        number = check_step(step)
        return save_async(
            self.folder,
            tree,
            number,
            metric=metric,
            when_busy=when_busy,
            timeout=self._timeout,
            then=lambda path: self._prune(number),
        )

    def wait(self) -> None:
        """Waits for the save under way.

        Raises:
            CheckpointError: it has failed.
        """
        finish_saves()

    def restore(
        self,
        step: int | None = None,
        *,
        like: Any,
        specs: SpecTree = None,
        mesh: Mesh | None = None,
        partial: bool = False,
    ) -> Any:
        """`px.checkpoint.restore` from the folder; by default the newest step that is intact."""
        finish_saves()
        return restore(self.folder, like, specs=specs, mesh=mesh, partial=partial, step=step, timeout=self._timeout)

    def all_steps(self) -> list[int]:
        """The committed steps, in order."""
        return steps.committed_steps(self.folder)

    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return max(self.all_steps(), default=None)

    def _prune(self, saved: int) -> None:
        keep, every, best = self._rules
        if current_world().rank != 0 or keep is None:
            return
        known = {}
        for step in self.all_steps():
            if step in self._metrics and step != saved:
                known[step] = self._metrics[step]
                continue
            try:
                with ReadFolder(steps.step_folder(self.folder, step)) as folder:
                    known[step] = read_manifest(folder, step).metric
            except CheckpointError:
                if step == saved:
                    raise
                # A damaged step counts for nothing, and is not ours to remove.
        self._metrics = known
        metrics = {step: metric for step, metric in known.items() if metric is not None}
        for step in sorted(set(known) - kept(list(known), keep, every, best, metrics, self._mode)):
            steps.remove_step(self.folder, step)
