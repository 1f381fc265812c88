"""What a step computes, against torch's own counter and against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ptrainx as px
from ptrainx import P
from ptrainx.compile.cost import report_cost
from ptrainx.core.trace_context import Origin
from tests.compile.loops import looped, rank_graph
from tests.compile.models import Model, convnet, gpt, mlp, train

MODELS = {"GPT": gpt(), "MLP": mlp(), "convnet": convnet()}


def attention_flops(q: tuple, k: tuple, v: tuple, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two products: [T, d] @ [d, S] and [T, S] @ [S, e], for each row and head."""
    (B, H, T, d), S, e = q, k[2], v[3]
    return 2 * B * H * T * S * (d + e)


def attention_backward_flops(g: tuple, q: tuple, k: tuple, v: tuple, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Five products: the scores once more, and one a gradient of each operand of both."""
    (B, H, T, d), S, e = q, k[2], v[3]
    return 2 * B * H * T * S * (3 * d + 2 * e)


# torch's counter has no formula for the CPU's fused attention.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def counted(model: Model) -> int:
    """The FLOPs of the plain function on one device, counted while it runs."""
    leaves = [leaf.clone().requires_grad_() for leaf in px.tree.leaves(model.params)]
    params = px.tree.unflatten(px.tree.structure(model.params), leaves)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        torch.autograd.grad(model.loss(params, *model.batch), leaves)
    return counter.get_total_flops()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_flops_are_those_that_torch_counts(model: Model) -> None:
    step, state, batch = train(model, px.make_mesh(data=1))
    assert step.lower(state, *batch).cost().flops == counted(model)


@pytest.mark.parametrize("weights", [None, P("data")], ids=["data-parallel", "sharded"])
def test_rows_are_shared_out(weights: Any) -> None:
    """Each of two ranks computes half: every product has a row for each example."""
    model = mlp()
    step, state, batch = train(model, px.make_mesh(data=2, simulate=True), weights)
    lowered = step.lower(state, *batch)
    assert [lowered.cost(rank).flops for rank in (0, 1)] == [counted(model) // 2] * 2


def test_rows_name_phase_and_layer() -> None:
    """An MLP of widths 16, 32, 32, 8 over 8 rows: 2 * rows * in * out a product; one forward, two backward, but for
    the first layer, whose input has no gradient."""
    step, state, batch = train(mlp(), px.make_mesh(data=1))
    cost = step.lower(state, *batch).cost()
    found = {(c.phase, c.layer): c.flops for c in cost.by("phase", "layer") if c.flops}
    one = {"0/w": 2 * 8 * 16 * 32, "1/w": 2 * 8 * 32 * 32, "2/w": 2 * 8 * 32 * 8}
    forward = {("forward", layer): n for layer, n in one.items()}
    backward = {("backward", layer): n * (1 if layer == "0/w" else 2) for layer, n in one.items()}
    assert found == forward | backward
    by_block = {c.layer: c.flops for c in cost.by("layer", depth=1)}
    assert by_block["1"] == 3 * one["1/w"]
    assert sum(by_block.values()) == cost.flops


def test_bytes_of_operators() -> None:
    """Read and written: x of 64 floats and its double, a view (free), a broadcast operand (counted once)."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).view(8, 8) + torch.ones(1, 1).expand(8, 8)

    cost = px.jit(fn, mesh=px.make_mesh(data=1)).lower(torch.ones(8, 8)).cost()
    double, ones, add = 2 * 256, 4, 256 + 4 + 256
    assert (cost.bytes, cost.flops) == (double + ones + add, 0)


def test_loops_count_once_a_step() -> None:
    graph = rank_graph(looped(looped(lambda c: [c @ c], 3, (8, 8)), 5, (8, 8)), {}, Origin("m.py:1"))
    (row,) = report_cost(graph)
    assert row.flops == 15 * 2 * 8**3
    assert row.bytes == 15 * 2 * 256  # c is read once, though it is both operands
    assert row.operators == 15


def test_the_table() -> None:
    step, state, batch = train(mlp(), px.make_mesh(data=1))
    cost = step.lower(state, *batch).cost()
    lines = str(cost.by("phase")).splitlines()
    assert [line.split()[0] for line in lines] == ["phase", "forward", "backward", "update", "total"]
    assert lines[-1].split() == ["total", *(f"{n:,}" for n in (sum(c.operators for c in cost), cost.flops, cost.bytes))]
