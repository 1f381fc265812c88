"""What a jitted function takes and gives: leaves, trees, specs, static arguments, and when it is traced again."""

from __future__ import annotations

import collections
import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.errors import InputError, MeshError, SpecError, TreeError
from tests.compile.programs import assert_close, values

X = values(4, 4)
Pair = collections.namedtuple("Pair", ["left", "right"])


@px.register_dataclass
@dataclasses.dataclass
class Box:
    value: Any
    label: str = dataclasses.field(default="a", metadata={"static": True})


def mesh(**axes: int) -> px.Mesh:
    return px.make_mesh(axes or {"data": 2}, simulate=True)


def counted(fn: Any, **options: Any) -> tuple[Any, list[int]]:
    """A jitted function and a list that grows with every run of its Python."""
    runs: list[int] = []

    def body(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return fn(*args, **kwargs)

    return px.jit(body, **options), runs


SAME_TRACE = {
    "int then 0-d tensor": (0, torch.tensor(1)),
    "int then int": (0, 7),
    "int then numpy": (0, np.int64(3)),
    "float then float": (0.5, 0.25),
    "float then 0-d tensor": (0.5, torch.tensor(0.25)),
    "float then numpy": (0.5, np.float32(0.25)),
    "bool then bool": (True, False),
    "tensor then numpy": (torch.ones(4), np.full(4, 2.0, np.float32)),
    "numpy float64 then tensor": (np.float64(2.0), torch.tensor(3.0, dtype=torch.float64)),
}


@pytest.mark.parametrize("pair", SAME_TRACE.values(), ids=SAME_TRACE)
def test_numbers_that_vary_are_inputs(pair: tuple) -> None:
    step, runs = counted(lambda n: n * 2, mesh=px.make_mesh(data=1))
    results = [step(value) for value in pair]
    assert len(runs) == 1
    for value, result in zip(pair, results):
        assert_close(result, torch.as_tensor(value) * 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 1.0), (True, 1), (torch.ones(4), torch.ones(5)), (torch.ones(4), torch.ones(4).double()), ([1.0], (1.0,))],
    ids=str,
)
def test_another_type_shape_or_structure_is_traced_again(first: Any, second: Any) -> None:
    step, runs = counted(lambda n: n, mesh=px.make_mesh(data=1))
    for value in (first, second, first, second):
        assert_close(step(value), px.tree.map(torch.as_tensor, value))
    assert len(runs) == 2


def test_the_step_counter_that_comes_out_goes_back_in() -> None:
    step, runs = counted(lambda n, x: (n + 1, x / n), mesh=px.make_mesh(data=1))
    n: Any = 1
    for i in range(1, 4):
        n, x = step(n, X)
        assert_close(x, X / i)
    assert (int(n), n.dtype, len(runs)) == (4, torch.int64, 1)


def test_torch_defaults_are_part_of_the_key() -> None:
    step = px.jit(lambda x: (torch.zeros(2), x @ x), mesh=px.make_mesh(data=1))
    assert step(X)[0].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert step(X)[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert step(X)[1].dtype == torch.bfloat16
    assert step(X)[1].dtype == torch.float32


def test_static_arguments_are_part_of_the_program() -> None:
    step, runs = counted(lambda x, n, flag: x * n if flag else x, mesh=px.make_mesh(data=1), static_argnums=(1, 2))
    for n, flag, want in ((2, True, X * 2), (2, False, X), (2, True, X * 2), (3, True, X * 3)):
        assert_close(step(X, n, flag), want)
    assert len(runs) == 3
    kind = px.jit(lambda i, n: i * n, mesh=px.make_mesh(data=1), static_argnums=1)
    assert [kind(torch.arange(2), n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_static_arguments_go_by_keyword_too() -> None:
    def power(x: torch.Tensor, n: int) -> torch.Tensor:
        return x if n == 0 else x * power(x, n - 1)

    assert_close(px.jit(power, mesh=px.make_mesh(data=1), static_argnums=1)(X, n=2), X * X * X)


def test_what_static_arguments_have_to_be() -> None:
    step = px.jit(lambda x, n: x, mesh=px.make_mesh(data=1), static_argnums=1)
    with pytest.raises(InputError, match="static argument n is not hashable"):
        step(X, [1])
    with pytest.raises(InputError, match="both static and donated"):
        px.jit(lambda x: x, static_argnums=0, donate_argnums=0)
    with pytest.raises(InputError, match="positions of arguments"):
        px.jit(lambda x: x, static_argnums=-1)


def test_methods_and_partials_can_be_jitted() -> None:
    class Model:
        scale = 3.0

        @px.jit(mesh=px.make_mesh(data=1), static_argnums=0)
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    assert_close(Model()(X), X * 3)
    assert Model.__call__.__name__ == "__call__"


TREES = {
    "nested": {"a": [torch.ones(2), (1, 2.5)], "b": {"c": True}},
    "none": {"a": None, "b": [None, torch.ones(2)]},
    "empty": {"a": {}, "b": (), "c": []},
    "named tuple": Pair(torch.ones(2), Pair(1, None)),
    "dataclass": Box({"x": torch.ones(2)}, "b"),
    "ordered": collections.OrderedDict(b=1, a=2),
    "numpy": [np.arange(3), np.float32(2.0), np.array([True])],
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_trees_keep_their_structure(tree: Any) -> None:
    result = px.jit(lambda t: t, mesh=mesh())(tree)
    assert px.tree.structure(result) == px.tree.structure(tree)
    assert_close(result, px.tree.map(torch.as_tensor, tree))


def test_a_static_field_retraces() -> None:
    step, runs = counted(lambda box: box.value + len(box.label), mesh=px.make_mesh(data=1))
    assert [int(step(Box(1, label))) for label in ("a", "bb", "a")] == [2, 3, 2]
    assert len(runs) == 2


SPECS = {
    "lone spec for all": (P("data"), (P("data"), P("data"))),
    "prefix": ((P("data"), None), (P("data"), P())),
    "none": (None, (P(), P())),
    "tree": (({"x": P("data"), "n": None}, P(None, "data")), (P("data"), P(None, "data"))),
    "axes of size 1": ((P("data", "one"), P("one")), (P("data"), P())),
}


@pytest.mark.parametrize(("in_specs", "found"), SPECS.values(), ids=SPECS)
def test_in_specs(in_specs: Any, found: tuple) -> None:
    step = px.jit(lambda a, b: (a["x"] * 1, b * 1), mesh=mesh(data=2, one=1), in_specs=in_specs)
    result = step({"x": X, "n": None}, X)
    assert_close(result, (X, X))
    assert tuple(map(px.spec_of, result)) == found


def test_keyword_arguments_keep_their_placement() -> None:
    on = mesh()
    placed = px.device_put(X, P(None, "data"), on)
    a, b = px.jit(lambda x, *, y, z: (y * x, z), mesh=on, in_specs=P("data"))(X, y=X, z=placed)
    assert_close((a, b), (X * X, X))
    assert px.spec_of(b) == P(None, "data")


def test_out_specs_place_the_result() -> None:
    on = mesh(data=2, model=2)
    out = px.jit(lambda x: {"a": x, "b": (x.sum(), x)}, mesh=on, out_specs={"a": P("data", "model"), "b": P()})(X)
    assert (px.spec_of(out["a"]), px.spec_of(out["b"][1])) == (P("data", "model"), P())
    assert_close(out, {"a": X, "b": (X.sum(), X)})


@pytest.mark.parametrize("backend", ["graph", "eager"])
@pytest.mark.parametrize(
    "fn", [torch.sum, torch.mean, lambda x: x.sum(0), lambda x: x.mean(0)], ids=["s", "m", "s0", "m0"]
)
def test_sums_can_be_left_owed(fn: Any, backend: str) -> None:
    on = mesh()
    owed = px.jit(fn, mesh=on, in_specs=P("data"), out_specs=P(unreduced="data"), backend=backend)(X)
    assert px.spec_of(owed) == P(unreduced="data")
    assert_close(owed, fn(X))
    assert_close(px.jit(lambda v: v * 2, mesh=on)(owed), fn(X) * 2)
    assert_close(px.reshard(owed, P()), fn(X))


@pytest.mark.parametrize("fn", [lambda x: x, lambda x: x.amax(0)], ids=["whole", "max"])
def test_an_owed_sum_must_be_there(fn: Any) -> None:
    with pytest.raises(SpecError, match="owes no sum over"):
        px.jit(fn, mesh=mesh(), in_specs=P("data"), out_specs=P(unreduced="data"))(X)


def test_0d_results_are_plain_tensors() -> None:
    out = px.jit(lambda x: {"loss": x.sum(), "n": torch.tensor(3)}, mesh=mesh(), in_specs=P("data"))(X)
    assert type(out["loss"]) is torch.Tensor
    assert f"{out['loss']:.3f}" == f"{X.sum():.3f}"
    assert (float(out["loss"]), int(out["n"])) == (pytest.approx(float(X.sum())), 3)
    assert repr(out["n"]) == "tensor(3)"


REFUSED = {
    "unknown leaf": (lambda on: px.jit(lambda t: t, mesh=on)({"a": [object()]}), TreeError, r"argument t\['a'\]\[0\]"),
    "string leaf": (lambda on: px.jit(lambda t: t, mesh=on)({"a": "text"}), TreeError, r"t\['a'\].*str"),
    "unregistered class": (
        lambda on: px.jit(lambda t: t, mesh=on)([dataclasses.make_dataclass("Mine", ["x"])(1)]),
        TreeError,
        "Mine.*\n(.*\n)*.*register_dataclass",
    ),
    "result of unknown type": (lambda on: px.jit(lambda: {"k": "text"}, mesh=on)(), TreeError, r"result\['k'\]"),
    "spec tree": (
        lambda on: px.jit(lambda t: t, mesh=on, in_specs=({"b": P()},))({"a": X}),
        TreeError,
        r"t\['b'\]: in the specs, not in the value",
    ),
    "number of specs": (lambda on: px.jit(lambda a, b: a, mesh=on, in_specs=(P(),))(X, X), TreeError, "in_specs for 1"),
    "unknown axis": (lambda on: px.jit(lambda x: x, mesh=on, in_specs=P("model"))(X), SpecError, "axis 'model'"),
    "too many entries": (
        lambda on: px.jit(lambda x: x, mesh=on, in_specs=P(None, "data"))(torch.ones(4)),
        SpecError,
        "entries for a value of 1 dims",
    ),
    "placed otherwise": (
        lambda on: px.jit(lambda x: x, mesh=on, in_specs=P("data"))(px.device_put(X, P(None, "data"), on)),
        SpecError,
        r"argument x is placed otherwise.*\n.*P\(None, 'data'\)\n.*P\('data'\)\n.*px.reshard\(x, P\('data'\)\)",
    ),
    "another mesh": (
        lambda on: px.jit(lambda x: x, mesh=on)(px.device_put(X, P(), mesh(data=4))),
        MeshError,
        "lives on another mesh",
    ),
    "mixed meshes": (
        lambda on: px.jit(lambda x, y: x)(px.device_put(X, P(), on), px.device_put(X, P(), mesh(data=4))),
        MeshError,
        "different meshes",
    ),
    "plain value with owed sum": (
        lambda on: px.jit(lambda x: x, mesh=on, in_specs=P(unreduced="data"))(X),
        SpecError,
        "owes no sum",
    ),
    "integer too large": (lambda on: px.jit(lambda n: n, mesh=on)(2**70), TreeError, "64 bits"),
    "backend": (lambda on: px.jit(lambda x: x, backend="tpu"), px.errors.BackendError, "no backend 'tpu'"),
}


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(mesh())


def test_a_shape_error_inside_keeps_torchs_words_and_tells_the_line() -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return batch @ w  # the line

    with pytest.raises(RuntimeError, match=r"reduction dim.*\[6, 5\] X \[4, 4\]") as caught:
        px.jit(step, mesh=mesh(), in_specs=(P(), P("data")))(X, torch.ones(6, 5))
    assert "test_arguments.py" in "".join(caught.value.__notes__)
    assert "w: f32[4,4], batch: f32[6,5]" in "".join(caught.value.__notes__)


def test_the_mesh_is_found() -> None:
    on = mesh()
    step = px.jit(lambda x: x * 2)
    assert px.spec_of(step(px.device_put(X, P("data"), on))) == P("data")
    with on:
        assert step(X).device_mesh is on.device_mesh
    assert step(X).device_mesh.size() == 1


def test_retracing_says_what_changed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PTRAINX_LOG", "retrace")
    caplog.set_level(logging.INFO, "ptrainx")
    monkeypatch.setattr(logging.getLogger("ptrainx"), "propagate", True)
    step = px.jit(lambda x, n: x, mesh=mesh(), static_argnums=1)
    for x, n in ((X, 1), (X, 1), (values(8, 4), 1), ([X], 1), ([X], 2)):
        step(x, n)
    # A record may reach the handler by two ways.
    said = [record.getMessage() for record in {id(record): record for record in caplog.records}.values()]
    assert len(said) == 4
    for text, part in zip(said, ("for the first time", "(8, 4)", "the structure", "static arguments")):
        assert part in text
