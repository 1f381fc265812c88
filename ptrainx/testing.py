"""`px.testing`: is a step the same program on every mesh, and does it send what it says?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ptrainx.compile.channel import tapped
from ptrainx.compile.counting import CountingGroup, Sent
from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor
from ptrainx.core.errors import MeshError
from ptrainx.mesh.mesh import Mesh, make_mesh
from ptrainx.mesh.spec_tree import SpecTree
from ptrainx.mesh.transfer import device_get
from ptrainx.transforms.jit import jit

__all__ = ["Sent", "assert_mesh_invariant", "count_bytes"]


def assert_mesh_invariant(
    fn: Callable[..., Any],
    args: tuple,
    meshes: Iterable[Mapping[str, int]],
    in_specs: SpecTree = None,
    out_specs: SpecTree = None,
    *,
    rtol: float = 2e-5,
    atol: float = 1e-6,
) -> None:
    """Checks that a function gives on every mesh what it gives on one device.

    Args:
        fn: a function as `px.jit` takes it.
        args: its arguments, plain values.
        meshes: axis sizes of the meshes to try; each is simulated in this process.
        in_specs: as for `px.jit`; axes that a mesh lacks are an error.
        out_specs: as for `px.jit`.
        rtol: relative tolerance, for the rounding of reductions.
        atol: absolute tolerance.

    Raises:
        AssertionError: names the mesh, the leaf and the largest difference.

    >>> from ptrainx import P
    >>> assert_mesh_invariant(lambda x: (x * x).sum(), (torch.arange(8.0),), [{"data": 2}, {"data": 4}], P("data"))
    """
    expected = fn(*args)
    pairs, treedef = px_tree.flatten_with_path(expected)
    for axes in meshes:
        mesh = make_mesh(axes, simulate=True)
        result = jit(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*args)
        if px_tree.structure(result) != treedef:
            raise AssertionError(f"on {mesh} the result has another structure: {px_tree.structure(result)}")
        for (path, want), got in zip(pairs, px_tree.leaves(device_get(result))):
            want = as_tensor(want)
            if got.shape != want.shape or got.dtype != want.dtype:
                raise AssertionError(f"on {mesh} {px_tree.path_expr(path, 'result')} is {got.dtype}{list(got.shape)}")
            if not torch.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True):
                worst = (got.double() - want.double()).abs().max()
                raise AssertionError(
                    f"on {mesh} {px_tree.path_expr(path, 'result')} differs by up to {worst:.3g} from one device "
                    f"(rtol {rtol:g}, atol {atol:g})"
                )


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

    >>> mesh = make_mesh(data=1)
    >>> with count_bytes(mesh) as sent:
    ...     _ = jit(lambda x: x.sum(), mesh=mesh)(torch.ones(4))
    >>> sent.total_bytes
    0
    """
    if mesh.simulated:
        raise MeshError(f"nothing is sent on {mesh}", fix="use step.comms(), or run with real ranks (ptrainx run -n 2)")
    sent = Sent()
    with tapped(mesh, lambda axis, group: CountingGroup(axis, group, sent)):
        yield sent
