"""`P`: which mesh axes split which dims of a value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ptrainx.core.errors import SpecError

__all__ = ["P", "PartitionSpec"]

Entry = None | str | tuple[str, ...]


class PartitionSpec:
    """One entry a tensor dim: None (not split), an axis name, or a tuple of axes, major to minor.

    Missing entries are None. `unreduced` names axes over which a sum is still owed: each rank along them holds an
    addend (DTensor's `Partial`). Immutable, hashable, a leaf in trees.

    Raises:
        SpecError: an entry is no axis name, or an axis is used twice.

    >>> P("data", None, ("model", "expert"))
    P('data', None, ('model', 'expert'))
    >>> P("data") == P("data", None)
    True
    """

    __slots__ = ("entries", "unreduced")

    entries: tuple[Entry, ...]
    unreduced: tuple[str, ...]

    def __init__(self, *entries: Entry, unreduced: Iterable[str] = ()):
        owed = _owed(unreduced)
        object.__setattr__(self, "entries", tuple(_entry(e) for e in entries))
        object.__setattr__(self, "unreduced", tuple(sorted(owed)))
        used = [*self.axes, *owed]
        for axis in used:
            if used.count(axis) > 1:
                raise SpecError(
                    f"axis {axis!r} is used twice in {self}",
                    expected="each mesh axis splits at most one dim",
                    fix=f"keep {axis!r} in one place",
                )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split a dim, in the order of the dims."""
        return tuple(axis for entry in self.entries for axis in axes_of(entry))

    def dim_of(self, axis: str) -> int | None:
        """The dim that an axis splits, or None."""
        return next((d for d, entry in enumerate(self.entries) if axis in axes_of(entry)), None)

    def _stripped(self) -> tuple[Entry, ...]:
        entries = self.entries
        while entries and entries[-1] is None:
            entries = entries[:-1]
        return entries

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PartitionSpec):
            return NotImplemented
        return self._stripped() == other._stripped() and self.unreduced == other.unreduced

    def __hash__(self) -> int:
        return hash((self._stripped(), self.unreduced))

    def __len__(self) -> int:
        return len(self.entries)

    def __bool__(self) -> bool:
        # Or `spec or P()` would drop what P(unreduced=...) says.
        return True

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def __repr__(self) -> str:
        parts = [repr(e) for e in self.entries]
        if self.unreduced:
            parts.append(f"unreduced={self.unreduced!r}")
        return f"P({', '.join(parts)})"

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a PartitionSpec does not change: make a new one instead of setting {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a PartitionSpec does not change: {name} can't be deleted")

    def __reduce__(self) -> tuple:
        return _rebuild, (self.entries, self.unreduced)


def _rebuild(entries: tuple[Entry, ...], unreduced: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*entries, unreduced=unreduced)


def _owed(unreduced: Any) -> tuple[str, ...]:
    axes = (unreduced,) if isinstance(unreduced, str) or not isinstance(unreduced, Iterable) else tuple(unreduced)
    if not all(isinstance(axis, str) for axis in axes):
        raise SpecError(
            f"unreduced={unreduced!r} names no axes",
            expected="an axis name, or a tuple of them",
            fix="write P(unreduced=('data',))",
        )
    return axes


def _entry(entry: Any) -> Entry:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, (tuple, list)) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry) if len(entry) > 1 else (entry[0] if entry else None)
    raise SpecError(
        f"a partition spec has no entry {entry!r}",
        expected="None, an axis name, or a tuple of axis names",
        fix="write P('data', None), one entry a dim",
    )


def axes_of(entry: Entry) -> tuple[str, ...]:
    """The axes of one entry, major to minor."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


P = PartitionSpec
