"""A step on the disk, or a part of its tree, written for other tools; one process, no mesh, a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ptrainx.checkpoint import paths
from ptrainx.checkpoint.boxes import Box
from ptrainx.checkpoint.dtypes import DTYPES
from ptrainx.checkpoint.foreign.export_dcp import write_dcp
from ptrainx.checkpoint.foreign.export_hugging_face import SHARD, Readable, write_weights
from ptrainx.checkpoint.foreign.hugging_face import near_names, slashed
from ptrainx.checkpoint.manifest import Leaf
from ptrainx.checkpoint.meeting import Meeting
from ptrainx.checkpoint.read import OpenStep
from ptrainx.checkpoint.values import Contents, Source, Writers
from ptrainx.core.errors import InputError

__all__ = ["step_to_dcp", "step_to_hf"]


def step_to_hf(
    opened: OpenStep, folder: str | Path, *, tree: str = "", config: Any = None, max_shard_bytes: int = SHARD
) -> Path:
    """Writes tensors of a step as `export_hf` does.

    Args:
        opened: the step.
        folder: made if it is missing.
        tree: which part of the step's tree, as a path with slashes; all of it by default.
        config, max_shard_bytes: as for `export_hf`.

    Raises:
        InputError: there is no such part; it has leaves that are no tensors; and as `export_hf`.
        CheckpointDamageError: a block of the step is not as it was written.
    """
    leaves = _part(opened, tree)
    others = [f"{slashed([key for _, key in leaf.path])}: {leaf.kind}" for leaf in leaves if leaf.tensor is None]
    if others:
        top = sorted({str(leaf.path[0][1]) for leaf in leaves if leaf.tensor is not None and len(leaf.path) > 1})
        raise InputError(
            "leaves that are no tensors:\n    " + "\n    ".join(others),
            fix=f"choose a part of the tree: --tree {' or '.join(top)}" if top and not tree else "choose another part",
        )
    found = []
    for leaf in leaves:
        assert leaf.tensor is not None
        entry = opened.manifest.tensors[leaf.tensor]
        path = tuple(key for _, key in leaf.path)
        found.append(Readable(path, entry.shape, DTYPES[entry.dtype].dtype, _reader(opened, leaf.tensor)))
    return write_weights(folder, found, config, None, max_shard_bytes)


def step_to_dcp(opened: OpenStep, folder: str | Path, *, tree: str = "") -> Path:
    """Writes a step as `export_dcp` does; arguments as for `step_to_hf`.

    Raises:
        InputError: there is no such part.
        CheckpointDamageError: a block of the step is not as it was written.
    """
    folder = Path(folder).absolute()
    leaves = _part(opened, tree)
    places: dict[int, int] = {}
    sources: list[Source] = []
    for index in [leaf.tensor for leaf in leaves if leaf.tensor is not None]:
        if index not in places:
            places[index] = len(sources)
            sources.append(_source(opened, index))
    moved = [leaf if leaf.tensor is None else leaf._replace(tensor=places[leaf.tensor]) for leaf in leaves]
    return write_dcp(folder, Contents(moved, sources, Writers(1, (0,)), {}), Meeting(f"exporting to {folder}"))


def _source(opened: OpenStep, index: int) -> Source:
    """A tensor of a step as something to be written, in the parts that it has on the disk."""
    entry = opened.manifest.tensors[index]
    read = _reader(opened, index)
    holders: dict[Box, tuple[int, ...]] = {chunk.box: (0,) for chunk in entry.chunks}
    return Source(entry.dtype, entry.shape, holders, lambda rank, box: read(box))


def _part(opened: OpenStep, tree: str) -> list[Leaf]:
    """The leaves below a path, with their paths from there on."""
    above = [part for part in tree.split("/") if part]
    names = {paths.identity(leaf.path): [str(key) for _, key in leaf.path] for leaf in opened.manifest.leaves}
    found = [
        leaf._replace(path=leaf.path[len(above) :])
        for leaf in opened.manifest.leaves
        if names[paths.identity(leaf.path)][: len(above)] == above
    ]
    if not found:
        there = sorted({"/".join(name[: len(above)]) for name in names.values()})
        raise InputError(
            f"step {opened.manifest.step} has nothing below {tree!r}{near_names(tree, there)}",
            expected=f"one of {', '.join(there[:8])}" if there else None,
            fix="`ptrainx checkpoint show` lists its leaves",
        )
    return found


def _reader(opened: OpenStep, index: int) -> Callable[[Box], torch.Tensor]:
    dtype = DTYPES[opened.manifest.tensors[index].dtype].dtype

    def read(box: Box) -> torch.Tensor:
        value = torch.empty(box.shape, dtype=dtype)
        opened.read(index, box, value)
        return value

    return read
