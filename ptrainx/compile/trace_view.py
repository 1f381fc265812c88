"""The torch DeviceMesh that traces run on: one object a mesh, which plays each rank in turn.

DTensor works out an operator's placements from specs that hold the mesh, and that is most of a trace's time. With one
mesh object for all ranks, what was worked out for one rank serves the others; only what depends on the rank (the local
shape that a view or a factory is given) is kept apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ptrainx.core import torch_compat as tc
from ptrainx.core.torch_compat_rules import forget_propagations, shaped_by_rank
from ptrainx.mesh.mesh import AbstractMesh
from ptrainx.mesh.virtual import VirtualDeviceMesh, next_uid
from ptrainx.ops.sharding_rules import rules_version

__all__ = ["TraceDeviceMesh", "remembered_propagation", "trace_view"]


class TraceDeviceMesh(VirtualDeviceMesh):
    """A virtual mesh whose current rank can be changed between traces."""

    def __init__(self, shape: tuple[int, ...], axis_names: tuple[str, ...]):
        super().__init__(shape, axis_names, 0, next_uid(), {})
        self.propagated: dict[Any, Any] = {}

    def play(self, rank: int, coords: tuple[int, ...]) -> TraceDeviceMesh:
        """Makes this the view of a rank."""
        self._rank, self._coordinate_on_dim = rank, coords
        forget_propagations()
        self.ensure_registered()
        return self


def trace_view(mesh: AbstractMesh, rank: int) -> TraceDeviceMesh:
    """The mesh as a rank's trace sees it; valid until the next call for the same mesh."""
    view = mesh.__dict__.get("_trace_view")
    if view is None:
        view = mesh.__dict__["_trace_view"] = TraceDeviceMesh(tuple(mesh.shape.values()), mesh.axis_names)
    return view.play(rank, mesh.rank_coords(rank))


@contextlib.contextmanager
def remembered_propagation(view: TraceDeviceMesh) -> Iterator[None]:
    """Inside, DTensor looks up the placements that it has worked out before on this mesh, in whatever trace.

    torch itself remembers them only outside a trace, for the sake of symbolic shapes, which there are none of here.
    """
    propagator = tc.sharding_propagator()
    original = propagator.propagate_op_sharding_non_cached
    shaped, version = shaped_by_rank(), rules_version()

    def propagate(schema: Any) -> Any:
        key = (schema, view._rank if schema.op in shaped else None, version)
        try:
            found = view.propagated.get(key)
        except TypeError:
            return original(schema)
        if found is None:
            # It is arithmetic on specs; what it runs to that end is no part of the trace.
            with tc.no_dispatch_modes():
                found = view.propagated[key] = original(schema)
        return found

    propagator.propagate_op_sharding_non_cached = propagate
    try:
        yield
    finally:
        del propagator.propagate_op_sharding_non_cached
