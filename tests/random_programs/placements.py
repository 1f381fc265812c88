"""Where a value of a random program lies: specs drawn at random."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from ptrainx import P

__all__ = ["specs"]


@st.composite
def specs(draw: Any, shape: tuple[int, ...], mesh: dict[str, int], owed: bool = False) -> P:
    """A spec that fits: each axis splits a dim, or none. Half of them split evenly.

    Args:
        draw: Hypothesis's.
        shape: of the value.
        mesh: sizes of its axes; only the last of a dim's axes may cut it unevenly.
        owed: whether a sum may be owed over an axis.
    """
    even = draw(st.booleans())
    entries: list[tuple[str, ...]] = [() for _ in shape]
    unreduced = []
    for axis, size in mesh.items():
        parts = [math.prod(mesh[a] for a in names) for names in entries]
        dims = [d for d in range(len(shape)) if shape[d] % (parts[d] * size if even else parts[d]) == 0]
        dim = draw(st.sampled_from([*dims, -1, *([-2] if owed else [])]))
        if dim >= 0:
            entries[dim] = (*entries[dim], axis)
        elif dim == -2:
            unreduced.append(axis)
    return P(*entries, unreduced=unreduced)
