"""What is wanted, held against what a checkpoint has: every leaf that is missing, too many or other is told at once."""

from __future__ import annotations

from collections.abc import Sequence

from ptrainx.checkpoint import paths
from ptrainx.checkpoint.dtypes import DTYPES
from ptrainx.checkpoint.manifest import Leaf, Manifest
from ptrainx.checkpoint.scalars import PYTHON
from ptrainx.checkpoint.targets import Target
from ptrainx.core.avals import ShapeDtypeStruct, describe
from ptrainx.core.errors import CheckpointMismatchError

__all__ = ["match", "saved_text"]

TOLD = 100
"""Leaves that are told one by one."""
COMPARED = 20
"""Missing leaves for which near names are looked up, which takes time."""


def match(targets: Sequence[Target], manifest: Manifest, partial: bool, where: str) -> list[Leaf | None]:
    """For each target its leaf in the checkpoint; None for one that stays as it is in `like` (`partial`).

    Raises:
        CheckpointMismatchError: leaves that are missing, too many, or of another kind, shape or dtype.
    """
    saved = {paths.identity(leaf.path): leaf for leaf in manifest.leaves}
    wanted = {paths.identity(target.path) for target in targets}
    found = [saved.get(paths.identity(target.path)) for target in targets]
    extra = [leaf.path for key, leaf in saved.items() if key not in wanted]
    missing = [t.path for t, leaf in zip(targets, found) if leaf is None and not (partial and t.keep)]
    problems = [_missing(path, extra if i < COMPARED else []) for i, path in enumerate(missing)]
    if not partial:
        problems += [f"{paths.name(path)}: in the checkpoint, not in like" for path in extra]
    for target, leaf in zip(targets, found):
        if leaf is not None and not _fits(target, leaf, manifest):
            problems.append(
                f"{paths.name(target.path)}: {saved_text(leaf, manifest)} in the checkpoint, like has {target.text}"
            )
    if problems:
        more = [f"and {len(problems) - TOLD} more"] if len(problems) > TOLD else []
        raise CheckpointMismatchError(
            f"{where} does not fit like:\n    " + "\n    ".join([*problems[:TOLD], *more]),
            fix="make like as the tree that was saved; partial=True takes what is there, and keeps the rest of like",
        )
    return found


def _missing(path: paths.TypedPath, others: Sequence[paths.TypedPath]) -> str:
    near = paths.near(path, others)
    hint = f"; it has {' and '.join(near)}" if near else ""
    return f"{paths.name(path)}: not in the checkpoint{hint}"


def _fits(target: Target, leaf: Leaf, manifest: Manifest) -> bool:
    if leaf.tensor is None or target.kind in PYTHON:
        return leaf.kind == target.kind
    tensor = manifest.tensors[leaf.tensor]
    if tensor.shape != target.shape:
        return False
    if target.kind == "any tensor":
        return tensor.dtype == target.dtype
    return leaf.kind == target.kind and (leaf.numpy == target.numpy if leaf.numpy else tensor.dtype == target.dtype)


def saved_text(leaf: Leaf, manifest: Manifest) -> str:
    """What a leaf of a checkpoint is, in short."""
    if leaf.tensor is None:
        return leaf.kind
    tensor = manifest.tensors[leaf.tensor]
    text = describe(ShapeDtypeStruct(tensor.shape, DTYPES[tensor.dtype].dtype))
    return text if leaf.kind == "tensor" else f"{leaf.kind} {text}"
