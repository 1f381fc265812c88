"""`device_put`, `device_get`, `from_process_local` in one process: values, copies, trees, refusals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ptrainx.core import tree as px_tree
from ptrainx.core.errors import InputError, MeshError, SpecError, TreeError
from ptrainx.mesh import (
    AbstractMesh,
    P,
    block_until_ready,
    device_get,
    device_put,
    from_process_local,
    make_mesh,
    shutdown,
    spec_of,
)
from ptrainx.mesh.placement import local_block
from ptrainx.mesh.simulated import local_tensors, wrap_all
from ptrainx.mesh.transfer import default_mesh, describe_placed, reshard_value, same_mesh


@pytest.fixture(scope="module", autouse=True)
def _leave():
    yield
    shutdown()


MESHES = {
    "one": lambda: make_mesh(data=1, model=1),
    "2x1": lambda: make_mesh(data=2, model=1, simulate=True),
    "1x2": lambda: make_mesh(data=1, model=2, simulate=True),
    "2x2": lambda: make_mesh(data=2, model=2, simulate=True),
    "2x4": lambda: make_mesh(data=2, model=4, simulate=True),
    "model first": lambda: make_mesh(model=4, data=2, simulate=True),
}
SPECS = [
    None,
    P(),
    P("data"),
    P("model"),
    P(None, "data"),
    P(None, "model"),
    P("data", "model"),
    P("model", "data"),
    P(unreduced="data"),
    P(unreduced=("data", "model")),
    P("model", unreduced="data"),
    P(None, "data", unreduced="model"),
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def a_value(dtype=torch.float32) -> torch.Tensor:
    x = torch.arange(64).reshape(8, 8)
    return (x % 3 == 0) if dtype == torch.bool else x.to(dtype)


def memory(value: torch.Tensor) -> set[int]:
    """The memory that a plain or placed value stands on."""
    parts = local_tensors(value).values() if isinstance(value, DTensor) else [value]
    return {part.untyped_storage().data_ptr() for part in parts}


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_there_and_back(mesh_name, spec):
    mesh, x = MESHES[mesh_name](), a_value()
    placed = device_put(x, spec, mesh)
    assert isinstance(placed, DTensor)
    assert spec_of(placed) == (spec or P())
    assert (placed.shape, placed.dtype) == (x.shape, x.dtype)
    back = device_get(placed)
    assert type(back) is torch.Tensor
    assert back.equal(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [P(), P("data", "model"), P("model", unreduced="data")], ids=str)
def test_dtypes(dtype, spec):
    x = a_value(dtype)
    back = device_get(device_put(x, spec, MESHES["2x4"]()))
    assert back.dtype == dtype
    assert back.equal(x)


@pytest.mark.parametrize("spec", [s for s in SPECS if s is not None], ids=str)
def test_each_rank_holds_its_block_contiguously(spec):
    mesh, x = MESHES["2x4"](), a_value().t()
    placed = device_put(x, spec, mesh)
    for rank, part in local_tensors(placed).items():
        coords = dict(zip(mesh.axis_names, mesh.rank_coords(rank)))
        block = x[local_block(spec, mesh, x.shape, rank)]
        owes = any(coords[axis] for axis in spec.unreduced)
        assert part.equal(torch.zeros_like(block) if owes else block)
        assert part.is_contiguous()
    assert placed.stride() == (8, 1)


LEAVES = [
    (True, torch.tensor(True)),
    (3, torch.tensor(3)),
    (2.5, torch.tensor(2.5)),
    (np.float64(2.5), torch.tensor(2.5, dtype=torch.float64)),
    (np.int8(3), torch.tensor(3, dtype=torch.int8)),
    (np.array(1.5, np.float32), torch.tensor(1.5)),
    (torch.tensor(1.5), torch.tensor(1.5)),
]


@pytest.mark.parametrize(("leaf", "right"), LEAVES, ids=[repr(v) for v, _ in LEAVES])
@pytest.mark.parametrize("mesh_name", ["one", "2x4"])
def test_0d_values_come_out_as_plain_tensors(leaf, right, mesh_name):
    placed = device_put(leaf, None, MESHES[mesh_name]())
    assert type(placed) is torch.Tensor
    assert placed.dtype == right.dtype
    assert placed.equal(right)
    assert device_get(placed).equal(right)
    assert f"{float(placed):.1f}" == f"{float(right):.1f}"


ARRAYS = [
    np.arange(64.0).reshape(8, 8),
    np.asfortranarray(np.arange(64).reshape(8, 8)),
    np.arange(64).reshape(8, 8)[::-1],
    np.arange(128, dtype=np.int16).reshape(8, 16)[:, ::2],
    np.arange(64, dtype=">f4").reshape(8, 8),
    np.broadcast_to(np.float32(2), (8, 8)),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype.str}{a.strides}")
@pytest.mark.parametrize("mesh_name", ["one", "2x4"])
def test_numpy(array, mesh_name):
    back = device_get(device_put(array, P("data", "model"), MESHES[mesh_name]()))
    np.testing.assert_array_equal(back.numpy(), array)


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_nothing_aliases(mesh_name, spec):
    mesh, x = MESHES[mesh_name](), a_value()
    placed = device_put(x, spec, mesh)
    again = device_put(placed, spec, mesh)
    back, other = device_get(placed), device_get(placed)
    spaces = [memory(value) for value in (x, placed, again, back, other)]
    for i, space in enumerate(spaces):
        assert all(space.isdisjoint(later) for later in spaces[i + 1 :])
    x.zero_()
    back.zero_()
    other.zero_()
    assert device_get(placed).equal(a_value())


@pytest.mark.parametrize("mesh_name", ["one", "2x1"])
@pytest.mark.parametrize("start", SPECS[1::2], ids=str)
def test_moved_values_alias_nothing(mesh_name, start):
    mesh = MESHES[mesh_name]()
    placed = device_put(a_value(), start, mesh)
    for target in SPECS:
        moved = device_put(placed, target, mesh)
        assert memory(moved).isdisjoint(memory(placed))
        assert spec_of(moved) == (spec_of(placed) if target is None else target)
        assert device_get(moved).equal(a_value())


def test_plain_leaves_are_copied_on_the_way_back_too():
    x, array, locked = torch.ones(3), np.ones(3), np.ones(3)
    locked.flags.writeable = False
    back = device_get({"x": x, "array": array, "locked": locked, "n": 1, "zero_d": torch.tensor(1.0)})
    for leaf in px_tree.leaves(back):
        leaf.zero_()
    assert x.sum() == array.sum() == locked.sum() == 3


def test_a_0d_tensor_is_copied():
    x = torch.tensor(1.0)
    device_put(x, None, MESHES["one"]()).zero_()
    assert x == 1


class Moments(NamedTuple):
    mu: Any
    nu: Any


@pytest.mark.parametrize("mesh_name", ["one", "2x4"])
def test_trees_and_prefixes(mesh_name):
    x = a_value()
    tree = {"step": 0, "params": {"w": x, "b": np.ones(8, np.float32)}, "opt": Moments(x + 1, None), "none": None}
    specs = {"step": None, "params": {"w": P(None, "model"), "b": P("model")}, "opt": P("data"), "none": P()}
    placed = device_put(tree, specs, MESHES[mesh_name]())
    assert px_tree.structure(placed) == px_tree.structure(tree)
    assert spec_of(placed["params"]["w"]) == P(None, "model")
    assert spec_of(placed["params"]["b"]) == P("model")
    assert spec_of(placed["opt"].mu) == P("data")
    back = device_get(placed)
    assert back["none"] is None
    assert back["opt"].nu is None
    assert back["step"].equal(torch.tensor(0))
    assert back["params"]["w"].equal(x)
    assert back["opt"].mu.equal(x + 1)


@pytest.mark.parametrize("tree", [None, {}, [], (), {"a": None}])
def test_empty_trees(tree):
    mesh = MESHES["2x4"]()
    assert device_put(tree, P(), mesh) == device_get(tree) == from_process_local(tree, P(), mesh) == tree


def test_a_placed_value_without_a_spec_stays_where_it_is():
    placed = device_put(a_value(), P("data", unreduced="model"), MESHES["2x4"]())
    assert spec_of(device_put({"x": placed})["x"]) == P("data", unreduced=("model",))


def test_the_values_mesh_is_the_default_and_then_the_ambient_one():
    mesh, x = MESHES["2x4"](), a_value()
    with mesh:
        assert spec_of(device_put(x, P("model"))) == P("model")
    placed = device_put(x, P("data"), mesh)
    assert same_mesh(device_put({"a": x, "b": placed}, P("model"))["a"], mesh)


def test_gradients_stay_behind():
    w = torch.ones(8, requires_grad=True)
    placed = device_put(torch.nn.Parameter(w), P("data"), MESHES["2x4"]())
    assert not placed.requires_grad
    placed.requires_grad_()
    assert not device_put(placed * 2, P("model")).requires_grad
    assert not device_get(placed).requires_grad
    assert not device_get(w).requires_grad


def test_other_sums_that_are_owed():
    mesh = MESHES["2x1"]()
    parts = [torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])]
    for op, right in {"avg": [2.0, 3.5], "max": [3.0, 5.0], "min": [1.0, 2.0]}.items():
        spec = device_put(torch.zeros(2), P(), mesh)._spec
        value = wrap_all(
            [p.clone() for p in parts], type(spec)(spec.mesh, (Partial(op), Replicate()), spec.tensor_meta)
        )
        assert device_get(value).tolist() == right
        for target in (P(), P("data"), P(unreduced="data")):
            assert device_get(device_put(value, target)).tolist() == right


def test_user_made_dtensors_of_a_real_mesh():
    mesh = MESHES["one"]()
    value = torch.distributed.tensor.distribute_tensor(a_value(), mesh.device_mesh, [Shard(0), Shard(1)])
    assert device_get(value).equal(a_value())
    zero_d = torch.distributed.tensor.distribute_tensor(torch.tensor(2.0), mesh.device_mesh)
    assert type(device_put(zero_d, None)) is torch.Tensor


def test_from_process_local_in_one_process():
    x = a_value()
    for mesh_name in ("one", "2x4"):
        rows = from_process_local({"x": x, "n": 3}, {"x": P("data"), "n": None}, MESHES[mesh_name]())
        assert spec_of(rows["x"]) == P("data")
        assert device_get(rows["x"]).equal(x)
        assert memory(rows["x"]).isdisjoint(memory(x))
        assert type(rows["n"]) is torch.Tensor


def test_reshard_value_gives_the_same_object_where_nothing_changes():
    mesh = MESHES["2x4"]()
    placed = device_put(a_value(), P("data"), mesh)
    assert reshard_value(placed, P("data", None), mesh) is placed
    assert spec_of(reshard_value(placed, P("model"), mesh)) == P("model")


def test_reshard_value_is_differentiable():
    mesh = MESHES["2x4"]()
    w = device_put(a_value(), P("data"), mesh).requires_grad_()
    (reshard_value(w, P(None, "model"), mesh) ** 2).sum().backward()
    assert device_get(w.grad).equal(2 * a_value())


def test_block_until_ready_gives_the_tree_back():
    tree = {"a": device_put(a_value(), P("data"), MESHES["2x4"]()), "b": [1.0, torch.ones(2)]}
    assert block_until_ready(tree) is tree


def test_describe_placed():
    assert describe_placed(device_put(a_value(), P("data"), MESHES["2x4"]())) == "f32[8,8] P('data', None)"
    assert describe_placed(torch.ones(2)) == "f32[2]"


def on(mesh_name, x=None, spec=None):
    return device_put(a_value() if x is None else x, spec, MESHES[mesh_name]())


def one_ranks_part():
    return DTensor.from_local(torch.ones(4), MESHES["2x4"]().device_mesh, [Shard(0), Replicate()])


# call, error, message
REFUSED = [
    (
        lambda: on("2x4", a_value()[:7], P(("data", "model"))),
        SpecError,
        r"value: dim 0 of size 7 .* divisible by data=2",
    ),
    (lambda: on("2x4", {"w": [a_value()[:7]]}, P(("data", "model"))), SpecError, r"\['w'\]\[0\]: dim 0 of size 7"),
    (lambda: on("2x4", {"w": 1.0}, P("data")), SpecError, r"\['w'\]: P\('data'\) has 1 entries for a value of 0 dims"),
    (lambda: on("2x4", a_value(), P("dta")), SpecError, r"names axis 'dta'"),
    (lambda: on("2x4", {"a": "text"}), TreeError, r"\['a'\] is a leaf of unknown type builtins\.str"),
    (lambda: on("2x4", {"a": 1}, {"b": P()}), TreeError, r"\['b'\]: in the specs, not in the value"),
    (lambda: device_get({"a": object()}), TreeError, r"\['a'\] is a leaf of unknown type"),
    (
        lambda: device_put(on("2x4"), P(), MESHES["2x2"]()),
        MeshError,
        r"value lives on another mesh\n  got: +Mesh\(data=2, model=4, simulated\)\n  expected: Mesh\(data=2, model=2",
    ),
    (
        lambda: device_put({"a": on("2x4"), "b": on("2x2")}, P()),
        MeshError,
        r"different meshes meet\n  got: +Mesh\(data=2, model=4, simulated\) and Mesh\(data=2, model=2, simulated\)",
    ),
    (
        lambda: default_mesh([on("one"), on("2x1")]),
        MeshError,
        r"Mesh\(data=1, model=1, device='cpu'\) and Mesh\(data=2, model=1, simulated\)",
    ),
    (
        lambda: device_put(on("one"), P(), make_mesh(data=1, model=1, simulate=True)),
        MeshError,
        r"got: +Mesh\(data=1, model=1, device='cpu'\)\n  expected: Mesh\(data=1, model=1, simulated\)",
    ),
    (lambda: device_put(a_value(), P(), AbstractMesh(data=2)), MeshError, r"has no devices to place values on"),
    (lambda: from_process_local(a_value(), P(), AbstractMesh(data=2)), MeshError, r"has no devices to place"),
    (lambda: from_process_local([on("2x4")], P()), InputError, r"\[0\] is placed already"),
    (lambda: from_process_local([on("one")], P()), InputError, r"\[0\] is placed already"),
    (lambda: from_process_local(1.0, P("data"), MESHES["one"]()), SpecError, r"1 entries for a value of 0 dims"),
    (lambda: from_process_local(a_value(), P("x"), MESHES["one"]()), SpecError, r"names axis 'x'"),
    (lambda: device_get(one_ranks_part()), MeshError, r"holds one rank's part of a value on a simulated mesh"),
    (lambda: device_put([one_ranks_part()]), MeshError, r"holds one rank's part"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[r[2][:50] for r in REFUSED])
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_way_between_meshes_that_the_error_names():
    value = on("2x4", spec=P("data"))
    moved = device_put(device_get(value), P("model"), MESHES["2x2"]())
    assert device_get(moved).equal(a_value())
