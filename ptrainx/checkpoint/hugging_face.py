"""Model weights as the Hugging Face tools keep them: safetensors files, and an index where there are several.

A leaf's name is its path with dots: `{"model": {"layers": [{"q_proj": {"weight": ...}}]}}` has
`model.layers.0.q_proj.weight`, as `torch.nn.Module.state_dict` and transformers call it.

In: a tree of tensors, placed or not, out: a folder that `from_pretrained` takes. And back, each rank reading its own
slices. No rank holds more than one whole tensor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ptrainx.checkpoint import paths
from ptrainx.checkpoint.boxes import inside, whole
from ptrainx.checkpoint.dtypes import DTYPES, bytes_of, dtype_name
from ptrainx.checkpoint.files import NewFile, make_folder, remove_file, sync_folder, write_file
from ptrainx.checkpoint.meeting import Meeting, telling_failure
from ptrainx.checkpoint.safetensors_file import header
from ptrainx.checkpoint.targets import Target, targets
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import describe
from ptrainx.core.errors import CheckpointDamageError, CheckpointError, CheckpointMismatchError, InputError
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.spec_tree import SpecTree
from ptrainx.mesh.transfer import device_get

__all__ = ["export_hf", "import_hf"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = 5_000_000_000
"""Bytes of a file, as transformers has them."""


class _Shard(NamedTuple):
    """A file to be: its name, and which leaves are in it."""

    file: str
    leaves: list[int]


def export_hf(folder: str | Path, tree: Any, *, max_shard_bytes: int = SHARD, timeout: float | None = None) -> Path:
    """Writes tensors as `model.safetensors`, or as several files with an index if they are too large for one.

    Every rank of the world calls it; rank 0 writes, one tensor after another.

    Args:
        folder: made if it is missing; may hold `config.json` and others, but no such weights yet.
        tree: tensors; their paths, with dots, are their names.
        max_shard_bytes: of a file; a tensor that is larger has a file to itself.
        timeout: seconds without a sign of life after which another rank is taken for dead.

    Returns:
        the folder.

    Raises:
        InputError: leaves that are no tensors, or of a dtype that safetensors lacks; names that are not distinct.
        CheckpointError: on every rank, if rank 0 can't write.

    >>> import tempfile
    >>> folder = export_hf(tempfile.mkdtemp(), {"lm_head": {"weight": torch.ones(2, 3)}})
    >>> [file.name for file in folder.iterdir()]
    ['model.safetensors']
    """
    folder = Path(folder).absolute()
    pairs, _ = px_tree.flatten_with_path(tree)
    names, values = [_name(path) for path, _ in pairs], [value for _, value in pairs]
    _check(names, values)
    shards = _shards(values, max_shard_bytes)
    meeting = Meeting(f"exporting to {folder}", timeout)
    with telling_failure(meeting):
        problem: str | None = None
        made: list[Path] = []
        for shard in shards:
            problem = _export(folder, shard, names, values, meeting, problem, made)
        if problem is None and meeting.rank == 0:
            problem = _finish(folder, shards, names, values)
        if problem is not None:
            for path in made:
                remove_file(path)
        meeting.post("problem", problem)
        (told,) = meeting.gather("problem", [0])
        if told is not None:
            raise CheckpointError(f"{meeting.what}: rank 0 can't write", got=told, fix="export into an empty folder")
    return folder


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(key) for key in path)


def _check(names: list[str], values: list[Any]) -> None:
    problems = [
        f"{name}: {describe(value)}"
        for name, value in zip(names, values)
        if not isinstance(value, torch.Tensor)
        or dtype_name(value.dtype) not in DTYPES
        or DTYPES[dtype_name(value.dtype)].pair
    ]
    problems += [f"{name}: a name for several leaves" for name in sorted({n for n in names if names.count(n) > 1})]
    if problems:
        raise InputError(
            "export_hf: leaves that safetensors can't keep:\n    " + "\n    ".join(problems), expected="tensors"
        )


def _shards(values: list[torch.Tensor], limit: int) -> list[_Shard]:
    groups: list[list[int]] = [[]]
    size = 0
    for i, value in enumerate(values):
        nbytes = value.numel() * value.dtype.itemsize
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += nbytes
    if len(groups) == 1:
        return [_Shard(SINGLE, groups[0])]
    return [_Shard(f"model-{n:05d}-of-{len(groups):05d}.safetensors", group) for n, group in enumerate(groups, 1)]


def _export(
    folder: Path,
    shard: _Shard,
    names: list[str],
    values: list[Any],
    meeting: Meeting,
    problem: str | None,
    made: list[Path],
) -> str | None:
    """Writes a file on rank 0, and adds it to `made`; returns what went wrong, for no rank may be left in a gather."""
    order = sorted(shard.leaves, key=lambda i: -values[i].dtype.itemsize)
    head, _ = header([(names[i], dtype_name(values[i].dtype), whole(values[i].shape)) for i in order])
    file: NewFile | None = None
    try:
        if meeting.rank == 0 and problem is None:
            make_folder(folder, parents=True)
            file = NewFile(folder / shard.file)
            made.append(folder / shard.file)
            file.write(head)
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    for i in order:
        value = device_get(values[i]).contiguous()
        meeting.beat()
        try:
            if file is not None and problem is None:
                file.write(bytes_of(value))
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    if file is not None:
        with file:
            try:
                file.sync()
            except OSError as error:
                problem = problem or f"{type(error).__name__}: {error}"
    return problem


def _finish(folder: Path, shards: list[_Shard], names: list[str], values: list[Any]) -> str | None:
    try:
        if len(shards) > 1:
            total = sum(value.numel() * value.dtype.itemsize for value in values)
            where = {names[i]: shard.file for shard in shards for i in shard.leaves}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            write_file(folder / INDEX, json.dumps(index, indent=2).encode())
        sync_folder(folder)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def import_hf(folder: str | Path, like: Any, *, specs: SpecTree = None, mesh: Mesh | None = None) -> Any:
    """Reads tensors from `model.safetensors`, or from the files of its index; each rank its own slices.

    Args:
        folder: with the weights of a model, as `save_pretrained` leaves it.
        like: the tree that is wanted, as values or shapes; paths with dots are the names in the files. Tensors that it
            does not name are left out.
        specs, mesh: as for `restore`.

    Returns:
        the tree.

    Raises:
        CheckpointMismatchError: tensors that are missing, or of another shape or dtype; all are told.
        CheckpointDamageError: a file that is no safetensors file, or an index that is none.
        CheckpointError: no weights are there.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder).absolute()
    wanted = targets(like, specs, mesh)
    names = [_name([key for _, key in target.path]) for target in wanted.targets]
    files = _files(folder)
    opened: dict[str, Any] = {}
    try:
        where: dict[str, Any] = {}
        for file in files:
            opened[file] = safe_open(folder / file, framework="pt")
            where.update(dict.fromkeys(opened[file].keys(), opened[file]))
        _match(folder, wanted.targets, names, where)
        values = [_read(target, name, where[name]) for target, name in zip(wanted.targets, names)]
    except (SafetensorError, OSError) as error:
        raise CheckpointDamageError(f"{folder}: a file of the weights can't be read: {error}") from error
    return px_tree.unflatten(wanted.treedef, values)


def _files(folder: Path) -> list[str]:
    """The files with weights, by plain names."""
    if (folder / SINGLE).exists():
        return [SINGLE]
    if not (folder / INDEX).exists():
        raise CheckpointError(f"there is no {SINGLE} and no {INDEX} in {folder}", fix="check the path")
    try:
        found = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamageError(f"{folder / INDEX} is no index: {error!r}") from error
    for name in found:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointDamageError(f"{folder / INDEX} names a file that is none of the folder's: {name!r}")
    return found


def _match(folder: Path, wanted: Sequence[Target], names: Sequence[str], where: dict[str, Any]) -> None:
    problems = []
    for target, name in zip(wanted, names):
        if name not in where:
            near = paths.near((("field", name),), [(("field", other),) for other in where])
            hint = f"; it has {' and '.join(text.removeprefix('.') for text in near)}" if near else ""
            problems.append(f"{name}: not in the files{hint}")
            continue
        part = where[name].get_slice(name)
        shape, code = tuple(part.get_shape()), part.get_dtype()
        if target.shape is None or not target.dtype:
            problems.append(f"{name}: like has {target.text}, which is no tensor")
        elif shape != target.shape or code != DTYPES[target.dtype].code:
            problems.append(f"{name}: {code}{list(shape)} in the files, like has {target.text}")
    if problems:
        raise CheckpointMismatchError(
            f"{folder} does not fit like:\n    " + "\n    ".join(problems),
            fix="pass like= with the names, shapes and dtypes of the files",
        )


def _read(target: Target, name: str, file: Any) -> Any:
    dtype = DTYPES[target.dtype].dtype
    part = file.get_slice(name)
    locals_ = []
    for need in target.needs:
        local = torch.empty(need.shape, dtype=dtype)
        for piece in need.pieces:
            box = piece.box
            found = part[inside(box, (0,) * len(box.shape))] if box.shape else file.get_tensor(name)
            local[inside(box, box.offset, piece.local)] = found.view(dtype)
        locals_.append(local)
    return target.build(locals_)
