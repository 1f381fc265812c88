"""A pipeline's loss and gradients are those of a loop in plain PyTorch, whatever the schedule and the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from tests.ops.pipeline.programs import (
    ROWS,
    assert_same,
    by_torch,
    embed,
    gathered_layer,
    head_loss,
    layer,
    loss_and_grads,
    values,
)
from tests.ops.pipeline.programs import specs as specs_on
from tests.support.pool import Pool

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"]


def on_mesh(schedule: str, axes: dict[str, int], m: int, layers: int, zero: int = 0, **options: Any) -> Any:
    args = values(layers)
    stacked, shared, batch = specs_on(axes, zero)
    real = options.pop("real", False)
    simulate = {} if real else {"simulate": True}
    step = px.jit(
        loss_and_grads(schedule, m, gathered_layer if zero else layer),
        mesh=px.make_mesh(axes, **simulate),
        in_specs=(stacked, shared, batch),
        out_specs=(P(), (stacked, shared)),
        **options,
    )
    return step(*args), None if real else by_torch(*args, m)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("axes", "m", "layers"),
    [
        ({"pipe": 2}, 3, 5),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ({"pipe": 2}, 1, 4),
                ({"pipe": 2}, 16, 4),
                ({"pipe": 4}, 8, 6),
                ({"pipe": 4}, 2, 9),
                ({"data": 2, "pipe": 2}, 6, 4),
            ]
        ),
    ],
    ids=str,
)
def test_every_schedule(schedule: str, axes: dict[str, int], m: int, layers: int) -> None:
    assert_same(*on_mesh(schedule, axes, m, layers))


@pytest.mark.long
@pytest.mark.parametrize("m", [2, 16])
def test_eight_stages(m: int) -> None:
    assert_same(*on_mesh("1f1b", {"pipe": 8}, m, 11))


@pytest.mark.parametrize(
    ("schedule", "axes", "zero"),
    [
        pytest.param("zb", {"pipe": 2, "data": 2, "model": 2}, 0, marks=pytest.mark.long),
        ("1f1b", {"data": 2, "pipe": 2}, 3),
        ("1f1b", {"data": 2}, 0),
        pytest.param("interleaved", {"pipe": 2, "model": 2}, 0, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_beside_other_axes(schedule: str, axes: dict[str, int], zero: int) -> None:
    assert_same(*on_mesh(schedule, axes, 4, 4, zero))


@pytest.mark.long
def test_compiled_stages() -> None:
    assert_same(*on_mesh("zb", {"pipe": 2}, 4, 2, backend="inductor"))


def _on_this_rank(world: int) -> list[Any]:
    found = []
    for schedule, axes, m, layers in (
        [("1f1b", {"pipe": 2}, 6, 5), ("zb", {"pipe": 2}, 4, 4), ("interleaved", {"pipe": 2}, 4, 4)]
        if world == 2
        else [("zbv", {"pipe": 4}, 8, 9), ("1f1b", {"data": 2, "pipe": 2}, 3, 3)]
    ):
        found.append(px.device_get(on_mesh(schedule, axes, m, layers, real=True)[0]))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_processes(pool: Pool, world: int) -> None:
    cases = [(6, 5), (4, 4), (4, 4)] if world == 2 else [(8, 9), (3, 3)]
    for results in pool.run(_on_this_rank, world, world):
        for result, (m, layers) in zip(results, cases, strict=True):
            assert_same(result, by_torch(*values(layers), m))


def test_without_gradients_the_stages_run_forward_only() -> None:
    args = values(4)
    fn = px.pipeline(layer, prologue=embed, epilogue=head_loss, num_microbatches=4)
    mesh = px.make_mesh(pipe=2, simulate=True)
    step = px.jit(fn, mesh=mesh, in_specs=specs_on({"pipe": 2}))
    torch.testing.assert_close(step(*args), by_torch(*args, 4)[0], rtol=1e-12, atol=0.0)
    assert "stage_backward" not in step.trace(*args).lower().as_text()


def test_comms_tells_what_stages_send() -> None:
    """Each of 4 microbatches of 12 rows of 6 float64 goes on once, and its gradient comes back once."""
    fn = px.pipeline(layer, prologue=embed, epilogue=head_loss, num_microbatches=4)
    mesh = px.make_mesh(pipe=2, simulate=True)
    step = px.jit(px.value_and_grad(fn, argnums=(0, 1)), mesh=mesh, in_specs=specs_on({"pipe": 2}))
    lowered = step.trace(*values(4)).lower()
    for rank, reason in enumerate(["activations to the next stage", "gradients to the stage before"]):
        sent = [row for row in lowered.comms(rank) if row.kind == "send"]
        assert [(row.axis, row.count, row.bytes, row.asked, row.reason) for row in sent] == [
            ("pipe", 4, 4 * 12 * 6 * 8, True, reason)
        ]


def test_reductions_in_order_leave_the_schedule_out() -> None:
    args = values(4)
    fn = px.pipeline(layer, prologue=embed, epilogue=head_loss, num_microbatches=2)
    mesh = px.make_mesh(data=2, simulate=True)
    step = px.jit(
        px.value_and_grad(fn, argnums=(0, 1)), mesh=mesh, in_specs=specs_on({"data": 2}), reductions="ordered"
    )
    assert_same(step(*args), by_torch(*args, 2))


def test_a_function_of_the_loss_is_differentiated() -> None:
    args = values(4)
    fn = px.pipeline(layer, prologue=embed, epilogue=head_loss, num_microbatches=4)
    step = px.jit(
        px.grad(lambda stacked, shared, batch: (3.0 * fn(stacked, shared, batch)).log(), argnums=(0, 1)),
        mesh=px.make_mesh(pipe=2, simulate=True),
        in_specs=specs_on({"pipe": 2}),
    )
    loss, grads = by_torch(*args, 4)
    assert_same((loss, step(*args)), (loss, [g / loss for g in grads]))


def test_accumulation_around_it() -> None:
    args = values(4)
    fn = px.pipeline(layer, prologue=embed, epilogue=head_loss, num_microbatches=4)
    step = px.jit(
        px.accumulate_grads(px.value_and_grad(fn, argnums=(0, 1)), 3, argnums=(2,)),
        mesh=px.make_mesh(pipe=2, simulate=True),
        in_specs=specs_on({"pipe": 2}),
    )
    # The mean over equal parts does not depend on how rows are dealt out to them.
    assert_same(step(*args), by_torch(*args, 1))


def test_outside_of_a_step_it_is_the_plain_loop() -> None:
    args = values(3)
    assert_same(loss_and_grads("zb", 4)(*args), by_torch(*args, 4))
    assert ROWS % 4 == 0


def test_remat() -> None:
    args = values(4)
    fn = px.pipeline(px.remat(layer), prologue=embed, epilogue=head_loss, num_microbatches=4)
    step = px.jit(
        px.value_and_grad(fn, argnums=(0, 1)),
        mesh=px.make_mesh(pipe=2, simulate=True),
        in_specs=specs_on({"pipe": 2}),
    )
    assert_same(step(*args), by_torch(*args, 4))


def test_aux_and_keys() -> None:
    """Layers' aux come stacked, means over microbatches; each layer and microbatch has a key of its own."""
    stacked, shared, batch = values(4)

    def noisy(weights: Any, x: Any, microbatch: Any, key: Any) -> Any:
        noise = px.random.normal(key, x.shape, dtype=x.dtype)
        return layer(weights, x, microbatch) + 0.1 * noise, {"noise": noise.mean()}

    def first(shared: Any, microbatch: Any, key: Any) -> Any:
        return embed(shared, microbatch)

    def last(shared: Any, x: Any, microbatch: Any, key: Any) -> Any:
        return head_loss(shared, x, microbatch), x.abs().mean()

    fn = px.pipeline(noisy, prologue=first, epilogue=last, num_microbatches=4, has_aux=True)
    grad_fn = px.value_and_grad(fn, argnums=(0, 1), has_aux=True)
    key = px.random.key(3)
    (loss, aux), grads = grad_fn(stacked, shared, batch, key)
    assert len(set(aux["stages"]["noise"].tolist())) == 4
    axes = {"data": 2, "pipe": 2}
    step = px.jit(grad_fn, mesh=px.make_mesh(axes, simulate=True), in_specs=(*specs_on(axes), P()))
    (found, found_aux), found_grads = step(stacked, shared, batch, key)
    assert_same((found, found_grads), (loss, px.tree.leaves(grads)))
    for a, b in zip(px.tree.leaves(px.device_get(found_aux)), px.tree.leaves(aux), strict=True):
        torch.testing.assert_close(torch.as_tensor(a), b, rtol=1e-10, atol=1e-12)
