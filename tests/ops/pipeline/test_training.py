"""Training through a pipeline: clipping across stages, AdamW, state in parts, precision; as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from tests.ops.pipeline.programs import embed, head_loss, layer, specs, values

OPTIMIZER = px.optim.chain(px.optim.clip_by_global_norm(0.5), px.optim.adamw(1e-2, weight_decay=0.1))


def make_step(loss_fn: Any) -> Any:
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = px.value_and_grad(lambda p: loss_fn(p["stacked"], p["shared"], batch))(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return px.optim.apply_updates(params, updates), opt_state, loss

    return step


def train(step: Any, params: Any, batch: Any, opt_state: Any) -> tuple[list[float], Any]:
    losses = []
    for _ in range(4):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, px.device_get(params)


@pytest.mark.parametrize("zero", [0, 1])
def test_four_steps_are_those_of_one_device(zero: int) -> None:
    stacked, shared, batch = values(4)
    params = {"stacked": stacked, "shared": shared}
    options = {"prologue": embed, "epilogue": head_loss, "num_microbatches": 4}
    step = make_step(px.pipeline(layer, schedule=px.schedules.ZeroBubble(), **options))
    expected = train(step, params, batch, OPTIMIZER.init(params))

    axes = {"data": 2, "pipe": 2}
    own, common, rows = specs(axes)
    of_params = {"stacked": own, "shared": common}
    in_parts = P("pipe", None, "data") if zero else P("pipe")
    shapes = px.eval_shape(OPTIMIZER.init, params)
    of_state = px.match_rules([(r"stacked/(up|down)$", in_parts), (r"stacked/", P("pipe")), (r".*", P())], shapes)
    mesh = px.make_mesh(axes, simulate=True)
    jitted = px.jit(
        step,
        mesh=mesh,
        in_specs=(of_params, of_state, rows),
        out_specs=(of_params, of_state, P()),
        donate_argnums=(0, 1),
    )
    placed = px.device_put(params, of_params, mesh)
    state = px.jit(OPTIMIZER.init, mesh=mesh, in_specs=(of_params,), out_specs=of_state)(placed)
    losses, found = train(jitted, placed, batch, state)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-10, atol=0.0)
    for a, b in zip(px.tree.leaves(found), px.tree.leaves(expected[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_precision_policy_holds_in_the_stages() -> None:
    """In bfloat16, with master values in float64, the gradients are those of the plain loop in bfloat16, rounded."""
    args = values(4)
    fn = px.pipeline(layer, prologue=embed, epilogue=head_loss, num_microbatches=4)
    policy = px.Precision(params=torch.float64, compute=torch.bfloat16, output=torch.float64)
    grad_fn = px.value_and_grad(policy(fn), argnums=(0, 1))
    loss, grads = grad_fn(*args)
    step = px.jit(grad_fn, mesh=px.make_mesh(pipe=2, simulate=True), in_specs=specs({"pipe": 2}))
    found, found_grads = step(*args)
    assert px.tree.leaves(found_grads)[0].dtype == torch.float64
    torch.testing.assert_close(found, loss, rtol=2e-2, atol=0.0)
    for a, b in zip(px.tree.leaves(px.device_get(found_grads)), px.tree.leaves(grads), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=3e-2 * float(b.abs().max()))
