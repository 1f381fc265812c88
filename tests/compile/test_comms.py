"""What a step sends, on programs small enough to work out by hand; how graphs look; JAX's stages."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.comms import report_comms
from ptrainx.core.trace_context import Origin
from ptrainx.errors import InputError, MeshError, TraceError
from tests.compile.loops import looped, rank_graph
from tests.compile.models import gpt, mlp, train
from tests.compile.programs import assert_close, values

X = values(8, 8)  # 64 elements of 4 bytes


def mesh(**axes: int) -> px.Mesh:
    return px.make_mesh(axes, simulate=True)


# name -> (function, mesh axes, in_specs, out_specs, [(kind, axis, bytes a rank sends, count, asked)])
TABLE = {
    "nothing": (lambda x: x * 2, {"data": 2}, P("data"), None, []),
    "an axis of size 1": (lambda x: x.sum(0), {"data": 1}, P("data"), None, []),
    # All-reduce of 8 floats over 2: 2 * 32 * 1/2.
    "owed result": (lambda x: x.sum(0), {"data": 2}, P("data"), None, [("all_reduce", "data", 32, 1, True)]),
    # Over 4: 2 * 32 * 3/4.
    "over four": (lambda x: x.sum(0), {"data": 4}, P("data"), None, [("all_reduce", "data", 48, 1, True)]),
    # Gathered: a quarter of 256 bytes to 3 others.
    "gathered result": (lambda x: x * 1, {"data": 4}, P("data"), P(), [("all_gather", "data", 192, 1, True)]),
    # Each rank keeps its half of the sum: half of 256 bytes.
    "scattered": (
        lambda x: x.t() @ x,
        {"data": 2},
        P("data"),
        P("data"),
        [("reduce_scatter", "data", 128, 1, True)],
    ),
    "left owed": (lambda x: x.sum(0), {"data": 2}, P("data"), P(unreduced="data"), []),
    # exp needs the whole sum before it: implied.
    "non-linear": (
        lambda x: x.sum(0).exp(),
        {"data": 2},
        P("data"),
        None,
        [("all_reduce", "data", 32, 1, False)],
    ),
    "reshard": (
        lambda x: px.reshard(x, P()) * 2,
        {"data": 2},
        P("data"),
        None,
        [("all_gather", "data", 128, 1, True)],
    ),
    "nobody reads it": (lambda x: (px.reshard(x, P()), x)[1] * 1, {"data": 2}, P("data"), None, []),
    "gradient": (
        lambda x: px.grad(lambda w, x: (x @ w).sum())(torch.ones(8, 8), x),
        {"data": 2},
        P("data"),
        None,
        [("all_reduce", "data", 256, 1, True)],
    ),
    "gradient left owed": (
        lambda x: px.grad(lambda w, x: (x @ w).sum(), reduce=False)(torch.ones(8, 8), x),
        {"data": 2},
        P("data"),
        P(unreduced="data"),
        [],
    ),
    "tensor parallel": (
        lambda x: torch.relu(x @ torch.ones(8, 8)) @ x.t(),
        {"data": 2, "model": 2},
        P(None, "model"),
        P(),
        None,
    ),
}


@pytest.mark.parametrize(
    ("fn", "axes", "in_specs", "out_specs", "expected"),
    [r for r in TABLE.values() if r[4] is not None],
    ids=[n for n, r in TABLE.items() if r[4] is not None],
)
def test_kinds_axes_and_bytes(fn: Any, axes: dict, in_specs: Any, out_specs: Any, expected: list) -> None:
    report = px.jit(fn, mesh=mesh(**axes), in_specs=in_specs, out_specs=out_specs).comms(X)
    assert [(c.kind, c.axis, c.bytes, c.count, c.asked) for c in report] == expected
    assert report.total_bytes == sum(row[2] for row in expected)
    assert all("test_comms.py:" in c.source for c in report)


def layered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Three sums over "data" of 2, one a line."""
    a = (x @ w).exp()
    b = (a.t() @ x).exp()
    return px.reshard(b, P("data")) * 2


def test_source_lines_and_the_table() -> None:
    report = px.jit(layered, mesh=mesh(data=2), in_specs=(P(None, "data"), P("data"))).comms(X, X)
    first = layered.__code__.co_firstlineno
    assert report[0].source.endswith(f"test_comms.py:{first + 2}")
    assert {c.phase for c in report} == {"forward"}
    text = str(report)
    lines = text.splitlines()
    assert " ".join(lines[:2]).split()[:8] == ["kind", "axis", "count", "bytes", "phase", "asked", "source", "reason"]
    assert all(c.source in text and c.reason in " ".join(text.split()) for c in report)
    assert max(map(len, lines)) <= 100
    assert lines[-1] == f"{len(report)} collectives, {report.total_bytes:,} bytes sent by a rank"
    assert str(px.jit(lambda x: x, mesh=mesh(data=2)).comms(X)) == "no communication"


def test_layers() -> None:
    """Parameters one a row, in the table together; a table of many stays within 100 columns."""
    model = mlp()
    step, state, batch = train(model, mesh(data=2), P("data"))
    report = report_comms(step.trace(state, *batch).graphs[0], {"data": 2})
    paths = {px.tree.path_str(path): leaf for path, leaf in px.tree.flatten_with_path(model.params)[0]}
    for kind in ("all_gather", "reduce_scatter"):
        # Half of a parameter goes to the other rank, both ways.
        assert {c.layer: c.bytes for c in report if c.kind == kind} == {n: p.numel() * 2 for n, p in paths.items()}
    lines = str(report).splitlines()
    assert lines[0].split() == ["kind", "axis", "count", "bytes", "phase", "asked", "layer"]
    assert sum("0/{b,w}, 1/{b,w}, 2/{b,w}" in line for line in lines) == 2
    step, state, batch = train(gpt(layers=4), mesh(data=2), P("data"))
    traced = step.trace(state, *batch)
    for text in (traced.lower().comms(), report_comms(traced.graphs[0], {"data": 2})):
        assert max(map(len, str(text).splitlines())) <= 100


def test_what_a_loop_sends_counts_once_a_step() -> None:
    """A loop of 5 steps around a loop of 3, an all-reduce of 8 floats over 2 in the inner one: 2 * 32 * 1/2 each."""
    c10d = torch.ops._c10d_functional

    def inner(c: torch.Tensor) -> list[torch.Tensor]:
        return [c10d.wait_tensor(c10d.all_reduce(c * 2, "sum", "group"))]

    graph = rank_graph(looped(looped(inner, 3, (8,)), 5, (8,)), {"group": "data"}, Origin("m.py:1"))
    (comm,) = report_comms(graph, {"data": 2})
    assert (comm.kind, comm.axis, comm.count, comm.bytes, comm.source) == ("all_reduce", "data", 15, 15 * 32, "m.py:1")


def test_phases() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> tuple:
        loss, g = px.value_and_grad(lambda w: (x @ w).square().mean())(w)
        return w - px.reshard(g, P()), loss

    report = px.jit(step, mesh=mesh(data=2), in_specs=(P(), P("data"))).comms(X, X)
    assert {c.phase for c in report} == {"backward", "update"}
    assert all(c.asked for c in report)


def test_implied_communication_can_be_refused() -> None:
    implied = px.jit(lambda x: x.sum(0).exp(), mesh=mesh(data=2), in_specs=P("data"), max_implicit_bytes=31)
    with pytest.raises(TraceError, match=r"implies communication of 32 bytes(.|\n)*test_comms.py(.|\n)*at most 31"):
        implied(X)
    enough = px.jit(lambda x: x.sum(0).exp(), mesh=mesh(data=2), in_specs=P("data"), max_implicit_bytes=32)
    assert_close(enough(X), X.sum(0).exp())
    asked = px.jit(
        lambda x: px.reshard(x.sum(0), P()).exp(), mesh=mesh(data=2), in_specs=P("data"), max_implicit_bytes=0
    )
    assert_close(asked(X), X.sum(0).exp())


def test_a_graph_reads_well() -> None:
    step = px.jit(lambda x, w: (x @ w).sum(0), mesh=mesh(data=2), in_specs=(P("data"), P(None)))
    assert step.lower(X, X).as_text().splitlines()[0] == "<lambda> on Mesh(data=2, simulated), rank 0"
    lines = [line.strip() for line in step.lower(X, X).as_text().splitlines()[1:]]
    assert lines[0] == "a0: f32[8@data,8] = argument x"
    assert lines[1] == "a1: f32[8,8] = argument w"
    assert re.fullmatch(r"v2: f32\[4,8\] = mm\(a0, a1\) +# \S+test_comms.py:\d+ forward", lines[2])
    assert lines[-1] == "return v5: f32[8] as result"
    assert "all_reduce(v3, sum, axis=data)" in lines[4]
    assert "asked: a sum owed in the result" in lines[4]


def test_stages() -> None:
    step = px.jit(lambda x, n, k: x * n + k, mesh=mesh(data=2), in_specs=(P("data"), P()), static_argnums=2)
    traced = step.trace(X, 2, 3)
    lowered = traced.lower()
    compiled = lowered.compile()
    assert_close(compiled(X, 5, 3), X * 5 + 3)
    assert "def step(args):" in compiled.as_text()
    assert compiled.comms() == lowered.comms() == []
    assert len(traced.as_text(1).splitlines()) >= len(lowered.as_text(1).splitlines())
    for args in ((X[:4], 5, 3), (X, 5, 4), ([X], 5, 3), (X.double(), 5, 3)):
        with pytest.raises(InputError, match="compiled for other arguments"):
            compiled(*args)


def test_a_thousand_devices_can_be_planned() -> None:
    def init() -> dict:
        return {"up": torch.zeros(1024, 65536), "down": torch.zeros(65536, 1024)}

    def loss(w: dict, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ w["up"]) @ w["down"]).square().mean()

    on = px.AbstractMesh(data=128, model=8)
    specs = ({"up": P(None, "model"), "down": P("model")}, P("data"))
    step = px.jit(px.value_and_grad(loss), mesh=on, in_specs=specs, out_specs=(P(), specs[0]))
    args = (px.eval_shape(init), px.ShapeDtypeStruct((128 * 4, 1024), torch.float32))
    report = step.comms(*args)
    assert {axis for c in report for axis in c.axis.split("*")} == {"data", "model"}
    # Gradients: 2 * 1024 * 8192 floats a rank, all-reduced over 128.
    gradients = [c for c in report if c.axis == "data" and c.phase == "backward"]
    assert sum(c.bytes for c in gradients) == 2 * (2 * 1024 * 8192 * 4) * 127 // 128
    assert "f32[1024,65536@model]" in step.lower(*args).as_text()
    with pytest.raises(MeshError, match="has no devices"):
        step.lower(*args).compile()
    with pytest.raises(MeshError, match="has no devices"):
        px.jit(lambda x: x, mesh=px.AbstractMesh(data=2))(X)
