"""Regrouping and reordering elementary axes, which every pattern comes down to, on each rank's part alone.

A mesh axis that splits a dim splits one elementary axis of it: the major one whose size it divides, once those before
it are split up entirely. As long as that axis stays major in its new dim, each rank can do with its own part what the
pattern says of the whole, and nothing is sent. Where it does not, the ranks' parts would lie interleaved in the result:
the mesh axis is gathered first, once.

DTensor's own view and permute do the same for one mesh axis a dim. They leave an interleaved shard behind a merge that
does not keep it, and refuse to split a dim among several elementary axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.ops.einops.pattern import Groups, flat
from ptrainx.ops.parts import Call, wrap

__all__ = ["regroup"]


def regroup(x: DTensor, left: Groups, right: Groups, sizes: dict[str, int], call: Call) -> Any:
    """A global value with its elementary axes in other dims.

    Args:
        x: the value.
        left: the elementary axes of its dims.
        right: of the result's, the same axes.
        sizes: of each.
        call: for reports.

    Gradient: regrouped back; sums that are owed stay so.
    Bytes: none, or an all-gather for each mesh axis whose elementary axis the pattern breaks.
    """
    if left == right:
        return x
    split, broken = _splits(x, left, right, sizes)
    if broken:
        placements = [Replicate() if i in broken else p for i, p in enumerate(x.placements)]
        names = x.device_mesh.mesh_dim_names or ()
        what = ", ".join(f"{axes} (split by {names[i]!r})" for i, axes in broken.items())
        with call.trace.marked(asked=False, reason=f"{call.label} breaks {what}", source=call.source):
            x = x.redistribute(x.device_mesh, placements)
    return _Regroup.apply(x, left, right, sizes, split, call)


class _Regroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, left: Groups, right: Groups, sizes: dict[str, int], split: dict[int, str], call: Call
    ) -> Any:
        ctx.rest = (right, left, sizes, call)
        local = x._local_tensor
        own = _own_sizes(x, left, sizes, split)
        order = flat(left)
        with tc.DisableTorchFunction(), call.trace.marked(source=call.source):
            out = local.reshape([own[name] for name in order])
            out = out.permute([order.index(name) for name in flat(right)])
            out = out.reshape([math.prod(own[name] for name in group) for group in right])
            out = out.view_as(out) if out is local else out
        dims = {name: dim for dim, group in enumerate(right) for name in group}
        placements = tuple(Shard(dims[split[i]]) if i in split else p for i, p in enumerate(x.placements))
        shape = [math.prod(sizes[name] for name in group) for group in right]
        return wrap(out, x.device_mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return regroup(grad, *ctx.rest), None, None, None, None, None


def _splits(x: DTensor, left: Groups, right: Groups, sizes: dict[str, int]) -> tuple[dict[int, str], dict[int, str]]:
    """(mesh dim -> the elementary axis that it splits and goes on splitting, mesh dim -> what has to be gathered)."""
    gathered: dict[int, str] = {}
    while True:
        split: dict[int, str] = {}
        found = _leave(x, left, sizes, split, gathered) or _arrive(x, right, sizes, split)
        if not found:
            return split, gathered
        # What is minor to a gathered mesh axis on the same dim is gathered with it: it lies inside.
        for i in found:
            dim = x.placements[i].dim  # type: ignore[attr-defined]
            also = [j for j, p in enumerate(x.placements) if j >= i and _splits_dim(p, dim)]
            gathered.update({j: found.get(j) or _called(left[dim]) for j in also if j not in gathered})


def _leave(
    x: DTensor, left: Groups, sizes: dict[str, int], split: dict[int, str], gathered: dict[int, str]
) -> dict[int, str]:
    """Fills in which elementary axis each mesh axis splits; returns those that split none."""
    found = {}
    for dim, group in enumerate(left):
        rest = {name: sizes[name] for name in group}
        for i, p in enumerate(x.placements):
            if not _splits_dim(p, dim) or i in gathered:
                continue
            parts = x.device_mesh.shape[i]
            whole = [name for name in group if sizes[name] != 1]
            major = next((name for name in group if rest[name] != 1), None)
            if len(whole) == 1 and not tc.is_strided_shard(p):
                split[i] = whole[0]  # evenly or not
            elif tc.is_strided_shard(p) or major is None or rest[major] % parts or not rest[major]:
                found[i] = _called(group)
            else:
                split[i], rest[major] = major, rest[major] // parts
    return found


def _arrive(x: DTensor, right: Groups, sizes: dict[str, int], split: dict[int, str]) -> dict[int, str]:
    """Mesh axes whose elementary axis is not major any more."""
    found = {}
    for group in right:
        behind, last = False, -1
        for name in group:
            axes = [i for i, own in split.items() if own == name]
            found.update({i: name for i in axes if behind or i < last})
            parts = math.prod(x.device_mesh.shape[i] for i in axes)
            uneven = bool(sizes[name] % parts) and any(sizes[other] != 1 for other in group if other != name)
            found.update({i: name for i in axes if uneven})
            behind = behind or parts < sizes[name] or not sizes[name]
            last = max([last, *axes])
    return found


def _own_sizes(x: DTensor, left: Groups, sizes: dict[str, int], split: dict[int, str]) -> dict[str, int]:
    """Sizes of the elementary axes in this rank's part."""
    own: dict[str, Any] = dict(sizes)
    for dim, group in enumerate(left):
        whole = [name for name in group if sizes[name] != 1]
        if len(whole) == 1:
            own[whole[0]] = x._local_tensor.shape[dim]
        else:
            for i, name in split.items():
                if name in group:
                    own[name] //= x.device_mesh.shape[i]
    return own


def _splits_dim(placement: Any, dim: int) -> bool:
    return (isinstance(placement, Shard) or tc.is_strided_shard(placement)) and placement.dim == dim


def _called(group: Sequence[str]) -> str:
    return group[0] if len(group) == 1 else f"({' '.join(group)})"
