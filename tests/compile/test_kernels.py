"""Matrix products: both kernels are right, the faster one is taken, found again, and the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile import kernels
from ptrainx.compile.disk_cache import DiskCache
from ptrainx.compile.graph import loop_of, loops_of
from ptrainx.compile.kernels import ONEDNN_MM, Product, choose_products, fastest, products_of, use_onednn
from tests.compile.loops import looped, traced
from tests.compile.programs import assert_close, values
from tests.support.pool import Pool

SQUARE = Product((128, 128), (128, 128), (128, 1), (128, 1))


@pytest.mark.parametrize("left", ["n", "t"])
@pytest.mark.parametrize("right", ["n", "t"])
@pytest.mark.parametrize(("m", "k", "n"), [(96, 64, 200), (1, 64, 33), (5, 1, 7)])
def test_onednn_computes_the_product(left: str, right: str, m: int, k: int, n: int) -> None:
    a = values(m, k) if left == "n" else values(k, m).t()
    b = values(k, n, seed=1) if right == "n" else values(n, k, seed=1).t()
    torch.testing.assert_close(ONEDNN_MM(a, b), (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        (((128, 128), (128, 128)), [SQUARE]),
        (((64, 64), (64, 64)), []),
        (((4096, 0), (0, 4096)), []),
    ],
)
def test_products_worth_a_choice(shapes: Any, found: list[Product]) -> None:
    assert products_of([traced(lambda a, b: [a @ b, a @ b], *shapes).graph]) == found


def test_products_of_loops_bodies_and_of_views() -> None:
    module = looped(lambda x: [x @ x.t()], 3, (128, 128))
    (product,) = products_of([module.graph])
    assert (product.left_strides, product.right_strides) == ((128, 1), (1, 128))
    use_onednn(module.graph, {str(product): "onednn"})
    (loop,) = loops_of(module.graph)
    targets = [n.target for n in loop_of(loop.node).body.graph.nodes]
    assert ONEDNN_MM in targets
    assert torch.ops.aten.mm.default not in targets


def test_other_dtypes_keep_their_kernel() -> None:
    assert products_of([traced(lambda a: [a.double() @ a.double()], (128, 128)).graph]) == []


def slowed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        out = torch.mm(left, right)
    return out


@pytest.mark.parametrize(("onednn", "choice"), [(slowed, "mkl"), (lambda a, b: a, "onednn"), (torch.mm, None)])
def test_the_faster_kernel_is_taken(monkeypatch: pytest.MonkeyPatch, onednn: Any, choice: str | None) -> None:
    monkeypatch.setattr(kernels, "_run_onednn", onednn)
    found = fastest(Product((256, 256), (256, 256), (256, 1), (256, 1)))
    assert found in ({choice} if choice else {"mkl", "onednn"})


def test_a_choice_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Product] = []

    def time(product: Product) -> str:
        timed.append(product)
        return "onednn"

    monkeypatch.setattr(kernels, "fastest", time)
    cache = DiskCache(tmp_path / "cache")
    for _ in range(2):
        assert choose_products([SQUARE], cache, None) == {str(SQUARE): "onednn"}
    assert timed == [SQUARE]
    assert choose_products([SQUARE], DiskCache(cache.folder), None) == {str(SQUARE): "onednn"}
    monkeypatch.setattr(kernels, "_processor", lambda: "another")
    assert choose_products([SQUARE], cache, None) == {str(SQUARE): "onednn"}
    assert timed == [SQUARE, SQUARE], "another processor is timed for itself"


@pytest.mark.parametrize("backend", ["graph", "inductor"])
@pytest.mark.parametrize("kernel", ["mkl", "onednn"])
def test_either_kernel_in_a_program(backend: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fastest", lambda product: kernel)
    monkeypatch.setattr(kernels, "_remembered", lambda product, cache: kernel)
    step = px.jit(lambda a, b: torch.relu(a @ b) + 1, mesh=px.make_mesh(data=1), backend=backend)
    a, b = values(128, 96), values(96, 160, seed=1)
    assert_close(step(a, b), torch.relu(a @ b) + 1, rtol=1e-4, atol=1e-5)
    (compiled,) = step._cache.values()
    assert list(compiled.kernels().products.values()) == [kernel]
    assert f": {kernel}" in str(compiled.kernels())


def choose_differently() -> str:
    """Each rank finds another kernel faster."""
    mesh = px.make_mesh(data=2)
    own = "onednn" if mesh.rank == 0 else "mkl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_remembered", lambda product, cache: own)
        step = px.jit(lambda w, x: torch.relu(x @ w), mesh=mesh, in_specs=(P(), P("data")))
        step(values(128, 128), values(256, 128, seed=1))
    (compiled,) = step._cache.values()
    return str(compiled.kernels())


def test_ranks_take_the_choice_of_the_first(pool: Pool) -> None:
    first, second = pool.run(choose_differently, 2)
    assert first == second
    assert "onednn" in first
