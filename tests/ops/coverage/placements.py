"""Every legal placement of a case's arguments on a mesh, and a value at a placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

import ptrainx as px
from ptrainx import P
from ptrainx.mesh.placement import local_block, tensor_spec
from ptrainx.mesh.simulated import wrap_all
from tests.ops.coverage.case import Case, values

__all__ = ["MESHES", "cells_of", "place", "specs_of"]

MESHES: dict[str, dict[str, int]] = {
    "2": {"data": 2},
    "4": {"data": 4},
    "2x2": {"data": 2, "model": 2},
    "3": {"data": 3},
}
"""Dims of the cases have sizes that 2 and 4 divide; over 3 ranks they are cut unevenly, or leave a rank nothing."""

Specs = tuple[P, ...]


def specs_of(value: torch.Tensor, axes: Sequence[str]) -> list[P]:
    """Every spec of a value: over each axis it is replicated, split along a dim, or owed as a sum.

    Over several axes the order is a shuffled one, so that the first few differ on each axis.
    """
    dims = [d for d in range(value.ndim) if value.shape[d] > 1]
    ways: list[Any] = [None, *dims]
    if value.is_floating_point():
        ways.append("owed")
    found = []
    for choice in itertools.product(ways, repeat=len(axes)):
        entries: list[Any] = [
            tuple(axis for axis, way in zip(axes, choice) if way == d and way != "owed") for d in range(value.ndim)
        ]
        found.append(P(*entries, unreduced=tuple(axis for axis, way in zip(axes, choice) if way == "owed")))
    if len(axes) == 1:
        return found
    step = next(k for k in range(round(0.6 * len(found)), 0, -1) if math.gcd(k, len(found)) == 1)
    return [found[(i + 1) * step % len(found)] for i in range(len(found))]


def cells_of(case: Case, mesh: str, limit: int | None = None) -> list[Specs]:
    """Placements of all arguments: every combination.

    Args:
        case: the case.
        mesh: a key of `MESHES`.
        limit: at most so many, of which the first ones hold every placement of each argument, as far as they reach:
            argument j's placements are gone through in steps of j+1, so that combinations vary.
    """
    axes = tuple(MESHES[mesh])
    choices = [[P()] if i in case.whole else specs_of(x, axes) for i, x in enumerate(case.args)]
    total = math.prod(len(choice) for choice in choices)
    if limit is None or total <= limit:
        return list(itertools.product(*choices))
    found: dict[Specs, None] = {}
    for k in range(4 * total):
        turn = k // max(len(choice) for choice in choices)
        found[tuple(choice[(k + j * (turn + k)) % len(choice)] for j, choice in enumerate(choices))] = None
        if len(found) == limit:
            break
    return list(found)


def place(value: torch.Tensor, spec: P, mesh: px.Mesh) -> Any:
    """A value at a placement; where a sum is owed, every rank has an addend that is not zero."""
    if not spec.unreduced:
        return px.device_put(value, spec, mesh) if value.ndim else value
    shares = _shares(value, spec, mesh)
    parts = [shares[rank][local_block(spec, mesh, value.shape, rank)].clone() for rank in mesh.ranks]
    return wrap_all(parts, tensor_spec(mesh.device_mesh, spec, mesh, value))


def _shares(value: torch.Tensor, spec: P, mesh: px.Mesh) -> list[torch.Tensor]:
    """Each rank's addend of the whole value."""
    addends = {(): value}
    for axis in spec.unreduced:
        n = mesh.shape[axis]
        for place_, whole in list(addends.items()):
            parts = [values(*value.shape, seed=7 * i + len(place_)).to(value.dtype) for i in range(n - 1)]
            last = whole - sum(parts) if parts else whole
            addends.update({(*place_, i): part for i, part in enumerate([*parts, last])})
    found = []
    for rank in mesh.ranks:
        at = dict(zip(mesh.axis_names, mesh.rank_coords(rank)))
        found.append(addends[tuple(at[axis] for axis in spec.unreduced)])
    return found
