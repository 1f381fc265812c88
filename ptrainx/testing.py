"""`px.testing`: is a step the same program on every mesh?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ptrainx.core import tree as px_tree
from ptrainx.core.avals import as_tensor
from ptrainx.mesh.mesh import make_mesh
from ptrainx.mesh.spec_tree import SpecTree
from ptrainx.mesh.transfer import device_get
from ptrainx.transforms.jit import jit

__all__ = ["assert_mesh_invariant"]


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
