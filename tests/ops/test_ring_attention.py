"""Attention over a sharded sequence, ring and all-to-all: against full attention on one device in float64.

Legend: B batch, H heads of queries, K heads of keys and values, T length, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P
from ptrainx.errors import InputError, MeshError, PtrainxError, SpecError, TraceError
from ptrainx.ops.attention import blocks
from tests.compile.programs import values

SPEC = P(None, None, "seq")
T = 32


class Row(NamedTuple):
    """A kind of attention, and how many heads of keys the four of queries share."""

    kind: str
    causal: bool
    shared: int = 4
    dtype: torch.dtype = torch.float32
    heads: int = 4


ROWS = {
    "ring": Row("ring", False),
    "ring, causal": Row("ring", True),
    "ring, causal, one head of keys": Row("ring", True, 1),
    "zigzag, grouped": Row("zigzag", True, 2),
    "zigzag, bfloat16": Row("zigzag", True, 4, torch.bfloat16),
    "zigzag, without a mask": Row("zigzag", False, 1),
    "all-to-all": Row("all_to_all", False),
    "all-to-all, causal, grouped": Row("all_to_all", True, 2),
}
CASES: tuple[tuple[dict[str, int], tuple[str, ...]], ...] = (
    ({"seq": 1}, ("zigzag, grouped", "all-to-all, causal, grouped")),
    ({"seq": 2}, ("ring", "zigzag, bfloat16", "zigzag, without a mask", "all-to-all")),
    ({"seq": 4}, ("zigzag, grouped",)),
    ({"model": 2, "seq": 2}, ("ring, causal, one head of keys", "all-to-all, causal, grouped")),
    ({"seq": 8}, ("ring, causal",)),
)
"""Meshes, and what is tried on them; heads lie along "model"."""


def _inputs(row: Row) -> tuple[torch.Tensor, ...]:
    """q, k, v, and weights of a sum over the result."""
    shapes = [(2, heads, T, 8) for heads in (row.heads, row.shared, row.shared, row.heads)]
    return tuple(values(*shape, seed=i, dtype=torch.float64).mul(4).to(row.dtype) for i, shape in enumerate(shapes))


def _full(row: Row, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=row.causal, enable_gqa=True)


def _sharded(row: Row, q: Any, k: Any, v: Any) -> Any:
    if row.kind == "all_to_all":
        return px.ops.all_to_all_attention(q, k, v, causal=row.causal)
    order = "zigzag" if row.kind == "zigzag" else "contiguous"
    return px.ops.ring_attention(q, k, v, causal=row.causal, order=order)


def _with_gradients(row: Row, attention: Callable, q: Any, k: Any, v: Any, weights: Any) -> Any:
    """(gradients of a weighted sum, the attention)."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = attention(row, q, k, v)
        return (out * weights).sum(dtype=torch.float64), out

    return px.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)


def _ordered(row: Row, tensors: Any, index: Callable, n: int) -> list[torch.Tensor]:
    return [x[:, :, index(T, n)] if row.kind == "zigzag" else x for x in tensors]


def _run(mesh: Any, names: tuple[str, ...]) -> dict[str, list[torch.Tensor]]:
    """name -> (gradients of q, k, v, the attention), in the order of the sequence."""
    n, heads = mesh.shape["seq"], "model" if "model" in mesh.shape else None
    specs = {name: [P(None, heads if x.shape[1] > 1 else None, "seq") for x in _inputs(ROWS[name])] for name in names}
    step = px.jit(
        lambda args: {name: _with_gradients(ROWS[name], _sharded, *args[name]) for name in names},
        mesh=mesh,
        in_specs=(specs,),
        out_specs={name: (tuple(specs[name][:3]), specs[name][0]) for name in names},
    )
    args = {name: _ordered(ROWS[name], _inputs(ROWS[name]), px.ops.zigzag, n) for name in names}
    found = px.device_get(step(args))
    return {name: _ordered(ROWS[name], px.tree.leaves(found[name]), px.ops.unzigzag, n) for name in names}


def _check(found: dict[str, list[torch.Tensor]]) -> None:
    for name, got in found.items():
        row = ROWS[name]
        want = px.tree.leaves(_with_gradients(row, _full, *(x.double() for x in _inputs(row))))
        for what, a, b in zip(("dq", "dk", "dv", "attention"), got, want):
            assert a.dtype == row.dtype
            tolerance = 2e-2 if row.dtype == torch.bfloat16 else 1e-5
            error = ((a.double() - b).abs().max() / b.abs().max()).item()
            assert error < tolerance, f"{name}: {what} is off by {error:.1e}"


@pytest.mark.parametrize(("axes", "names"), CASES, ids=[str(axes) for axes, _ in CASES])
def test_values_and_gradients_are_those_of_full_attention(axes: dict[str, int], names: tuple[str, ...]) -> None:
    _check(_run(px.make_mesh(axes, simulate=True), names))


def _on_real_ranks(n: int) -> Any:
    return _run(px.make_mesh(seq=n), ("zigzag, grouped",) if n == 4 else ("zigzag, grouped", "all-to-all"))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.long
def test_in_processes(pool: Any, n: int) -> None:
    for found in pool.run(_on_real_ranks, n, n):
        _check(found)


W = values(2, 4, 16, 16) * 0.6
X = values(4, 16, 16, seed=1)


def _model(attention: Callable) -> Callable:
    """The loss of layers in a scan, each recomputed; X is [B, T, 16], W [layers, 4, 16, 16]."""

    @px.remat
    def layer(x: Any, w: Any) -> Any:
        q, k, v = ((x @ w[i]).unflatten(2, (4, 4)).transpose(1, 2) for i in range(3))
        return x + attention(q, k, v).transpose(1, 2).flatten(2) @ w[3]

    return lambda w, x: px.scan(lambda x, w: (layer(x, w), None), x, w)[0].square().mean()


def test_in_a_scan_of_recomputed_layers() -> None:
    want = px.value_and_grad(_model(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)))(W, X)
    ring = _model(lambda q, k, v: px.ops.ring_attention(q, k, v, causal=True, order="zigzag"))
    other = _model(lambda q, k, v: px.ops.all_to_all_attention(q, k, v, causal=True))

    def step(w: Any, x: Any) -> Any:
        order = px.ops.zigzag(16)
        return px.value_and_grad(ring)(w, px.reshard(x[:, order], P(None, "seq"))), px.value_and_grad(other)(
            w, px.reshard(x, P(None, "seq"))
        )

    mesh = px.make_mesh(seq=2, simulate=True)
    for got in px.device_get(px.jit(step, mesh=mesh, in_specs=P(), out_specs=P())(W, X)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_second_derivatives_and_the_eager_backend() -> None:
    mesh, row = px.make_mesh(seq=2, simulate=True), ROWS["zigzag, grouped"]
    q, k, v, weights = (x.double() for x in _inputs(row))

    def slope(attention: Callable, q: Any, k: Any, v: Any, weights: Any) -> Any:
        inner = px.grad(lambda k: (attention(row, q, k, v) * weights).sum())
        return px.grad(lambda k: inner(k).square().sum())(k)

    args = _ordered(row, (q, k, v, weights), px.ops.zigzag, 2)
    got = px.device_get(px.jit(lambda *a: slope(_sharded, *a), mesh=mesh, in_specs=SPEC, out_specs=SPEC)(*args))
    torch.testing.assert_close(*_ordered(row, [got], px.ops.unzigzag, 2), slope(_full, q, k, v, weights))
    eager = px.jit(
        lambda *a: _with_gradients(row, _sharded, *a), mesh=mesh, in_specs=SPEC, out_specs=SPEC, backend="eager"
    )
    found = px.tree.leaves(px.device_get(eager(*args)))
    want = px.tree.leaves(_with_gradients(row, _full, q, k, v, weights))
    for a, b in zip(_ordered(row, found, px.ops.unzigzag, 2), want):
        torch.testing.assert_close(a, b)


def test_in_the_body_of_a_shard_map_and_outside_of_a_step() -> None:
    mesh, row = px.make_mesh(seq=2, simulate=True), ROWS["ring, causal"]
    q, k, v, _ = _inputs(row)
    mapped = px.shard_map(lambda q, k, v: _sharded(row, q, k, v), mesh=mesh, in_specs=SPEC, out_specs=SPEC)
    torch.testing.assert_close(px.device_get(mapped(q, k, v)), _full(row, q, k, v))
    torch.testing.assert_close(_sharded(row, q, k, v), _full(row, q, k, v))
    with mesh:
        order = px.ops.zigzag(T)
        out = px.ops.ring_attention(q[:, :, order], k[:, :, order], v[:, :, order], causal=True, order="zigzag")
    torch.testing.assert_close(out, _full(row, q, k, v)[:, :, order])


def _lowered(n: int, kind: str, length: int = 1024) -> Any:
    q = px.ShapeDtypeStruct((1, 8, length, 16), torch.float32)
    row = Row(kind, True)
    loss = px.grad(lambda q, k, v: _sharded(row, q, k, v).square().sum(), argnums=(0, 1, 2))
    return px.jit(loss, mesh=px.AbstractMesh(seq=n), in_specs=SPEC, out_specs=SPEC).trace(q, q, q).lower()


def test_what_is_sent() -> None:
    block = 8 * 1024 // 4 * 16 * 4  # heads, a quarter of the length, head_dim, float32

    def sent(kind: str) -> dict[tuple, tuple[int, int]]:
        rows = [c for c in _lowered(4, kind).comms() if c.bytes > 64]
        assert all(c.asked and c.axis == "seq" for c in rows)
        kinds = {(c.kind, c.phase) for c in rows}
        return {k: tuple(map(sum, zip(*((c.count, c.bytes) for c in rows if (c.kind, c.phase) == k)))) for k in kinds}

    hop = 2 * block
    ring = {("permute", "forward"): (3, 3 * hop), ("permute", "backward"): (6, 6 * hop)}
    assert sent("ring") == sent("zigzag") == ring
    each = (4, 4 * block * 3 // 4)
    assert sent("all_to_all") == {("all_to_all", "forward"): each, ("all_to_all", "backward"): each}


def test_memory_of_a_rank_falls_with_the_shards_and_the_graph_stays_as_large() -> None:
    lowered = {n: _lowered(n, "zigzag") for n in (4, 8, 16)}
    peaks = {n: low.memory().peak_bytes for n, low in lowered.items()}
    assert peaks[16] < 0.51 * peaks[8]
    assert peaks[8] < 0.55 * peaks[4]
    sizes = {n: len(low.as_text().splitlines()) for n, low in lowered.items()}
    assert sizes[8] == sizes[16]


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_without_a_fused_kernel(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs elsewhere than on a CPU: matrix products of a few queries at a time."""
    monkeypatch.setattr(blocks, "QUERIES_AT_A_TIME", 5)
    q, k, v, weights = (x.double().requires_grad_() for x in _inputs(Row("ring", causal)))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    out, lse = blocks._products(q, k, v, causal, 8**-0.5)
    torch.testing.assert_close(out, want)
    got = blocks._products_backward(weights, q, k, v, out, lse, causal, 8**-0.5)
    torch.testing.assert_close(got, torch.autograd.grad(want, (q, k, v), weights))


def test_the_zigzag_order() -> None:
    assert px.ops.zigzag(16, 4).view(4, 2, 2).tolist() == [
        [[0, 1], [14, 15]],
        [[2, 3], [12, 13]],
        [[4, 5], [10, 11]],
        [[6, 7], [8, 9]],
    ]
    for n in (1, 2, 3, 8):
        x = torch.arange(48)
        assert torch.equal(x[px.ops.zigzag(48, n)][px.ops.unzigzag(48, n)], x)


def _q(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def _jit(fn: Callable, *args: Any, spec: Any = None, **axes: int) -> Any:
    return px.jit(fn, mesh=px.AbstractMesh(axes), in_specs=spec).trace(*args)


Q = _q(2, 4, 16, 8)
RING, ULYSSES = px.ops.ring_attention, px.ops.all_to_all_attention
REFUSED: dict[str, tuple[Callable[[], Any], type[PtrainxError], str]] = {
    "no such axis": (lambda: _jit(lambda q: RING(q, q, q, axis="sec"), Q, seq=2), MeshError, "no axis 'sec'"),
    "length": (lambda: _jit(RING, *[_q(2, 4, 15, 8)] * 3, seq=2), SpecError, "size 15 is not divisible by seq=2"),
    "chunks": (
        lambda: _jit(lambda q: RING(q, q, q, causal=True, order="zigzag"), _q(2, 4, 18, 8), seq=2),
        SpecError,
        "two chunks for each of 2 shards",
    ),
    "order": (lambda: RING(Q, Q, Q, order="striped"), InputError, "'contiguous' or 'zigzag'"),
    "several": (lambda: RING(Q, Q[:, :3], Q), InputError, "(2, 4, 16, 8)\n    4 heads of q can't share 3 heads of k"),
    "integers": (lambda: RING(Q, Q, Q.int()), InputError, "v is i32[2,4,16,8], not floating-point"),
    "heads on a rank": (lambda: _jit(ULYSSES, *[Q[:, :3]] * 3, seq=2), SpecError, "ring_attention, which does not cut"),
    "heads of keys": (
        lambda: _jit(lambda q: RING(q, q[:, :2], q[:, :2]), Q, spec=P(None, "model"), model=4, seq=2),
        SpecError,
        "k: dim 1 of size 2 is not divisible by model=4, as the heads of q are",
    ),
    "outside": (
        lambda: RING(*[px.device_put(Q, P(), px.make_mesh(seq=2, simulate=True))] * 3),
        TraceError,
        "px.jit",
    ),
    "shards": (lambda: px.ops.zigzag(16, 0), InputError, "shards=0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)
