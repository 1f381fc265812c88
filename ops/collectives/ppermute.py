"""`ppermute`: each rank's value to one other rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ptrainx.core.errors import InputError
from ptrainx.ops.collectives.call import AxisName, map_leaves, open_call, refuse_owed
from ptrainx.ops.collectives.linear import Permute, apply, varying
from ptrainx.ops.collectives.region import Region

__all__ = ["ppermute"]


def ppermute(x: Any, axis_name: AxisName, perm: Iterable[tuple[int, int]]) -> Any:
    """Each rank's value goes to at most one other; a rank that gets none has zeros.

    Type: V -> V.

        def ppermute(shards, perm):                            rank 0   a        0
            out = [torch.zeros_like(x) for x in shards]        rank 1   b   ->   a        perm = [(0, 1), (1, 2)]
            for source, destination in perm:                   rank 2   c        b
                out[destination] = shards[source]
            return out

    Args:
        x: a pytree of tensors.
        axis_name: a mesh axis, or a tuple of several; places are counted along them, major to minor.
        perm: pairs (source, destination), each place at most once on either side.

    Returns:
        the tree of what has come.

    Raises:
        TraceError, MeshError: as `psum`.
        InputError: pairs that are no permutation.
        SpecError: of a sum that is still owed along the axis.

    Gradient: a `ppermute` the other way.
    Bytes: the value, once.

    >>> import torch, ptrainx as px
    >>> from ptrainx import P
    >>> mesh = px.make_mesh(data=2, simulate=True)
    >>> shift = px.shard_map(
    ...     lambda x: px.ppermute(x, "data", [(0, 1)]), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    ... )
    >>> px.device_get(shift(torch.tensor([1.0, 2.0])))
    tensor([0., 1.])
    """
    region, axes, source = open_call("ppermute", axis_name)
    ordered = tuple(axis for axis in region.axis_names if axis in axes)
    sources = _sources(perm, region, axes, ordered, source)

    def one(leaf: Any) -> Any:
        refuse_owed("ppermute", leaf, region, axes)
        return apply(Permute(ordered, sources), varying(leaf, region, axes, source), region, "px.ppermute", source)

    return map_leaves("ppermute", one, x, region)


def _sources(perm: Any, region: Region, axes: tuple[str, ...], ordered: tuple[str, ...], source: str) -> tuple:
    """For each member, in mesh order, whose value it gets; -1 for nobody's."""
    n = region.size(axes)
    pairs = [tuple(pair) for pair in perm]
    places = [place for pair in pairs for place in pair]
    if not all(len(pair) == 2 for pair in pairs) or not all(isinstance(p, int) and 0 <= p < n for p in places):
        raise InputError(
            "px.ppermute: perm has something else than pairs (source, destination)",
            got=repr(pairs),
            expected=f"pairs of places from 0 to {n - 1}",
            source=source,
        )
    for side, which in enumerate(("source", "destination")):
        found = [pair[side] for pair in pairs]
        twice = sorted({p for p in found if found.count(p) > 1})
        if twice:
            raise InputError(
                f"px.ppermute: {which} {', '.join(map(str, twice))} comes more than once",
                got=repr(pairs),
                expected=f"each place at most once as {which}",
                source=source,
            )
    sources = [-1] * n
    for start, end in pairs:
        sources[_in_mesh_order(end, region, axes, ordered)] = _in_mesh_order(start, region, axes, ordered)
    return tuple(sources)


def _in_mesh_order(place: int, region: Region, axes: tuple[str, ...], ordered: tuple[str, ...]) -> int:
    """A place counted along the axes as the user named them, counted along them in mesh order."""
    coordinate = {}
    for axis in reversed(axes):
        place, coordinate[axis] = divmod(place, region.sizes[axis])
    for axis in ordered:
        place = place * region.sizes[axis] + coordinate[axis]
    return place
