"""Adapters: what the tensors of a model's files are in a tree that a pure function would want.

An adapter makes, from a model's `config.json`, a table: a row says which tensor of the files a leaf is, and whether it
is transposed, or a part of it. Out of the table come the shapes of a tree, and for a leaf the parts of files' tensors
that make it up. So a leaf may also be all layers' weights stacked, for `px.scan`, or several weights side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ptrainx.checkpoint.boxes import Box, whole

__all__ = ["Adapter", "Architecture", "MappedLeaf", "Part", "Row", "Table", "identity"]


class Row(NamedTuple):
    """A line of a table.

    Attributes:
        leaf: its path in the tree; `*` counts the layers.
        name: of the tensor in the files, with the same `*`.
        shape: of the leaf, for one layer.
        transposed: whether the files have a matrix with its dims the other way round.
        column: (i, n): the leaf is the i-th of n equal parts of the tensor, cut along its last dim.
    """

    leaf: str
    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    column: tuple[int, int] = (0, 1)


class Architecture(NamedTuple):
    """A model, as an adapter finds it in a config.

    Attributes:
        name: of the class in transformers, such as `LlamaForCausalLM`.
        rows: the table.
        layers: how many there are.
        prefix: of names, which the files of a model without its head lack.
        joins: leaves that other leaves may be held as, side by side along the last dim: `{"layers/*/qkv":
            ("layers/*/q", "layers/*/k", "layers/*/v")}`.
        tied: rows of leaves that the files lack because they are others of their tensors (a tied head); a tree that is
            read may have them, one that is written may not.
    """

    name: str
    rows: tuple[Row, ...]
    layers: int
    prefix: str = ""
    joins: Mapping[str, tuple[str, ...]] = {}
    tied: tuple[Row, ...] = ()


Adapter = Callable[[Mapping[str, Any]], Architecture]
"""From what stands in `config.json` to the model's table."""


class Part(NamedTuple):
    """A part of a tensor in the files that is a part of a leaf.

    Attributes:
        name: of the tensor.
        stored: its shape.
        box: which part of it.
        at: the index in the leaf at which the part begins; more dims than the box has come first, and have length 1.
        transposed: whether the leaf has the two dims the other way round.
    """

    name: str
    stored: tuple[int, ...]
    box: Box
    at: tuple[int, ...]
    transposed: bool = False

    @property
    def place(self) -> Box:
        """Which part of the leaf it is."""
        shape = self.box.shape[::-1] if self.transposed else self.box.shape
        return Box(self.at, (1,) * (len(self.at) - len(shape)) + shape)

    def source(self, place: Box) -> Box:
        """The part of the files' tensor that a part of `place` is."""
        extra = len(place.shape) - len(self.box.shape)
        offset = [o - a for o, a in zip(place.offset[extra:], self.at[extra:])]
        shape = place.shape[extra:]
        if self.transposed:
            offset, shape = offset[::-1], shape[::-1]
        return Box(tuple(o + b for o, b in zip(offset, self.box.offset)), shape)

    def as_stored(self, value: Any) -> Any:
        """A tensor of the shape of a part of `place`, seen as the files have it."""
        flat = value[(0,) * (value.ndim - len(self.box.shape))]
        return flat.t() if self.transposed else flat


class MappedLeaf(NamedTuple):
    """A leaf: its shape, and the parts that tile it."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Table:
    """All the leaves that a tree of a model may have.

    Args:
        architecture: from the adapter.

    Attributes:
        leaves: path with slashes -> the leaf; layers one by one and stacked, alone and joined.
        tied: of them, those that the files have no tensor of their own for.
    """

    def __init__(self, architecture: Architecture):
        self.architecture = architecture
        self.leaves: dict[str, MappedLeaf] = {}
        rows = {row.leaf: row for row in (*architecture.rows, *architecture.tied)}
        for path, row in rows.items():
            self._add(path, [row])
        for path, joined in architecture.joins.items():
            if all(name in rows for name in joined):
                self._add(path, [rows[name] for name in joined])
        self.tied = frozenset(row.leaf for row in architecture.tied)

    def _add(self, path: str, rows: list[Row]) -> None:
        if "*" not in path:
            self.leaves[path] = _joined(rows, None)
            return
        each = [_joined(rows, layer) for layer in range(self.architecture.layers)]
        for layer, leaf in enumerate(each):
            self.leaves[path.replace("*", str(layer))] = leaf
        if each:
            stacked = tuple(p._replace(at=(i, *p.at)) for i, leaf in enumerate(each) for p in leaf.parts)
            self.leaves[path.replace("/*", "")] = MappedLeaf((len(each), *each[0].shape), stacked)

    def names(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the files, with their shapes, in the table's order."""
        parts = [part for leaf in self.chosen(stacked=False, joined=False).values() for part in leaf.parts]
        return {part.name: part.stored for part in parts}

    def chosen(self, *, stacked: bool, joined: bool) -> dict[str, MappedLeaf]:
        """The leaves of a tree in one of the forms that the table knows, in the table's order."""
        known = {row.leaf for row in self.architecture.rows}
        joins = {path: names for path, names in self.architecture.joins.items() if joined and known.issuperset(names)}
        first = {names[0]: path for path, names in joins.items()}
        inner = {name for names in joins.values() for name in names}
        paths = [first.get(row.leaf, row.leaf) for row in self.architecture.rows]
        paths = [path for path in paths if path not in inner]
        layers = range(self.architecture.layers)
        found = []
        for path in paths:
            each = [path.replace("*", str(i)) for i in layers] if "*" in path else [path]
            found += [path.replace("/*", "")] if stacked else each
        return {path: self.leaves[path] for path in found}


def _joined(rows: list[Row], layer: int | None) -> MappedLeaf:
    parts, start = [], 0
    for row in rows:
        name = row.name if layer is None else row.name.replace("*", str(layer))
        shape = row.shape[::-1] if row.transposed else row.shape
        index, count = row.column
        stored = (*shape[:-1], shape[-1] * count)
        box = Box((*(0,) * (len(shape) - 1), shape[-1] * index), shape)
        parts.append(Part(name, stored, box, (*(0,) * (len(shape) - 1), start), row.transposed))
        start += row.shape[-1]
    return MappedLeaf((*rows[0].shape[:-1], start), tuple(parts))


def identity(name: str, shape: tuple[int, ...]) -> MappedLeaf:
    """A leaf that is one tensor of the files, as it is."""
    return MappedLeaf(shape, (Part(name, shape, whole(shape), (0,) * len(shape)),))
