"""Which rank holds which block of an array: what `visualize_sharding` draws, worked out without the values.

In: a shape, a spec and a mesh (an abstract one will do). Out: a grid over the first two dims, each cell with the ranks
that hold it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from ptrainx.core.avals import DTYPE_NAMES
from ptrainx.mesh.mesh import AbstractMesh
from ptrainx.mesh.partition_spec import PartitionSpec, axes_of

__all__ = ["ArrayLayout", "bytes_text", "ranks_text"]

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """An array's placement.

    Attributes:
        name: what to call it: a path, or "".
        shape: the global shape.
        dtype: its dtype, or None where only the shape is known.
        spec: its placement, or None for a plain value, which every process has as its own.
        mesh: where it lies, or None for a plain value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    spec: PartitionSpec | None
    mesh: AbstractMesh | None

    @property
    def kind(self) -> str:
        """Dtype and shape: `f32[8,8]`; only the shape where that is all that is known."""
        dtype = "" if self.dtype is None else DTYPE_NAMES.get(self.dtype, str(self.dtype))
        return f"{dtype}[{','.join(map(str, self.shape))}]"

    @property
    def title(self) -> str:
        """The array in a line."""
        where = " a plain value" if self.spec is None else f" {self.spec!r} on {self.mesh!r}"
        return f"{self.name}{' ' if self.name else ''}{self.kind}{where}"

    def block(self, rank: int) -> tuple[Range, ...]:
        """(start, stop) of what a rank holds, for each dim; shards may be uneven, as DTensor leaves them."""
        whole = tuple((0, n) for n in self.shape)
        if self.spec is None or self.mesh is None:
            return whole
        sizes = self.mesh.shape
        coords = dict(zip(sizes, self.mesh.rank_coords(rank)))
        block = []
        for dim, (start, stop) in enumerate(whole):
            for axis in axes_of(self.spec[dim]) if dim < len(self.spec) else ():
                step = -(-(stop - start) // sizes[axis])
                start, stop = min(start + coords[axis] * step, stop), min(start + (coords[axis] + 1) * step, stop)
            block.append((start, stop))
        return tuple(block)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the first rank's block, which is the largest."""
        return tuple(stop - start for start, stop in self.block(0))

    @property
    def bytes_a_rank(self) -> int | None:
        """Bytes of the largest block."""
        return None if self.dtype is None else math.prod(self.local_shape) * self.dtype.itemsize

    @property
    def total_bytes(self) -> int | None:
        """Bytes of the whole array."""
        return None if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize

    @property
    def copies(self) -> int:
        """How many ranks hold each element."""
        if self.spec is None or self.mesh is None:
            return 1
        return self.mesh.size // math.prod(self.mesh.shape[axis] for axis in self.spec.axes)

    def grid(self) -> tuple[list[Range], list[Range], dict[tuple[Range, Range], list[int]]]:
        """(rows, columns, ranks of each cell) over the first two dims; a 1-d array lies in one row."""
        cells: dict[tuple[Range, Range], list[int]] = {}
        for rank in range(self.mesh.size if self.mesh is not None else 1):
            block = self.block(rank)
            if any(start == stop for start, stop in block) and 0 not in self.shape:
                continue
            rows, columns = block[:2] if len(block) > 1 else ((0, 1), *(block or ((0, 1),)))
            cells.setdefault((rows, columns), []).append(rank)
        return sorted({row for row, _ in cells}), sorted({column for _, column in cells}), cells

    def notes(self) -> list[str]:
        """What the picture does not show."""
        if self.spec is None:
            return ["not placed: each process has the whole of it"]
        notes = [self._share()]
        for dim, entry in enumerate(self.spec.entries[2:], 2):
            if entry is not None:
                axes = ", ".join(axes_of(entry))
                notes.append(f"dim {dim} is split over {axes} too: ranks of one cell hold different parts of it")
        if self.spec.unreduced:
            axes = ", ".join(self.spec.unreduced)
            notes.append(f"a sum over {axes} is owed: ranks along it hold addends, not copies")
        return notes

    def _share(self) -> str:
        local = f"each rank holds [{','.join(map(str, self.local_shape))}]"
        if self.bytes_a_rank is not None and self.total_bytes is not None:
            local += f", {bytes_text(self.bytes_a_rank)} of {bytes_text(self.total_bytes)}"
        owed = self.spec is not None and bool(self.spec.unreduced)
        return local if owed else f"{local}; {'1 copy' if self.copies == 1 else f'{self.copies} copies'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in short.

    >>> ranks_text([0, 1, 2, 3, 8, 10, 11])
    '0-3, 8, 10, 11'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts if len(parts) <= 8 else [*parts[:6], "...", parts[-1]])


def bytes_text(n: int) -> str:
    """A number of bytes for people.

    >>> [bytes_text(n) for n in (32, 1536, 5 * 2**30)]
    ['32 B', '1.5 KiB', '5 GiB']
    """
    size, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
