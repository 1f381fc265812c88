"""`px.testing`: is a step the same program on every mesh, and does it send what it says?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ptrainx.compile.channel import tapped
from ptrainx.compile.counting import CountingGroup, Sent
from ptrainx.core.errors import MeshError
from ptrainx.mesh.mesh import Mesh
from ptrainx.observe.invariance import Departure, InvarianceError, assert_mesh_invariant

__all__ = ["Departure", "InvarianceError", "Sent", "assert_mesh_invariant", "count_bytes"]


@contextlib.contextmanager
def count_bytes(mesh: Mesh) -> Iterator[Sent]:
    """Counts what this rank sends in the steps that run inside, collective by collective.

    Args:
        mesh: of real devices.

    Returns:
        a context manager that gives `Sent`: `total_bytes`, and `calls` and `bytes_of` by (kind, axis), by the
        convention of `step.comms()`: what a rank sends with ring algorithms. On gloo a reduce-scatter is counted as the
        all-to-all as which it goes.

    Raises:
        MeshError: the mesh is simulated, where nothing is sent.

    >>> import torch
    >>> import ptrainx as px
    >>> mesh = px.make_mesh(data=1)
    >>> with count_bytes(mesh) as sent:
    ...     _ = px.jit(lambda x: x.sum(), mesh=mesh)(torch.ones(4))
    >>> sent.total_bytes
    0
    """
    if mesh.simulated:
        raise MeshError(f"nothing is sent on {mesh}", fix="use step.comms(), or run with real ranks (ptrainx run -n 2)")
    sent = Sent()
    with tapped(mesh, lambda axis, group: CountingGroup(axis, group, sent)):
        yield sent
