"""Values of a simulated mesh with PyTorch's eager operations: equal to what one device computes."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ptrainx.core.errors import InputError, MeshError
from ptrainx.mesh import P, device_get, device_put, make_mesh, placements_of, spec_of
from ptrainx.mesh.simulated import SimulatedDTensor, local_tensors, on_all_ranks

MESHES = {
    "2x4": {"data": 2, "model": 4},
    "4x2": {"data": 4, "model": 2},
    "8x1": {"data": 8, "model": 1},
    "1x2": {"data": 1, "model": 2},
}
SPECS = [P(), P("data"), P(None, "model"), P("data", "model"), P("model", "data"), P(("data", "model"))]
UNREDUCED = [P(unreduced="data"), P("data", unreduced="model"), P(unreduced=("data", "model"))]


def mesh_of(name="2x4"):
    return make_mesh(MESHES[name], simulate=True)


def a_value(seed=0, shape=(8, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def placed(x, spec, name="2x4"):
    return device_put(x, spec, mesh_of(name))


OPERATIONS = {
    "add a number": lambda x: x + 1,
    "pointwise": lambda x: torch.tanh(x) * x.exp() - x / 2,
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(1),
    "sum of columns": lambda x: x.sum(0),
    "mean": lambda x: x.mean(),
    "mean kept": lambda x: x.mean(1, keepdim=True),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(),
    "argmax": lambda x: x.argmax(1),
    "variance": lambda x: x.var(0),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax of columns": lambda x: torch.softmax(x, 0),
    "matmul": lambda x: x @ x,
    "matmul transposed": lambda x: x @ x.t(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "gelu": F.gelu,
    "relu of a sum owed": lambda x: torch.relu(x.sum(0)),
    "cat": lambda x: torch.cat([x, x + 1]),
    "stack": lambda x: torch.stack([x, x + 1], 1),
    "rows": lambda x: x[2:5],
    "one row": lambda x: x[3],
    "transpose": lambda x: x.transpose(0, 1).contiguous(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "flatten": lambda x: x.reshape(-1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: torch.topk(x, 3, -1).values,
    "cumsum": lambda x: x.cumsum(1),
    "dtype": lambda x: x.float(),
    "zeros_like": torch.zeros_like,
    "norm": lambda x: x.norm(),
    "triu": torch.triu,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("spec", [*SPECS[1:5], *UNREDUCED[1:]], ids=str)
def test_operations(operation, spec):
    x, function = a_value(), OPERATIONS[operation]
    out = function(placed(x, spec))
    assert isinstance(out, SimulatedDTensor)
    torch.testing.assert_close(device_get(out), function(x), rtol=1e-12, atol=1e-12)


def loss_of(x, w):
    return (torch.tanh(x @ w) ** 2).mean()


# how, mesh, placements of x and w
GRADIENTS = [
    *(("full_tensor().backward", "2x4", x_spec, w_spec) for x_spec in SPECS[:4] for w_spec in SPECS[:4]),
    *((how, "2x4", P("data"), w_spec) for how in ("backward", "grad", "second order") for w_spec in SPECS[:4]),
    *((how, name, P("data"), P(None, "model")) for how in ("backward", "second order") for name in MESHES),
]


@pytest.mark.parametrize(("how", "name", "x_spec", "w_spec"), GRADIENTS, ids=str)
def test_gradients(how, name, x_spec, w_spec):
    x, w = a_value(0), a_value(1)
    dx, dw = placed(x, x_spec, name).requires_grad_(), placed(w, w_spec, name).requires_grad_()
    x.requires_grad_()
    w.requires_grad_()

    def gradients(x, w):
        loss = loss_of(x, w)
        if how == "backward":
            loss.backward()
            return x.grad, w.grad
        if how == "full_tensor().backward":
            (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
            return x.grad, w.grad
        if how == "grad":
            return torch.autograd.grad(loss, (x, w))
        first = torch.autograd.grad(loss, (x, w), create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in first), (x, w))

    for found, right in zip(gradients(dx, dw), gradients(x, w)):
        assert isinstance(found, SimulatedDTensor)
        torch.testing.assert_close(device_get(found), right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("start", SPECS + UNREDUCED, ids=str)
@pytest.mark.parametrize("target", SPECS, ids=str)
@pytest.mark.parametrize("name", ["2x4", "1x2"])
def test_redistribute(start, target, name):
    x, mesh = a_value(), mesh_of(name)
    w = device_put(x, start, mesh).requires_grad_()
    moved = w.redistribute(mesh.device_mesh, placements_of(target, mesh))
    assert spec_of(moved) == target
    assert device_get(moved).equal(x)
    (moved**2).sum().full_tensor().backward()
    torch.testing.assert_close(device_get(w.grad), 2 * x)


def test_redistribute_defaults_to_replicas_and_casts_forward():
    w = placed(a_value(), P("data")).requires_grad_()
    moved = w.redistribute(forward_dtype=torch.float32)
    assert moved.placements == (Replicate(), Replicate())
    assert moved.dtype == torch.float32
    moved.sum().backward()
    assert w.grad.dtype == torch.float64


def test_redistribute_to_where_it_is_gives_a_value_with_a_gradient():
    w = placed(a_value(), P("data")).requires_grad_()
    (w.redistribute(placements=w.placements) * 3).sum().backward()
    assert (device_get(w.grad) == 3).all()


@pytest.mark.parametrize("spec", SPECS + UNREDUCED, ids=str)
def test_full_tensor_is_plain_and_differentiable(spec):
    x = a_value()
    w = placed(x, spec).requires_grad_()
    whole = w.full_tensor()
    assert type(whole) is torch.Tensor
    assert whole.equal(x)
    (whole**2).sum().backward()
    torch.testing.assert_close(device_get(w.grad), 2 * x)


def test_values_that_are_not_numbers_come_back():
    x = a_value()
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    for spec in SPECS:
        torch.testing.assert_close(device_get(placed(x, spec)), x, equal_nan=True)


def test_to_local_is_every_ranks_part():
    x = a_value()
    w = placed(x, P("data")).requires_grad_()
    local = w.to_local()
    assert all(part.equal(x[:4] if rank < 4 else x[4:]) for rank, part in local._local_tensors.items())
    (local * 2).sum().backward(torch.ones_like(local.sum()))
    assert (device_get(w.grad) == 2).all()


IN_PLACE = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(3).sub_(1),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(2.0),
    "copy_": lambda x: x.copy_(x * 2),
    "clamp_": lambda x: x.clamp_(min=0),
    "+=": lambda x: x.__iadd__(x),
    "addcmul_": lambda x: x.addcmul_(x, x, value=0.5),
}


@pytest.mark.parametrize("operation", IN_PLACE)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_in_place(operation, spec):
    x = a_value()
    value = placed(x, spec)
    alias = value.detach()
    out = IN_PLACE[operation](value)
    assert out is value
    assert type(value) is SimulatedDTensor
    right = IN_PLACE[operation](x.clone())
    torch.testing.assert_close(device_get(value), right)
    torch.testing.assert_close(device_get(alias), right)


@pytest.mark.parametrize("call", [torch.Tensor.squeeze_, torch.Tensor.t_, lambda x: x.unsqueeze_(0)])
def test_a_shape_does_not_change_in_place(call):
    value = placed(a_value(shape=(8, 1)), P("data"))
    with pytest.raises(InputError, match=r"would change the shape of a placed value in place"):
        call(value)
    assert device_get(value).shape == value.shape == (8, 1)


def test_clone_and_detach():
    x = a_value()
    value = placed(x, P("data", "model")).requires_grad_()
    cloned, detached = value.clone(), value.detach()
    assert cloned.requires_grad
    assert not detached.requires_grad
    detached.zero_()
    assert device_get(value).equal(torch.zeros_like(x))
    assert device_get(cloned).equal(x)


@pytest.mark.parametrize("spec", SPECS + UNREDUCED, ids=str)
def test_deepcopy(spec):
    x = a_value()
    value = placed(x, spec).requires_grad_()
    value.grad = placed(x, spec)
    tree = copy.deepcopy({"a": value, "b": [value]})
    again = tree["a"]
    assert tree["b"][0] is again
    assert type(again) is SimulatedDTensor
    assert again.requires_grad
    assert spec_of(again) == spec
    with torch.no_grad():
        value.zero_()
        value.grad.zero_()
    assert device_get(again).equal(x)
    assert device_get(again.grad).equal(x)
    assert again.device_mesh is value.device_mesh


def test_deepcopy_of_a_module_with_parameters_on_the_mesh():
    module = torch.nn.Linear(8, 8, bias=False)
    module.weight = torch.nn.Parameter(placed(a_value(), P("model")))
    again = copy.deepcopy(module)
    assert isinstance(again.weight, torch.nn.Parameter)
    assert [name for name, _ in again.named_parameters()] == ["weight"]
    assert device_get(again.weight).equal(a_value())


def test_deepcopy_of_what_an_operation_made_is_refused():
    value = placed(a_value(), P("data")).requires_grad_() * 2
    with pytest.raises(InputError, match=r"deep-copied(.|\n)*copy value\.detach\(\)"):
        copy.deepcopy(value)


@pytest.mark.parametrize("dump", [pickle.dumps, lambda value: torch.save(value, io.BytesIO())])
def test_pickling_is_refused(dump):
    with pytest.raises(MeshError, match=r"data=2, model=4 can't be pickled(.|\n)*px\.device_get"):
        dump({"w": placed(a_value(), P("data"))})


READS = {
    "item": lambda x: x.item(),
    "float": float,
    "int": lambda x: int(x * 0 + 3),
    "bool": lambda x: bool(x > 0),
    "format": lambda x: f"{x:.6f}",
    "if": lambda x: 1 if x < 0 else 2,
    "comparison": lambda x: float(x) == x.full_tensor().item() if isinstance(x, DTensor) else True,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("spec", [*SPECS[:4], *UNREDUCED[1:]], ids=str)
def test_0d_results_are_read_whole(read, spec):
    """Also where they are sums still owed, which a rank alone doesn't know."""
    x = torch.arange(64.0, dtype=torch.float64).reshape(8, 8)
    assert READS[read](placed(x, spec).sum()) == READS[read](x.sum())


def test_equal():
    x = a_value()
    for one in SPECS + UNREDUCED:
        assert torch.equal(placed(x, one), placed(x, P("model")))
        assert not torch.equal(placed(x, one), placed(x + 1, P("model")))


def test_an_optimizer_of_torch():
    x, w = a_value(0), a_value(1)
    plain, ours = torch.nn.Parameter(w.clone()), torch.nn.Parameter(placed(w, P(None, "model")))
    assert isinstance(ours, SimulatedDTensor)
    data = placed(x, P("data"))
    for value, parameter in ((x, plain), (data, ours)):
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(value, parameter).backward()
            torch.nn.utils.clip_grad_norm_([parameter], 0.1)
            optimizer.step()
    torch.testing.assert_close(device_get(ours), plain.detach())


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_random_operations_draw_anew_each_time():
    value = placed(a_value(), P("data"))
    torch.manual_seed(0)
    one, two = device_get(torch.rand_like(value)), device_get(torch.rand_like(value))
    torch.manual_seed(0)
    again = device_get(torch.rand_like(value))
    assert not one.equal(two)
    assert one.equal(again)


def test_two_meshes_in_turn():
    """The second mesh never sees what DTensor remembers of the first."""
    x, w = a_value(0), a_value(1)
    right = loss_of(x, w).item()
    names = ["2x4", "4x2", "8x1", "1x2"]
    values = {n: (placed(x, P("data"), n), placed(w, P(None, "model"), n)) for n in names}
    for _ in range(3):
        for name in names:
            assert loss_of(*values[name]).item() == pytest.approx(right, rel=1e-12)
            assert device_get(values[name][0] @ values[name][1]).allclose(x @ w)


def test_meshes_come_and_go():
    x = a_value()
    for n in (2, 4, 8, 2, 4, 8):
        value = device_put(x, P("data"), make_mesh(data=n, simulate=True))
        assert device_get(value.sum(0)).allclose(x.sum(0))
        del value
        gc.collect()


def test_values_of_two_meshes_do_not_meet():
    x = a_value()
    with pytest.raises(MeshError, match=r"aten\.add(.|\n)*data=2, model=4(.|\n)*data=4, model=2(.|\n)*device_put"):
        placed(x, P(), "2x4") + placed(x, P(), "4x2")
    with pytest.raises(MeshError, match=r"redistribute moves a value on its own mesh"):
        placed(x, P()).redistribute(mesh_of("4x2").device_mesh, [Replicate(), Replicate()])


def test_a_replicated_dtensor_of_a_tool_joins_in():
    """`from_local` in a tool gives a DTensor with one local tensor: every rank's, if it is replicated."""
    x = a_value()
    mesh = mesh_of()
    other = DTensor.from_local(x, mesh.device_mesh, [Replicate(), Replicate()], run_check=False)
    assert device_get(placed(x, P("data")) + other).equal(2 * x)
    owed = DTensor.from_local(x, mesh.device_mesh, [Partial(), Replicate()], run_check=False)
    assert device_get(placed(x, P(), "2x4") + owed).equal(3 * x)


def test_a_collective_that_is_not_simulated_is_refused():
    value = placed(a_value(), P("data"))
    with on_all_ranks(value.device_mesh), pytest.raises(MeshError, match=r"_coalesced can't be simulated"):
        torch.ops._c10d_functional.all_reduce_coalesced([value._local_tensor], "sum", "nobody")


REPRS = [
    (P("data", "model"), "DTensor(f64[8,8] P('data', 'model') on Mesh(data=2, model=4, simulated),\n    [["),
    (P(unreduced="data"), "DTensor(f64[8,8] P(None, None, unreduced=('data',)) on Mesh(data=2, model=4, simulated),\n"),
]


@pytest.mark.parametrize(("spec", "start"), REPRS, ids=[str(s) for s, _ in REPRS])
def test_prints_the_whole_value_once(spec, start):
    x = torch.arange(64.0, dtype=torch.float64).reshape(8, 8)
    text = repr(placed(x, spec))
    assert text.startswith(start)
    assert text == str(placed(x, spec)) == f"{placed(x, spec)}"
    assert text.count("63.") == text.count("42.") == 1
    assert len(text.splitlines()) == 9
    assert text.endswith("dtype=torch.float64)")


def test_prints_0d_values_on_a_line():
    assert repr(placed(torch.ones(8), P("data")).sum()) == (
        "DTensor(f32[] P(unreduced=('data',)) on Mesh(data=2, model=4, simulated), 8.)"
    )


def test_prints_what_gradients_need():
    value = placed(torch.ones(8), P("data")).requires_grad_()
    assert repr(value).endswith("1.], requires_grad=True)")
    assert ", grad_fn=<MulBackward0>)" in repr(value * 2)


def test_a_large_value_is_summarised_or_left_out():
    assert len(repr(placed(torch.ones(64, 64), P("data"))).splitlines()) < 10
    assert repr(placed(torch.ones(2048, 1024), P("data"))) == (
        "DTensor(f32[2048,1024] P('data', None) on Mesh(data=2, model=4, simulated))"
    )


def test_local_tensors_are_the_values_memory():
    value = placed(a_value(), P("data"))
    local_tensors(value)[0].zero_()
    assert (device_get(value)[:4] == 0).all()


def test_shapes_that_do_not_divide_come_out_of_operations():
    """Slices may leave ranks with less or nothing; DTensor pads inside."""
    x = a_value()
    value = placed(x, P("data"), "8x1")[:5]
    assert device_get(value).equal(x[:5])
    assert device_get(value.redistribute(placements=[Shard(1), Replicate()])).equal(x[:5])
    assert device_get(value.sum(0)).allclose(x[:5].sum(0))
