"""Meshes: what makes one, which two are equal, which one counts, and every way in which a mesh is refused."""

from __future__ import annotations

import threading
from itertools import product

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ptrainx.core.errors import MeshError
from ptrainx.mesh import AbstractMesh, Mesh, P, ambient_mesh, device_get, device_put, initialize, make_mesh, shutdown
from ptrainx.mesh.transfer import default_mesh


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["train.py"])
    yield
    shutdown()


MESHES = [
    (lambda **axes: AbstractMesh(**axes), "AbstractMesh({})"),
    (lambda **axes: make_mesh(simulate=True, **axes), "Mesh({}, simulated)"),
]


@pytest.mark.parametrize(("make", "text"), MESHES, ids=["abstract", "simulated"])
def test_axes(make, text):
    mesh = make(data=2, model=4)
    assert mesh.shape == {"data": 2, "model": 4}
    assert mesh.axis_names == ("data", "model")
    assert mesh.size == 8
    assert repr(mesh) == text.format("data=2, model=4")
    assert [mesh.rank_coords(rank) for rank in range(8)] == list(product(range(2), range(4)))


def test_the_shape_given_out_is_a_copy():
    mesh = AbstractMesh(data=2)
    mesh.shape["data"] = 5
    assert mesh.shape == {"data": 2}


@pytest.mark.parametrize(
    "mesh",
    [
        AbstractMesh({"data": 2, "model": 2}),
        AbstractMesh(data=2, model=2),
        make_mesh({"data": 2, "model": 2}, simulate=True),
        make_mesh(data=np.int64(2), model=np.int32(2), simulate=True),
    ],
)
def test_both_forms_of_axes(mesh):
    assert list(mesh.shape.items()) == [("data", 2), ("model", 2)]


def test_real_mesh_of_one():
    mesh = make_mesh()
    assert mesh.shape == {"data": 1}
    assert (mesh.size, mesh.rank, mesh.ranks, mesh.coords, mesh.simulated) == (1, 0, (0,), (0,), False)
    assert isinstance(mesh.device_mesh, DeviceMesh)
    assert make_mesh(data=-1, model=1).coords == (0, 0)
    assert repr(make_mesh(data=1, device="cpu")) == "Mesh(data=1, device='cpu')"
    assert make_mesh(data=1, device=torch.device("cpu")).device == torch.device("cpu")


def test_simulated_mesh_joins_no_world():
    mesh = make_mesh(data=2, model=2, simulate=True)
    assert mesh.ranks == (0, 1, 2, 3)
    assert mesh.simulated
    assert mesh.device == torch.device("cpu")
    assert not torch.distributed.is_initialized()


def test_equality():
    real, again = make_mesh(data=1), make_mesh(data=1)
    assert real == again
    assert hash(real) == hash(again)
    simulated = make_mesh(data=1, simulate=True)
    abstract = AbstractMesh(data=1)
    assert AbstractMesh(data=1) == abstract
    assert hash(AbstractMesh(data=1)) == hash(abstract)
    assert len({real, simulated, abstract}) == 3
    assert AbstractMesh(a=2, b=3) != AbstractMesh(b=3, a=2)
    assert make_mesh(a=2, b=3, simulate=True) != make_mesh(b=3, a=2, simulate=True)
    assert make_mesh(data=1) != make_mesh(model=1)


def test_the_same_simulated_axes_are_the_same_devices_while_in_use():
    def placed(x):  # the mesh is dropped, only the value stays
        return device_put(x, P("data"), make_mesh(data=2, simulate=True))

    one, other = placed(torch.arange(4.0)), placed(torch.ones(4))
    assert device_get(one + other).tolist() == [1, 2, 3, 4]
    assert Mesh.from_device_mesh(one.device_mesh) == make_mesh(data=2, simulate=True)


def test_with_mesh_nests():
    outer, inner = make_mesh(data=2, simulate=True), make_mesh(data=4, simulate=True)
    assert ambient_mesh() is None
    with outer as entered:
        assert entered is outer is ambient_mesh()
        with inner, inner:
            assert ambient_mesh() is inner
        assert ambient_mesh() is outer
        with pytest.raises(KeyError), inner:
            raise KeyError
        assert ambient_mesh() is outer
    assert ambient_mesh() is None


def test_with_mesh_is_of_its_thread():
    seen = []
    with make_mesh(data=2, simulate=True):
        thread = threading.Thread(target=lambda: seen.append(ambient_mesh()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_which_mesh_counts():
    given, own, ambient = (make_mesh(data=n, simulate=True) for n in (2, 4, 8))
    value = device_put(torch.arange(8.0), P("data"), own)
    with ambient:
        assert default_mesh([value], given) is given
        assert default_mesh([value, 1.0]) is own
        assert default_mesh([1.0]) is ambient
    assert default_mesh([value]) is own
    assert default_mesh([1.0]).shape == {"data": 1}


def test_no_mesh_in_a_world_of_several(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match=r"no mesh\n  fix: +pass mesh=, or run inside `with mesh:`"):
        default_mesh([1.0])


def test_rank_views_are_the_same_mesh_as_each_rank_sees_it():
    mesh = make_mesh(data=2, model=2, simulate=True)
    views = [mesh.rank_view(rank) for rank in range(4)]
    assert views[0] is mesh.device_mesh
    assert [view.get_coordinate() for view in views] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [view.get_rank() for view in views] == [0, 1, 2, 3]
    assert [view.get_local_rank("model") for view in views] == [0, 1, 0, 1]
    assert len(set(views)) == 4
    assert mesh.rank_view(3) is views[3]
    assert [view.size() for view in views] == [4] * 4


def test_a_mesh_of_somebody_elses_device_mesh():
    initialize()
    torch_mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    mesh = Mesh.from_device_mesh(torch_mesh)
    assert mesh.shape == {"data": 1, "model": 1}
    assert mesh.device_mesh is torch_mesh
    assert Mesh.from_device_mesh(torch_mesh) is mesh
    value = torch.distributed.tensor.distribute_tensor(torch.arange(4.0), torch_mesh)
    assert default_mesh([value]) is mesh
    assert device_get(device_put(value, P("data"))).tolist() == [0, 1, 2, 3]


def test_a_world_that_torch_made_itself_counts():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    assert Mesh.from_device_mesh(torch_mesh).epoch == initialize().epoch > 0


NEEDS_A_LAUNCHER = r"fix: +start the program with `ptrainx run -n {} train\.py`, or try it .* with simulate=True"

# call, message
REFUSED = [
    (lambda: make_mesh(data=4), r"a mesh of data=4 needs 4 devices, this world has 1 process\n"),
    (lambda: make_mesh(data=4), NEEDS_A_LAUNCHER.format(4)),
    (lambda: make_mesh(data=2, model=3), r"data=2, model=3 needs 6 devices"),
    (lambda: make_mesh(data=2, model=3), NEEDS_A_LAUNCHER.format(6)),
    (lambda: make_mesh(data=-1, model=2), r"data=-1, model=2 has nothing to fill in for -1: 1 process can't be"),
    (lambda: make_mesh(data=-1, model=2), r"ptrainx run -n 2 train\.py"),
    (lambda: make_mesh(data=-1, model=-1), r"only one axis size can be -1: data=-1, model=-1"),
    (lambda: make_mesh(data=-1, simulate=True), r"a simulated mesh has no size to fill in for -1: data=-1"),
    (lambda: AbstractMesh(data=-1), r"axis 'data' has size -1\n  expected: a positive integer$"),
    (lambda: make_mesh(data=0), r"axis 'data' has size 0\n  expected: a positive integer, or -1"),
    (lambda: make_mesh(data=-2), r"axis 'data' has size -2"),
    (lambda: make_mesh(data=2.0), r"axis 'data' has size 2\.0"),
    (lambda: make_mesh(data=True), r"axis 'data' has size True"),
    (lambda: make_mesh(data="2"), r"axis 'data' has size '2'"),
    (lambda: make_mesh(data=np.zeros(2)), r"axis 'data' has size array"),
    (lambda: make_mesh({"a b": 1}), r"'a b' is no axis name"),
    (lambda: make_mesh({"": 1}), r"'' is no axis name"),
    (lambda: make_mesh({0: 1}), r"0 is no axis name"),
    (lambda: make_mesh({"data": 1}, model=1), r"axes are given both as a mapping and by keyword"),
    (lambda: make_mesh(4), r"a mesh is made from named axes, not from 4"),
    (lambda: make_mesh((2, 2)), r"a mesh is made from named axes, not from \(2, 2\)"),
    (lambda: AbstractMesh(), r"a mesh has at least one axis"),
    (lambda: make_mesh(data=1, device="tpu"), r"a mesh has no device 'tpu'"),
    (lambda: make_mesh(data=1, device="cpu:0"), r"a mesh has no device 'cpu:0'"),
    (lambda: make_mesh(data=1, device=torch.device("cuda", 0)), r"a mesh has no device 'cuda:0'\n.*without an index"),
    (lambda: make_mesh(data=1, device="cuda", simulate=True), r"a simulated mesh is on the CPU, not on 'cuda'"),
    (lambda: make_mesh(data=1, backends={"model": "gloo"}), r"backends= names axes .* not have: 'model'"),
    (lambda: make_mesh(data=1, simulate=True, backends={"model": "gloo"}), r"backends= names axes"),
    (lambda: make_mesh(data=1, backends={"data": "carrier_pigeon"}), r"a mesh of data=1 on 'cpu' could not be made"),
    (lambda: device_put(1.0, None, AbstractMesh(data=2)), r"AbstractMesh\(data=2\) has no devices .*\n.*px.make_mesh"),
]


@pytest.mark.filterwarnings("ignore:Device capability of carrier_pigeon")
@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refused(call, message):
    with pytest.raises(MeshError, match=message):
        call()


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeshError, match=r"there is no CUDA device here"):
        make_mesh(data=1, device="cuda")


def test_a_device_mesh_without_names_is_refused():
    initialize()
    torch_mesh = init_device_mesh("cpu", (1,))
    value = torch.distributed.tensor.distribute_tensor(torch.arange(4.0), torch_mesh)
    for call in (
        lambda: Mesh.from_device_mesh(torch_mesh),
        lambda: device_put(value, P()),
        lambda: default_mesh([value]),
    ):
        with pytest.raises(MeshError, match=r"dims without names(.|\n)*mesh_dim_names"):
            call()


# environment, message
ENVIRONMENTS = [
    ({"RANK": "0"}, r"only in part\n  got: +WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
    ({"WORLD_SIZE": "2"}, r"RANK, MASTER_ADDR, MASTER_PORT not set(.|\n)*ptrainx run -n N"),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, r"MASTER_PORT not set"),
    ({"RANK": "x", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, r"variable RANK is no number"),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, r"RANK=2 is no rank of a world"),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, r"could not join the world"),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "message"), ENVIRONMENTS, ids=[m for _, m in ENVIRONMENTS])
def test_a_broken_environment_is_refused(environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=message):
        initialize()
    assert not torch.distributed.is_initialized()


def test_a_world_that_nobody_else_comes_to_is_refused(monkeypatch):
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=r"could not join the world(.|\n)*MASTER_PORT=9(.|\n)*reachable"):
        initialize(timeout=1)
