"""Writing model weights for Hugging Face's tools: safetensors files, an index where there are several, a config.

In: a tree of tensors, placed or not. Out: a folder that `from_pretrained` takes. Rank 0 writes; no rank holds more than
one whole tensor of the files, and the parts that it is put together from.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ptrainx.checkpoint.boxes import Box, inside, whole
from ptrainx.checkpoint.dtypes import DTYPES, bytes_of, dtype_name
from ptrainx.checkpoint.files import NewFile, make_folder, remove_file, sync_folder
from ptrainx.checkpoint.foreign.hugging_face import CONFIG, config_of, dotted, near_names, slashed
from ptrainx.checkpoint.foreign.registry import table_of
from ptrainx.checkpoint.foreign.safetensors_reader import INDEX, SINGLE
from ptrainx.checkpoint.foreign.tables import Adapter, MappedLeaf, Part, Table, identity
from ptrainx.checkpoint.meeting import Meeting, telling_failure
from ptrainx.checkpoint.safetensors_file import header
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import describe
from ptrainx.core.errors import CheckpointError, InputError
from ptrainx.mesh.transfer import device_get

__all__ = ["Readable", "export_hf", "write_weights"]

SHARD = 5_000_000_000
"""Bytes of a file, as transformers had them for long."""


class Readable(NamedTuple):
    """A leaf to be written: its path, and how a box of it is had, as a CPU tensor; every rank asks for the same."""

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]


class _Stored(NamedTuple):
    """A tensor of the files to be: where its parts come from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: list[tuple[Readable, Part]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export_hf(
    folder: str | Path,
    tree: Any,
    *,
    config: Any = None,
    adapter: str | Adapter | None = None,
    max_shard_bytes: int = SHARD,
    timeout: float | None = None,
) -> Path:
    """Writes tensors as `model.safetensors`, or as several files with an index if they are too large for one.

    Every rank of the world calls it; rank 0 writes, one tensor after another.

    Args:
        folder: made if it is missing; may hold other files, but no such weights yet.
        tree: tensors. Without a config their paths, with dots, are their names.
        config: what stands in `config.json`, its path, or a config of transformers. The tree is then one of those that
            `hf_shapes` gives for it, or partly of one and partly of another form; and it is written beside the weights.
        adapter: a model type or an adapter; by default the config's `model_type`.
        max_shard_bytes: of a file; a tensor that is larger has a file to itself.
        timeout: seconds without a sign of life after which another rank is taken for dead.

    Returns:
        the folder.

    Raises:
        InputError: leaves that are no tensors, or of a dtype that safetensors lacks; names that are not distinct; a
            tree that is not one of the config's model; no adapter for it.
        CheckpointError: on every rank, if rank 0 can't write.

    >>> import tempfile
    >>> folder = export_hf(tempfile.mkdtemp(), {"lm_head": {"weight": torch.ones(2, 3)}})
    >>> [file.name for file in folder.iterdir()]
    ['model.safetensors']
    """
    pairs, _ = px_tree.flatten_with_path(tree)
    problems = [f"{dotted(path)}: {describe(value)}" for path, value in pairs if not isinstance(value, torch.Tensor)]
    if problems:
        raise InputError("export_hf: leaves that are no tensors:\n    " + "\n    ".join(problems), expected="tensors")
    leaves = [Readable(path, tuple(value.shape), value.dtype, _reader(value)) for path, value in pairs]
    return write_weights(folder, leaves, config, adapter, max_shard_bytes, timeout)


def _reader(value: torch.Tensor) -> Callable[[Box], torch.Tensor]:
    def read(box: Box) -> torch.Tensor:
        part = value.detach()
        for dim, (offset, size) in enumerate(zip(*box)):
            if size != value.shape[dim]:
                part = part.narrow(dim, offset, size)
        return device_get(part)

    return read


def write_weights(
    folder: str | Path,
    leaves: Sequence[Readable],
    config: Any = None,
    adapter: str | Adapter | None = None,
    max_shard_bytes: int = SHARD,
    timeout: float | None = None,
) -> Path:
    """What `export_hf` does, of leaves that need not be in memory."""
    folder = Path(folder).absolute()
    found = None if config is None and adapter is None else config_of(folder if config is None else config)
    known = None if found is None else table_of(found, adapter)
    stored = _stored(leaves, known)
    files = _files(stored, max_shard_bytes)
    record = None
    if config is not None and found is not None and known is not None:
        record = _config(found, known, stored)
    meeting = Meeting(f"exporting to {folder}", timeout)
    made: list[Path] = []
    try:
        with telling_failure(meeting):
            problem: str | None = None
            for file, own in files.items():
                problem = _write(folder, file, own, meeting, problem, made)
            if problem is None and meeting.rank == 0:
                problem = _finish(folder, files, record, made)
            meeting.post("problem", problem)
            (told,) = meeting.gather("problem", [0])
            if told is not None:
                problem = f"{meeting.what}: rank 0 can't write"
                raise CheckpointError(problem, got=told, fix="export into an empty folder")
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                remove_file(path)
        raise
    return folder


def _stored(leaves: Sequence[Readable], known: Table | None) -> list[_Stored]:
    """The tensors of the files, in their order, each with its sources; all that does not fit is told."""
    problems: list[str] = []
    sources: dict[str, list[tuple[Readable, Part]]] = {} if known is None else {name: [] for name in known.names()}
    for leaf in leaves:
        mapped = _mapped(leaf, known, problems)
        for part in () if mapped is None else mapped.parts:
            sources.setdefault(part.name, []).append((leaf, part))
    if known is None:
        problems += [f"{name}: a name for several leaves" for name, given in sources.items() if len(given) > 1]
    else:
        problems += [text for name, shape in known.names().items() if (text := _untiled(name, shape, sources[name]))]
    if problems:
        what = "that safetensors can't keep" if known is None else f"that are not those of a {known.architecture.name}"
        raise InputError(
            f"export_hf: leaves {what}:\n    " + "\n    ".join(problems),
            expected="tensors" if known is None else "a tree as px.checkpoint.hf_shapes(config) gives it",
        )
    return [_Stored(name, own[0][1].stored, own[0][0].dtype, own) for name, own in sources.items()]


def _mapped(leaf: Readable, known: Table | None, problems: list[str]) -> MappedLeaf | None:
    path = dotted(leaf.path) if known is None else slashed(leaf.path)
    name = dtype_name(leaf.dtype)
    if name not in DTYPES or DTYPES[name].pair:
        problems.append(f"{path}: {leaf.dtype}, which safetensors lacks")
        return None
    if known is None:
        return identity(path, leaf.shape)
    mapped = known.leaves.get(path)
    if path in known.tied:
        problems.append(f"{path}: the config ties it to the embedding (tie_word_embeddings)")
    elif mapped is None:
        problems.append(f"{path}: no such leaf{near_names(path, list(known.leaves))}")
    elif mapped.shape != leaf.shape:
        problems.append(f"{path}: {list(leaf.shape)}, the config has {list(mapped.shape)}")
    else:
        return mapped
    return None


def _untiled(name: str, shape: tuple[int, ...], sources: list[tuple[Readable, Part]]) -> str:
    there, size = sum(part.box.size for _, part in sources), math.prod(shape)
    if there != size:
        several = f"in several leaves: {', '.join(sorted({slashed(leaf.path) for leaf, _ in sources}))}"
        return f"{name}: {several if there > size else 'some or all of it is in no leaf'}"
    dtypes = {str(leaf.dtype) for leaf, _ in sources}
    return f"{name}: made of leaves of several dtypes: {', '.join(sorted(dtypes))}" if len(dtypes) > 1 else ""


def _files(stored: list[_Stored], limit: int) -> dict[str, list[_Stored]]:
    """Which tensors are in which file; in a file those with large elements come first, so that all are aligned."""
    groups: list[list[_Stored]] = [[]]
    size = 0
    for tensor in stored:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    ordered = [sorted(group, key=lambda tensor: -tensor.dtype.itemsize) for group in groups]
    if len(ordered) == 1:
        return {SINGLE: ordered[0]}
    return {f"model-{n:05d}-of-{len(ordered):05d}.safetensors": group for n, group in enumerate(ordered, 1)}


def _config(config: Any, known: Table, stored: list[_Stored]) -> bytes:
    """The config of the model as it is written: its class, and the dtype that most of its tensors have."""
    dtypes: Counter[str] = Counter()
    for tensor in stored:
        dtypes[dtype_name(tensor.dtype)] += tensor.nbytes
    record = {**config, "architectures": config.get("architectures") or [known.architecture.name]}
    names = [name for name in ("dtype", "torch_dtype") if name in record] or ["dtype"]
    return json.dumps(record | dict.fromkeys(names, dtypes.most_common(1)[0][0]), indent=2, default=str).encode()


def _write(
    folder: Path, name: str, stored: list[_Stored], meeting: Meeting, problem: str | None, made: list[Path]
) -> str | None:
    """Writes a file on rank 0, and adds it to `made`; returns what went wrong, for no rank may be left in a gather."""
    head, _ = header([(tensor.name, dtype_name(tensor.dtype), whole(tensor.shape)) for tensor in stored])
    file: NewFile | None = None
    with contextlib.ExitStack() as stack:
        try:
            if meeting.rank == 0 and problem is None:
                make_folder(folder, parents=True)
                file = stack.enter_context(NewFile(folder / name))
                made.append(folder / name)
                file.write(head)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
        for tensor in stored:
            value = _assembled(tensor)
            meeting.beat()
            try:
                if file is not None and problem is None:
                    file.write(bytes_of(value))
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        try:
            if file is not None and problem is None:
                file.sync()
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    return problem


def _assembled(tensor: _Stored) -> torch.Tensor:
    """A whole tensor of the files. Every rank asks for its parts, in the same order."""
    if len(tensor.sources) == 1:
        ((leaf, part),) = tensor.sources
        return part.as_stored(leaf.read(part.place)).contiguous()
    value = torch.empty(tensor.shape, dtype=tensor.dtype)
    for leaf, part in tensor.sources:
        value[inside(part.box, (0,) * len(tensor.shape))] = part.as_stored(leaf.read(part.place))
    return value


def _finish(folder: Path, files: dict[str, list[_Stored]], record: bytes | None, made: list[Path]) -> str | None:
    try:
        if record is not None:
            _new(folder / CONFIG, record, made)
        if len(files) > 1:
            total = sum(tensor.nbytes for own in files.values() for tensor in own)
            where = {tensor.name: file for file, own in files.items() for tensor in own}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            _new(folder / INDEX, json.dumps(index, indent=2).encode(), made)
        sync_folder(folder)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _new(path: Path, data: bytes, made: list[Path]) -> None:
    with NewFile(path) as file:
        made.append(path)
        file.write(data)
        file.sync()
