"""Operators that change a value's shape in place, such as torch's product of a vector and a matrix calls."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

import ptrainx as px
from ptrainx import P
from ptrainx.mesh.virtual import VirtualDeviceMesh, next_uid
from tests.compile.programs import assert_close, values

V, W = values(8), values(8, 4, seed=1)
PLACEMENTS = [(P(), P()), (P("data"), P("data")), (P(), P(None, "model")), (P("data"), P("data", "model"))]


@pytest.mark.parametrize("specs", PLACEMENTS)
@pytest.mark.parametrize("backend", ["graph", "eager"])
def test_a_vector_times_a_matrix(specs: tuple[P, P], backend: str) -> None:
    def fn(v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = v @ w
        assert product.shape == (4,)
        return product, torch.cat([product, v])

    mesh = px.make_mesh(data=2, model=2, simulate=True)
    assert_close(px.jit(fn, mesh=mesh, in_specs=specs, backend=backend)(V, W), fn(V, W))


def test_its_gradient() -> None:
    loss = lambda v, w: (v @ w).sin().sum() + (w @ (v @ w)).square().sum()  # noqa: E731
    gradient = px.grad(loss, argnums=(0, 1))
    px.testing.assert_mesh_invariant(gradient, (V, W), [{"data": 2, "model": 2}], (P("data"), P("data", "model")))


def test_in_the_body_of_a_shard_map() -> None:
    product = px.shard_map(lambda v, w: px.psum(v @ w, "data"), in_specs=(P("data"), P("data")), out_specs=P())
    mesh = px.make_mesh(data=2, simulate=True)
    assert_close(px.jit(product, mesh=mesh)(V, W), V @ W)


def test_torch_still_leaves_the_old_shape() -> None:
    """Once this fails, torch is mended, and `shapes_in_place.py` can go."""
    mesh = VirtualDeviceMesh((1,), ("data",), 0, next_uid(), {})
    value = DTensor.from_local(torch.ones(1, 4), mesh, [Replicate()], run_check=False)
    assert value.squeeze_(0).shape == (1, 4)
