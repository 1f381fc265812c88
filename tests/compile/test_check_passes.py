"""`PTRAINX_CHECK_PASSES=1`: our passes keep their promises on every program; one that does not is told by name."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.graph import schema_name
from ptrainx.compile.passes import pipeline
from ptrainx.compile.passes.one_pass import Pass
from ptrainx.errors import PassError, PtrainxError
from tests.compile.programs import MESHES, MLP, PROGRAMS, X, assert_close, mlp

ADD = torch.ops.aten.add.Tensor


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTRAINX_CHECK_PASSES", "1")


def _scaled(graph: Any, by: float) -> Any:
    """A wrong pass: what was x + y becomes x + by * y."""
    for node in graph.module.graph.nodes:
        if schema_name(node) == "aten::add" and node.target is ADD and len(node.args) == 2:
            node.kwargs = {"alpha": by}
    return graph


def _with(one: Pass, behind: str) -> tuple[Pass, ...]:
    found: list[Pass] = []
    for known in pipeline.PASSES:
        found.append(known)
        if known.name == behind:
            found.append(one)
    return tuple(found)


def total(x: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"first": x * 2, "second": x @ w + 1}


def jitted(fn: Any = total, **axes: int) -> Any:
    return px.jit(fn, mesh=px.make_mesh(axes or {"data": 2}, simulate=True), in_specs=(P("data"), P()))


@pytest.mark.parametrize("behind", ["drop_dead", "share_gathers", "issue_early"])
def test_the_pass_that_changes_a_result_is_named(behind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Pass("double_what_is_added", lambda graph: _scaled(graph, 2.0), exact=False)
    monkeypatch.setattr(pipeline, "PASSES", _with(wrong, behind))
    step = jitted()
    for _ in range(2):  # it is not taken for checked
        with pytest.raises(PassError) as caught:
            step(X, X)
        message = str(caught.value)
        assert "total: the pass double_what_is_added changes result['second'][0, 0] of rank 0" in message
        after = float(caught.value.got)
        before = float(caught.value.expected.split(",")[0])
        assert before == pytest.approx(float((X @ X)[0, 0]) + 1, rel=1e-5)
        assert after == pytest.approx(float((X @ X)[0, 0]) + 2, rel=1e-5)
        assert "within 0.0001 of the largest element" in caught.value.expected


@pytest.mark.parametrize(("exact", "raises"), [(True, True), (False, False)])
def test_one_that_promises_every_bit_is_held_to_it(exact: bool, raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    barely = Pass("barely", lambda graph: _scaled(graph, 1 + 1e-6), exact=exact)
    monkeypatch.setattr(pipeline, "PASSES", _with(barely, "drop_dead"))
    if raises:
        with pytest.raises(PassError, match=r"the pass barely changes(.|\n)*bit for bit"):
            jitted()(X, X)
    else:
        assert_close(jitted()(X, X), total(X, X))


def test_a_wrong_pass_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Pass("on_rank_3", lambda graph: _scaled(graph, 2.0) if graph.rank == 3 else graph)
    monkeypatch.setattr(pipeline, "PASSES", _with(wrong, "drop_dead"))
    with pytest.raises(PassError, match=r"on_rank_3 changes result\['second'\]\[0, 0\] of rank 3"):
        jitted(data=4)(X, X)


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PTRAINX_CHECK_PASSES")
    monkeypatch.setattr(pipeline, "PASSES", _with(Pass("wrong", lambda g: _scaled(g, 2.0)), "drop_dead"))
    assert_close(jitted()(X, X)["second"], X @ X + 2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_our_passes_keep_their_promises(name: str) -> None:
    row = PROGRAMS[name]
    mesh = px.make_mesh(MESHES[-1], simulate=True)
    want = row.fn(*row.args)
    assert_close(px.jit(row.fn, mesh=mesh, in_specs=row.in_specs, out_specs=row.out_specs)(*row.args), want)


def test_donated_arguments_are_there_for_every_run() -> None:
    mesh = px.make_mesh(data=2, simulate=True)
    step = px.jit(lambda x: x + 1, mesh=mesh, in_specs=P("data"), out_specs=P("data"), donate_argnums=0)
    x = px.device_put(X, P("data"), mesh)
    for _ in range(3):
        x = step(x)
    assert_close(x, X + 3)


def _zero3_on_ranks(world: int) -> tuple[list[float], str]:
    os.environ["PTRAINX_CHECK_PASSES"] = "1"
    try:
        mesh = px.make_mesh(data=world)

        def step(params: dict, x: torch.Tensor) -> tuple[dict, torch.Tensor]:
            loss, grads = px.value_and_grad(lambda p: mlp(px.reshard(p, P()), x).square().mean())(params)
            return px.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        run = px.jit(step, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=(P("data"), P()))
        params = px.device_put(MLP, P("data"), mesh)
        x = px.device_put(X, P("data"), mesh)
        losses = []
        for _ in range(3):
            params, loss = run(params, x)
            losses.append(float(loss))
        wrong = Pass("on_rank_1", lambda graph: _scaled(graph, 2.0) if graph.rank == 1 else graph)
        kept, pipeline.PASSES = pipeline.PASSES, _with(wrong, "drop_dead")
        try:
            px.jit(total, mesh=mesh, in_specs=(P("data"), P()))(X, X)
            told = "nothing"
        except PtrainxError as error:
            told = f"{type(error).__name__}: {error}"
        finally:
            pipeline.PASSES = kept
        return losses, told
    finally:
        del os.environ["PTRAINX_CHECK_PASSES"]


def test_on_real_ranks_with_sharded_parameters(pool: Any) -> None:
    params, want = MLP, []
    for _ in range(3):
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        loss = mlp(leaves, X).square().mean()
        loss.backward()
        want.append(loss.item())
        params = {k: (v - 0.1 * v.grad).detach() for k, v in leaves.items()}
    (losses, told), (other, told_other) = pool.run(_zero3_on_ranks, 2, 2)
    assert losses == pytest.approx(want, rel=1e-5)
    assert other == losses
    assert told_other.startswith("PassError: total: the pass on_rank_1 changes result['second'][0, 0] of rank 1")
    assert told.startswith("AgreementError")
    assert "PassError" in told
