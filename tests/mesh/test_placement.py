"""Spec to DTensor placements and back, the block of a value that a rank holds, and specs that do not fit."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import SpecError
from ptrainx.mesh import AbstractMesh, P, make_mesh, placements_of, spec_of
from ptrainx.mesh.placement import check_spec, contiguous_strides, local_block, local_shape, spec_of_placements

MESH = AbstractMesh(data=2, model=3)

# spec, placements over (data, model), the block of each rank of a 6 x 6 value: (rows, columns)
TABLE = [
    (P(), (Replicate(), Replicate()), [((0, 6), (0, 6))] * 6),
    (P("data"), (Shard(0), Replicate()), [((0, 3), (0, 6))] * 3 + [((3, 6), (0, 6))] * 3),
    (P("model"), (Replicate(), Shard(0)), [((2 * m, 2 * m + 2), (0, 6)) for _ in range(2) for m in range(3)]),
    (P(None, "model"), (Replicate(), Shard(1)), [((0, 6), (2 * m, 2 * m + 2)) for _ in range(2) for m in range(3)]),
    (
        P("data", "model"),
        (Shard(0), Shard(1)),
        [((3 * d, 3 * d + 3), (2 * m, 2 * m + 2)) for d in range(2) for m in range(3)],
    ),
    (
        P("model", "data"),
        (Shard(1), Shard(0)),
        [((2 * m, 2 * m + 2), (3 * d, 3 * d + 3)) for d in range(2) for m in range(3)],
    ),
    (P(("data", "model")), (Shard(0), Shard(0)), [((r, r + 1), (0, 6)) for r in range(6)]),
    (P(None, ("data", "model")), (Shard(1), Shard(1)), [((0, 6), (r, r + 1)) for r in range(6)]),
    (P(unreduced="data"), (Partial(), Replicate()), [((0, 6), (0, 6))] * 6),
    (
        P("model", unreduced="data"),
        (Partial(), Shard(0)),
        [((2 * m, 2 * m + 2), (0, 6)) for _ in range(2) for m in range(3)],
    ),
    (P(unreduced=("data", "model")), (Partial(), Partial()), [((0, 6), (0, 6))] * 6),
]


@pytest.mark.parametrize(("spec", "placements", "blocks"), TABLE, ids=[str(t[0]) for t in TABLE])
def test_spec_placements_and_blocks(spec, placements, blocks):
    check_spec(spec, MESH, (6, 6))
    assert placements_of(spec, MESH) == placements
    assert spec_of_placements(placements, MESH.axis_names, 2) == spec
    found = [local_block(spec, MESH, (6, 6), rank) for rank in range(6)]
    assert found == [tuple(slice(*bounds) for bounds in block) for block in blocks]
    assert {local_shape(spec, MESH, (6, 6))} == {tuple(b - a for a, b in block) for block in blocks}


@pytest.mark.parametrize("spec", [t[0] for t in TABLE], ids=str)
def test_blocks_are_dtensors_own(spec):
    """torch's own arithmetic for the placements gives the same blocks."""
    mesh = make_mesh(data=2, model=3, simulate=True)
    for rank in range(6):
        shape, offset = tc.compute_local_shape_and_global_offset(
            (6, 6), mesh.rank_view(rank), placements_of(spec, mesh)
        )
        block = local_block(spec, mesh, (6, 6), rank)
        assert tuple(shape) == tuple(s.stop - s.start for s in block)
        assert tuple(offset) == tuple(s.start for s in block)


SHAPES = [(), (1,), (4,), (2, 0, 3), (2, 3, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contiguous_strides(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()


def test_every_block_once():
    """Over all specs of a 3-d value on 3 axes, each element is held by exactly the ranks that the spec says."""
    mesh = AbstractMesh(a=2, b=2, c=2)
    entries = [None, "a", "b", "c", ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")]
    count = 0
    for choice in product(entries, repeat=3):
        try:
            spec = P(*choice)
        except SpecError:
            continue
        held = torch.zeros(8, 8, 8, dtype=torch.int64)
        for rank in range(8):
            held[local_block(spec, mesh, (8, 8, 8), rank)] += 1
        assert (held == 8 // 2 ** len(spec.axes)).all(), spec
        assert spec_of_placements(placements_of(spec, mesh), mesh.axis_names, 3) == spec
        count += 1
    assert count > 50


def test_negative_dims_and_strided_shards():
    assert spec_of_placements((Shard(-1), Replicate()), ("data", "model"), 3) == P(None, None, "data")
    strided = (_StridedShard(0, split_factor=3), Shard(0))  # model first, then data: model is major
    assert spec_of_placements(strided, ("data", "model"), 1, (2, 3)) == P(("model", "data"))
    inner = (_StridedShard(0, split_factor=2), Shard(0), Shard(0))
    assert spec_of_placements(inner, ("a", "b", "c"), 1, (2, 2, 2)) == P(("b", "a", "c"))


def test_spec_of_a_value():
    mesh = make_mesh(data=2, model=2, simulate=True)
    value = DTensor.from_local(torch.zeros(2, 2), mesh.device_mesh, (Shard(1), Partial()), run_check=False)
    assert spec_of(value) == P(None, "data", unreduced=("model",))


# spec, shape, message
REFUSED = [
    (
        P("dta"),
        (4,),
        r"w: P\('dta'\) names axis 'dta', .* not have\n.*\n  expected: one of 'data', 'model'",
    ),
    (P(("data", "x")), (4,), r"names axis 'x'"),
    (P(unreduced="x"), (4,), r"names axis 'x'"),
    (P("data"), (), r"w: P\('data'\) has 1 entries for a value of 0 dims\n  got: +shape \(\)"),
    (P(None, "data"), (4,), r"has 2 entries for a value of 1 dims"),
    (
        P(("data", "model")),
        (5, 6),
        r"w: dim 0 of size 5 is not divisible by data=2\n  got: .*\(5, 6\) with P\(\('data', 'model'\)\)",
    ),
    (P(("data", "model")), (5, 6), r"fix: +pad dim 0 to 6, split another dim"),
    (P(("model", "data")), (6,), r"dim 0 is split by \('model', 'data'\), which is not the order of the mesh's axes"),
]


@pytest.mark.parametrize(("spec", "shape", "message"), REFUSED, ids=[f"{r[0]}-{r[1]}" for r in REFUSED])
def test_specs_that_do_not_fit(spec, shape, message):
    with pytest.raises(SpecError, match=message):
        check_spec(spec, MESH, shape, "w")


EQUAL_PARTS = [
    (P(None, "model"), (5, 7), r"dim 1 of size 7 is not divisible by model=3\n(.|\n)*a multiple of 3\n.*to 9"),
    (P(("data", "model")), (4,), r"dim 0 of size 4 is not divisible by data=2 x model=3\n(.|\n)*a multiple of 6"),
]


@pytest.mark.parametrize(("spec", "shape", "message"), EQUAL_PARTS, ids=[f"{r[0]}-{r[1]}" for r in EQUAL_PARTS])
def test_where_parts_have_to_be_equal(spec, shape, message):
    check_spec(spec, MESH, shape, "w")
    with pytest.raises(SpecError, match=message):
        check_spec(spec, MESH, shape, "w", even=True)


FITS = [(P(None, None, None), (4,)), (P(), ()), (P("data"), (0,)), (P("data"), (5, 3)), (P(None, "model"), (1, 2))]


@pytest.mark.parametrize(("spec", "shape"), FITS, ids=str)
def test_specs_that_do(spec, shape):
    check_spec(spec, MESH, shape)
