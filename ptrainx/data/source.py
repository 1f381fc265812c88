"""What a loader reads from: arrays, trees of arrays, and data sets of items, behind one `read(indices)`.

In: whatever the user has. Out: a `Source` with a length, the structure of a sample, and rows by index as CPU tensors
in memory of their own. `Loader` decides which rows.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor, describe
from ptrainx.core.errors import DataError, TreeError

__all__ = ["Source", "as_source"]

_KINDS = (
    "an array (numpy, memmap, torch), a dict or tuple of equally long arrays, a torch map-style Dataset, "
    "or an object with __len__ and __getitem__(int)"
)


class Source(ABC):
    """Samples by index.

    Attributes:
        length: the number of samples.
        treedef: the structure of a sample.
        paths: each leaf's path in a sample.
        leaves: each leaf's shape (without the batch dim) and dtype in a sample.
    """

    length: int
    treedef: px_tree.TreeDef
    paths: list[tuple[Any, ...]]
    leaves: list[ShapeDtypeStruct]

    @abstractmethod
    def read(self, indices: np.ndarray) -> list[torch.Tensor]:
        """The samples at `indices`, int64 [k]: one CPU tensor [k, ...] a leaf, which shares memory with nothing."""


def as_source(source: Any) -> Source:
    """Finds out how to read `source`.

    A dict, tuple, NamedTuple or registered dataclass is a tree of arrays, whose first dims count the samples. Any other
    object with `__len__` is a sequence of items, a plain list too: read through its `read_samples(indices)` if it has
    that (int64 [k] in, a tree of arrays [k, ...] out), else through torch's `__getitems__(list)` if it has that, else
    through `__getitem__(int)`. To learn what a sample looks like, such a source is asked once for sample 0.

    Raises:
        DataError: there is nothing to read, arrays differ in length, or the object is none of these.
    """
    if source is None or isinstance(source, (str, bytes, bytearray, os.PathLike)):
        raise _no_source(source)
    if _is_array(source) or (not isinstance(source, list) and not px_tree.structure(source).is_leaf()):
        return _Arrays(source)
    many_at_once = callable(getattr(source, "read_samples", None))
    if isinstance(source, IterableDataset) or not (many_at_once or hasattr(source, "__getitem__")):
        raise DataError(
            f"a source of type {type(source).__name__} can't be read by index",
            expected=_KINDS,
            fix="give it __len__ and __getitem__; a stream can't be shuffled or resumed in place",
        )
    try:
        length = len(source)
    except (TypeError, NotImplementedError) as error:
        raise DataError(
            f"{type(source).__name__} does not tell its length", expected=_KINDS, fix="give it a __len__"
        ) from error
    if length == 0:
        raise _empty(type(source).__name__)
    return _Columns(source, length) if many_at_once else _Items(source, length)


def _is_array(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__")) and not isinstance(value, np.generic)


class _Arrays(Source):
    """A tree of arrays with one length."""

    def __init__(self, tree: Any):
        pairs, self.treedef = px_tree.flatten_with_path(tree)
        self.paths = [path for path, _ in pairs]
        names = [px_tree.path_expr(path, "source") for path in self.paths]
        self._arrays = [leaf for _, leaf in pairs]
        for name, array in zip(names, self._arrays):
            if not _is_array(array) or len(array.shape) == 0 or isinstance(array, DTensor):
                raise DataError(
                    f"{name} is no array with a first dim of samples",
                    got="a placed value" if isinstance(array, DTensor) else describe(array),
                    expected=_KINDS,
                    fix="px.device_get it" if isinstance(array, DTensor) else "wrap it: np.asarray(...)",
                )
        lengths = [int(array.shape[0]) for array in self._arrays]
        if len(set(lengths)) > 1:
            raise DataError(
                "the arrays of a source differ in length",
                got=", ".join(f"{name}: {n}" for name, n in zip(names, lengths)),
                expected="one length: the number of samples",
                fix="cut them to the same length, or make the sample index their first dim",
            )
        if not lengths or lengths[0] == 0:
            raise _empty("an array" if lengths else type(tree).__name__)
        self.length = lengths[0]
        self.leaves = [
            ShapeDtypeStruct(tuple(map(int, a.shape[1:])), _torch_dtype(a.dtype, name))
            for a, name in zip(self._arrays, names)
        ]

    def read(self, indices: np.ndarray) -> list[torch.Tensor]:
        return [_rows(array, indices) for array in self._arrays]


def _rows(array: Any, indices: np.ndarray) -> torch.Tensor:
    """Rows of one array, copied."""
    if isinstance(array, torch.Tensor):
        return array.detach()[torch.from_numpy(indices).to(array.device)].cpu()
    if isinstance(array, np.ndarray):
        return torch.from_numpy(np.asarray(array[indices], order="C"))
    # Arrays on disk (h5py, zarr) want increasing indices, each once.
    once, back = np.unique(indices, return_inverse=True)
    return torch.from_numpy(np.asarray(array[once], order="C")[back])


def _torch_dtype(dtype: Any, where: str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} is an array of dtype {dtype}, which has no torch counterpart",
            fix="convert it to a numeric dtype in native byte order with .astype",
        ) from error


class _Items(Source):
    """A sequence of items, each a tree of tensors, arrays and numbers."""

    def __init__(self, items: Any, length: int):
        self.length = length
        self._name = type(items).__name__
        many = getattr(items, "__getitems__", None)
        self._fetch: Callable[[list[int]], Any] = (
            many if callable(many) else lambda indices: [items[i] for i in indices]
        )
        pairs, self.treedef = px_tree.flatten_with_path(self._fetch([0])[0])
        self.paths = [path for path, _ in pairs]
        first = [_tensor(leaf, self._name) for _, leaf in pairs]
        self.leaves = [ShapeDtypeStruct(tuple(tensor.shape), tensor.dtype) for tensor in first]
        _check_not_bare(self.leaves, self._name)

    def read(self, indices: np.ndarray) -> list[torch.Tensor]:
        wanted = indices.tolist()
        samples = [self._leaves(index, sample) for index, sample in zip(wanted, self._fetch(wanted), strict=True)]
        return [torch.stack(column) for column in zip(*samples)]

    def _leaves(self, index: int, sample: Any) -> list[torch.Tensor]:
        flat, treedef = px_tree.flatten(sample)
        if treedef != self.treedef:
            raise _unlike(f"sample {index} of {self._name}", str(treedef), str(self.treedef))
        tensors = [_tensor(leaf, self._name) for leaf in flat]
        for path, tensor, leaf in zip(self.paths, tensors, self.leaves):
            if tuple(tensor.shape) != leaf.shape or tensor.dtype != leaf.dtype:
                where = f"sample {index} of {self._name}: {px_tree.path_expr(path, 'sample')}"
                raise _unlike(where, describe(tensor), describe(leaf))
        return tensors


class _Columns(Source):
    """An object that reads many samples at once: `read_samples(indices)` gives a tree of arrays [k, ...]."""

    def __init__(self, items: Any, length: int):
        self.length = length
        self._name = type(items).__name__
        self._fetch: Callable[[np.ndarray], Any] = items.read_samples
        pairs, self.treedef = px_tree.flatten_with_path(self._fetch(np.zeros(1, np.int64)))
        self.paths = [path for path, _ in pairs]
        columns = [_tensor(leaf, self._name) for _, leaf in pairs]
        self.leaves = [ShapeDtypeStruct(tuple(column.shape[1:]), column.dtype) for column in columns]
        for path, column, leaf in zip(self.paths, columns, self.leaves):
            if column.ndim == 0 or len(column) != 1:
                raise self._misfit(path, column, ShapeDtypeStruct((1, *leaf.shape), leaf.dtype))
        _check_not_bare(self.leaves, self._name)

    def read(self, indices: np.ndarray) -> list[torch.Tensor]:
        flat, treedef = px_tree.flatten(self._fetch(indices))
        if treedef != self.treedef:
            raise _unlike(f"{self._name}.read_samples", str(treedef), str(self.treedef))
        columns = [_tensor(leaf, self._name) for leaf in flat]
        for path, column, leaf in zip(self.paths, columns, self.leaves):
            if tuple(column.shape) != (len(indices), *leaf.shape) or column.dtype != leaf.dtype:
                raise self._misfit(path, column, ShapeDtypeStruct((len(indices), *leaf.shape), leaf.dtype))
        # The arrays may be views of the source's own memory, or of each other.
        return [column.clone(memory_format=torch.contiguous_format) for column in columns]

    def _misfit(self, path: tuple[Any, ...], column: torch.Tensor, wanted: ShapeDtypeStruct) -> DataError:
        where = f"{self._name}.read_samples: {px_tree.path_expr(path, 'result')}"
        return _unlike(where, describe(column), describe(wanted))


def _tensor(leaf: Any, name: str) -> torch.Tensor:
    try:
        return as_tensor(leaf, f"a leaf of a sample of {name}").detach().cpu()
    except TreeError as error:
        fix = "turn it into numbers in the data set"
        raise DataError(error.problem, got=error.got, expected=error.expected, fix=fix) from error


def _check_not_bare(leaves: list[ShapeDtypeStruct], name: str) -> None:
    if not leaves:
        raise DataError(f"sample 0 of {name} holds nothing", expected="tensors, arrays or numbers")


def _unlike(where: str, got: str, expected: str) -> DataError:
    return DataError(
        f"{where}: not like sample 0",
        got=got,
        expected=expected,
        fix="pad or convert in the data set, so that all samples have one structure, shape and dtype",
    )


def _empty(what: str) -> DataError:
    return DataError(f"the source is empty: {what} of length 0", fix="check the path or filter that it was made with")


def _no_source(source: Any) -> DataError:
    if source is None or isinstance(source, (bytes, bytearray)):
        fix = "np.frombuffer(data, np.uint8) makes bytes an array" if source is not None else "pass the samples"
        return DataError(f"a {type(source).__name__} is no source", expected=_KINDS, fix=fix)
    missing = "" if os.path.exists(source) else ", and no such file exists"
    return DataError(
        f"a path is no source{missing}: {os.fspath(source)!r}",
        expected=_KINDS,
        fix="open it: px.data.read_bytes(path), np.load(path, mmap_mode='r') or np.memmap(path, dtype, 'r')",
    )
