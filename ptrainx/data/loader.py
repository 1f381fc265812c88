"""`Loader`: placed global batches of a source, in an order that a seed fixes, resumable at any batch.

In: a source (see `source.py`) and a mesh. Out: pytrees of DTensors for a jitted step. A batch is found by its position
alone: `permutation.py` says which samples it holds, `layout.py` which of them this process reads, `prefetch.py` reads
ahead.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct
from ptrainx.core.errors import DataError, InputError
from ptrainx.data.layout import BatchLayout, RowRange, check_mesh
from ptrainx.data.permutation import SampleOrder
from ptrainx.data.prefetch import Prefetcher
from ptrainx.data.source import as_source
from ptrainx.mesh.mesh import Mesh
from ptrainx.mesh.partition_spec import P
from ptrainx.mesh.spec_tree import SpecTree, spread
from ptrainx.mesh.transfer import default_mesh

__all__ = ["EndlessLoaderError", "Loader"]

_LAST = ("drop", "pad", "keep")


class EndlessLoaderError(DataError, TypeError):
    """`len()` of a loader with `epochs=None`; a TypeError, so that `list` and progress bars take it for "unknown"."""


class _Position(NamedTuple):
    epoch: int
    batch: int


class Loader:
    """Iterates over placed global batches of a source.

    Batch b of epoch e holds the samples `Permutation(n, seed, e)(arange(b * B, (b + 1) * B))`, unshuffled the samples
    `b * B` to `(b + 1) * B - 1`: the same on any mesh and for any number of processes. Each process reads the rows that
    its blocks need, no others.

    The loader has one position, that of the next batch. Iterating goes on from there: a loop left by `break` is taken
    up by the next one. Once a loop has come to the end of all epochs, the next one starts again at epoch 0, in the same
    order. `state_dict()` tells the position after the batch last delivered, whatever has been read ahead.

    Args:
        source: a numpy array, a memmap, a torch tensor; a dict, tuple or registered dataclass of equally long ones; a
            torch map-style Dataset, a list, or any object with `__len__` and `__getitem__(int)` (or, to read many at
            once, `read_samples(indices)`), whose items are trees of tensors, arrays and numbers.
        batch_size: global, over all ranks.
        mesh: by default that of `with mesh:`, or in a world of one a one-device mesh.
        spec: placement of a batch's leaves [B, ...], a spec tree that may be a prefix of the sample's tree.
        seed: of the order, 0 to 2**63 - 1.
        epochs: passes over the source; None goes on for ever.
        shuffle: False gives the source's own order in every epoch.
        last: what becomes of an epoch's last samples when they don't fill a batch. "drop": left out. "keep": a smaller
            batch, cut unevenly where the mesh does not divide it (a jitted step traces twice). "pad": filled up with
            the epoch's last sample; then *every* batch is a pair `(batch, valid)`, and `valid`, bool [B], tells samples
            from filling.
        prefetch: how many batches a background thread reads ahead; 0 reads when asked. Worth its switching between
            threads where reading waits for a disk, a network or a decoder.

    Raises:
        DataError: an empty or malformed source, or fewer samples than a batch.
        SpecError: a spec that does not fit, or a batch size that the mesh does not divide.
        InputError: a setting out of range.
        MeshError: no mesh with devices.

    >>> from ptrainx.mesh import P, device_get, make_mesh
    >>> mesh = make_mesh(data=2, simulate=True)
    >>> loader = Loader({"x": np.arange(6)}, 2, mesh=mesh, shuffle=False)
    >>> [device_get(batch["x"]).tolist() for batch in loader]
    [[0, 1], [2, 3], [4, 5]]
    """

    def __init__(
        self,
        source: Any,
        batch_size: int,
        *,
        mesh: Mesh | None = None,
        spec: SpecTree = P("data"),
        seed: int = 0,
        epochs: int | None = 1,
        shuffle: bool = True,
        last: Literal["drop", "pad", "keep"] = "drop",
        prefetch: int = 0,
    ):
        self._batch_size = _integer("batch_size", batch_size, 1)
        self._seed = _integer("seed", seed, 0, (1 << 63) - 1)
        self._epochs = None if epochs is None else _integer("epochs", epochs, 1)
        self._shuffle = bool(shuffle)
        if last not in _LAST:
            raise InputError(f"Loader: last={last!r}", expected=f"one of {', '.join(map(repr, _LAST))}")
        self._last = last
        self._mesh = check_mesh(default_mesh([], mesh))
        self._source = as_source(source)
        self._full, self._rest = divmod(self._source.length, self._batch_size)
        if last == "drop" and not self._full:
            raise DataError(
                "the source has fewer samples than one batch, and last='drop' leaves them out: there is no batch",
                got=f"{self._source.length} samples, batch_size {self._batch_size}",
                fix=f"use batch_size={self._source.length} or less, or last='pad' or 'keep'",
            )
        self._layouts = self._make_layouts(spec)
        self._order = SampleOrder(self._source.length, self._seed, self._shuffle)
        self._reader = Prefetcher(self._read, self._following, _integer("prefetch", prefetch, 0))
        self._position = _Position(0, 0)
        self._ended = False

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one pass over the source."""
        return self._full + (self._rest > 0 and self._last != "drop")

    def __len__(self) -> int:
        """Batches in all epochs, wherever the position is.

        Raises:
            EndlessLoaderError: `epochs=None`.
        """
        if self._epochs is None:
            raise EndlessLoaderError(
                "a loader with epochs=None has no length", fix="use loader.batches_per_epoch, or give epochs a number"
            )
        return self._epochs * self.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        if self._ended:
            self._position, self._ended = _Position(0, 0), False
        check_mesh(self._mesh)
        return self._deliver()

    def _deliver(self) -> Iterator[Any]:
        try:
            while self._exists(position := self._position):
                batch = self._place(self._reader.take(position))
                self._position = self._after(position)
                yield batch
            self._ended = True
        finally:
            self._reader.close()

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands, and what it must agree with to go on there: plain ints, the same on every rank."""
        return {"epoch": self._position.epoch, "batch": self._position.batch, **self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where another loader stood: the next batch is the one that it would have delivered next.

        The mesh, the number of processes and `epochs` may differ. After a state of the end, one loop delivers nothing.

        Raises:
            DataError: entries are missing or out of range, or the state is of another source length, batch size, seed
                or kind of order; all differences are listed.
        """
        ours = self._fingerprint()
        try:
            values = {name: operator.index(state[name]) for name in ("epoch", "batch", *ours)}
        except (KeyError, TypeError) as error:
            raise DataError(
                f"this is no state of a Loader: {error}",
                got=repr(state)[:200],
                expected=f"integers under {', '.join(('epoch', 'batch', *ours))}",
                fix="pass what state_dict() returned",
            ) from error
        unlike = [name for name in ours if values[name] != ours[name]]
        if unlike:
            raise DataError(
                f"the state is of another loader: {', '.join(unlike)} differ{'s' if len(unlike) == 1 else ''}",
                got=", ".join(f"{name}={values[name]}" for name in unlike),
                expected=", ".join(f"{name}={ours[name]}" for name in unlike),
                fix="make the loader with the settings and the data that the state was saved with, or start afresh",
            )
        position = _Position(values["epoch"], values["batch"])
        if position.epoch < 0 or not 0 <= position.batch < self.batches_per_epoch:
            raise DataError(
                "the state names a batch that does not exist",
                got=f"epoch {position.epoch}, batch {position.batch} with last={self._last!r}",
                expected=f"epoch >= 0, batch from 0 to {self.batches_per_epoch - 1}",
                fix="make the loader with the `last=` that the state was saved with",
            )
        self._position, self._ended = position, False

    def _fingerprint(self) -> dict[str, int]:
        return {
            "seed": self._seed,
            "batch_size": self._batch_size,
            "length": self._source.length,
            "shuffle": int(self._shuffle),
        }

    def _exists(self, position: _Position) -> bool:
        return self._epochs is None or position.epoch < self._epochs

    def _after(self, position: _Position) -> _Position:
        epoch, batch = position
        return _Position(epoch, batch + 1) if batch + 1 < self.batches_per_epoch else _Position(epoch + 1, 0)

    def _following(self, position: _Position) -> _Position | None:
        after = self._after(position)
        return after if self._exists(after) else None

    def _read(self, position: _Position) -> _Read:
        """The rows that this process needs of a batch; in the background thread, if there is one."""
        start = position.batch * self._batch_size
        samples = self._order.take(position.epoch, start, min(start + self._batch_size, self._source.length))
        filled = len(samples)
        if self._last == "pad":
            samples = np.pad(samples, (0, self._batch_size - filled), mode="edge")
        rows: dict[RowRange, list[torch.Tensor]] = {}
        for first, stop in self._layouts[len(samples)].row_ranges:
            try:
                leaves = self._source.read(samples[first:stop]) if first < stop else self._nothing()
            except Exception as error:
                where = f"batch {position.batch} of epoch {position.epoch}, rows {first} to {stop - 1}"
                error.add_note(f"while a Loader read samples {_shorten(samples[first:stop])} for {where}")
                raise
            if self._last == "pad":
                leaves.append(torch.arange(first, stop) < filled)
            # From pinned memory the copy to the device runs beside the step.
            rows[first, stop] = [leaf.pin_memory() for leaf in leaves] if self._mesh.device_type == "cuda" else leaves
        return _Read(len(samples), rows)

    def _nothing(self) -> list[torch.Tensor]:
        """What a rank reads that has no rows of a smaller batch."""
        return [torch.empty((0, *leaf.shape), dtype=leaf.dtype) for leaf in self._source.leaves]

    def _place(self, read: _Read) -> Any:
        leaves = self._layouts[read.size].place(read.rows)
        if self._last != "pad":
            return px_tree.unflatten(self._source.treedef, leaves)
        return px_tree.unflatten(self._source.treedef, leaves[:-1]), leaves[-1]

    def _make_layouts(self, specs: SpecTree) -> dict[int, BatchLayout]:
        """The placement of each size that a batch can have."""
        source, rows = self._source, self._batch_size
        sizes = [rows] if self._full or self._last == "pad" else []
        tree = px_tree.unflatten(source.treedef, source.leaves)
        leaf_specs = [spec or P() for spec in spread(specs, tree, "batch")]
        if self._last == "keep" and self._rest:
            sizes.append(self._rest)
        leaves, paths = list(source.leaves), [px_tree.path_expr(path, "batch") for path in source.paths]
        if self._last == "pad":
            leaves.append(ShapeDtypeStruct((), torch.bool))
            leaf_specs.append(P(*leaf_specs[0].entries[:1]))
            paths.append("valid")
        return {
            size: BatchLayout(
                [ShapeDtypeStruct((size, *leaf.shape), leaf.dtype) for leaf in leaves],
                paths,
                leaf_specs,
                self._mesh,
                uneven=size < rows,
            )
            for size in sizes
        }


class _Read(NamedTuple):
    """A batch that is read, not placed: its global size, and its leaves' rows by row range."""

    size: int
    rows: dict[RowRange, list[torch.Tensor]]


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return number
    limits = f"an integer of at least {low}" + (f" and at most {high}" if high else "")
    raise InputError(f"Loader: {name}={value!r}", expected=limits + (" or None" if name == "epochs" else ""))


def _shorten(samples: np.ndarray) -> str:
    return ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
