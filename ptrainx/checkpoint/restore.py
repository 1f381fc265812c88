"""`restore`: a tree from a folder of steps, onto any mesh.

All ranks look for the same step: rank 0 lists them, and if any rank meets damage in one, all go on to the one before.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptrainx.checkpoint import scalars, steps
from ptrainx.checkpoint.dtypes import DTYPES
from ptrainx.checkpoint.manifest import Leaf, step_of
from ptrainx.checkpoint.match import match
from ptrainx.checkpoint.meeting import Meeting, telling_failure
from ptrainx.checkpoint.read import OpenStep
from ptrainx.checkpoint.save import check_step
from ptrainx.checkpoint.targets import Target, Targets, fill, targets
from ptrainx.core import tree as px_tree
from ptrainx.core.errors import CheckpointDamageError, CheckpointError
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.spec_tree import SpecTree

__all__ = ["restore"]


def restore(
    path: str | Path,
    like: Any,
    *,
    specs: SpecTree = None,
    mesh: Mesh | None = None,
    partial: bool = False,
    step: int | None = None,
    timeout: float | None = None,
) -> Any:
    """Reads a tree from a folder of steps, each rank no more than the blocks in which its own parts lie.

    Every rank of the world calls it. Mesh, number of processes and specs need not be those of the save.

    Args:
        path: the folder of steps, or the folder of one step.
        like: the tree that is wanted, as values or shapes (`px.eval_shape`). A placed value is restored to its own
            placement, a plain tensor or shape without a spec to a plain tensor, numpy and Python values to their kind.
        specs: a spec tree, possibly a prefix, that places the tensors on `mesh`; None leaves a leaf to `like`.
        mesh: by default the one of `like`'s values, or that of `with mesh:`.
        partial: take the leaves that are there, keep the values of `like` for others, ignore what else was saved.
        step: which; by default the newest. If that one is damaged, a warning says so and the one before is read.
        timeout: seconds without a sign of life after which another rank is taken for dead.

    Returns:
        the tree; leaves that were tied when they were saved are one object again, if they are placed alike.

    Raises:
        CheckpointMismatchError: leaves are missing, too many, or of another kind, shape or dtype; all are told.
        CheckpointDamageError: no step is as it was written, or the one that was asked for is not.
        CheckpointError: there is no step; another rank failed.

    >>> import tempfile, torch
    >>> from ptrainx.checkpoint.save import save
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = save(folder.name, {"w": torch.arange(3.0)}, 1)
    >>> restore(folder.name, {"w": torch.zeros(3)})
    {'w': tensor([0., 1., 2.])}
    """
    path = Path(path).absolute()
    meeting = Meeting(f"restoring from {path}", timeout)
    with telling_failure(meeting):
        wanted = targets(like, specs, mesh)
        folder, found = _candidates(path, None if step is None else check_step(step), meeting)
        damage: list[str] = []
        for number in reversed(found):
            values, problem = _attempt(folder, number, wanted, partial)
            meeting.post(f"read {number}", problem)
            problems = [(rank, text) for rank, text in enumerate(meeting.gather(f"read {number}")) if text]
            if not problems:
                return px_tree.unflatten(wanted.treedef, values)
            rank, text = problems[0]
            damage.append(f"step {number}: {text}" + (f" (rank {rank})" if meeting.size > 1 else ""))
            if number != found[0]:
                warnings.warn(f"{damage[-1]}\n  trying the step before it", RuntimeWarning, stacklevel=2)
        raise CheckpointDamageError(
            f"{folder} has no step that is as it was written",
            got="\n            ".join(damage),
            fix="look at the disk; `ptrainx checkpoint verify` tells what of each step is intact",
        )


def _candidates(path: Path, step: int | None, meeting: Meeting) -> tuple[Path, list[int]]:
    """(folder, steps that may be read, the newest last), as rank 0 sees them."""
    own = step_of(path.name)
    folder = path
    if own is not None and step in (None, own) and not steps.found_steps(path):
        folder, step = path.parent, own
    if meeting.rank == 0:
        meeting.post("steps", steps.found_steps(folder))
    (there,) = meeting.gather("steps", [0])
    if step is not None:
        there, others = [number for number in there if number == step], there
        expected = f"one of {', '.join(map(str, others[-8:]))}" if others else None
    else:
        expected = None
    if not there:
        raise CheckpointError(
            f"there is no {'checkpoint' if step is None else f'step {step}'} in {folder}",
            expected=expected,
            fix="check the path; a step that was never finished does not count",
        )
    return folder, there


def _attempt(folder: Path, step: int, wanted: Targets, partial: bool) -> tuple[list[Any], str | None]:
    """(the values, None) or (nothing, what is damaged)."""
    try:
        with OpenStep(steps.step_folder(folder, step), step) as opened:
            leaves = match(wanted.targets, opened.manifest, partial, f"step {step} in {folder}")
            return _values(wanted.targets, leaves, opened), None
    except CheckpointDamageError as error:
        return [], "; ".join(part for part in (error.problem, error.got) if part)


def _values(wanted: Sequence[Target], leaves: Sequence[Leaf | None], opened: OpenStep) -> list[Any]:
    made: dict[Any, Any] = {}
    values = []
    for target, leaf in zip(wanted, leaves):
        if leaf is None:
            assert target.keep is not None
            values.append(target.keep())
        elif leaf.tensor is None:
            values.append(scalars.from_text(leaf.kind, leaf.value))
        else:
            key = (leaf.tensor, target.placement)
            if key not in made:
                dtype = DTYPES[opened.manifest.tensors[leaf.tensor].dtype].dtype
                made[key] = target.build(fill(target, dtype, functools.partial(opened.read, leaf.tensor)))
            values.append(made[key])
    return values
