"""An update is traceable as it is: no host reads, nothing written in place, few ops a leaf."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ptrainx import optim
from ptrainx.core import tree

SCHEDULE = optim.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)

# optimizer, and the ops that one more leaf costs with apply_updates
OPS_A_LEAF = {
    "sgd": (optim.sgd(0.1), 2),
    "momentum": (optim.momentum(0.1), 3),
    "nesterov": (optim.momentum(0.1, nesterov=True), 4),
    "adam": (optim.adam(0.1), 9),
    "adamw": (optim.adamw(0.1), 10),
    "adamw, scheduled": (optim.adamw(SCHEDULE), 10),
    "adamw, injected": (optim.inject_hyperparams(optim.adamw)(SCHEDULE), 10),
    "adamw, clipped": (optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(SCHEDULE)), 13),
    "lion": (optim.lion(0.1), 6),
    "rmsprop": (optim.rmsprop(0.1), 7),
    "adagrad": (optim.adagrad(0.1), 6),
}


def step(optimizer):
    def run(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return run


def trace(optimizer, count: int):
    generator = torch.Generator().manual_seed(count)
    params = {f"w{i}": torch.randn(3, 2, generator=generator) for i in range(count)}
    grads = tree.map(lambda p: p.sin(), params)
    inputs, treedef = tree.flatten((params, optimizer.init(params), grads))

    def flat(*leaves):
        return tree.leaves(step(optimizer)(*tree.unflatten(treedef, leaves)))

    return make_fx(flat, tracing_mode="fake")(*inputs), flat, inputs


def calls(graph) -> list:
    return [node for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", OPS_A_LEAF)
def test_traced_step_equals_the_eager_one_and_is_lean(name):
    optimizer, expected = OPS_A_LEAF[name]
    graph, flat, inputs = trace(optimizer, 4)
    for traced, eager in zip(graph(*inputs), flat(*inputs)):
        assert torch.equal(traced, eager)
    assert not [node for node in calls(graph) if node.target._schema.is_mutable]
    more = len(calls(trace(optimizer, 7)[0])) - len(calls(graph))
    assert more == 3 * expected


def test_the_count_is_an_input_not_a_constant():
    optimizer = optim.adamw(SCHEDULE)
    graph, flat, inputs = trace(optimizer, 2)
    for _ in range(6):  # the same graph, step after step, through warm-up and decay
        params_and_state = graph(*inputs)
        for traced, eager in zip(params_and_state, flat(*inputs)):
            assert torch.equal(traced, eager)
        inputs = [*params_and_state, *inputs[len(params_and_state) :]]
    counts = [leaf for leaf in inputs if leaf.dtype == torch.int64]
    assert counts
    assert all(count == 6 for count in counts)


def test_a_learning_rate_made_in_the_step_is_an_input():
    def run(rate, param, grad):
        optimizer = optim.sgd(rate)
        return optim.apply_updates(param, optimizer.update(grad, optimizer.init(param))[0])

    graph = make_fx(run, tracing_mode="fake")(torch.tensor(0.1), torch.ones(2), torch.ones(2))
    torch.testing.assert_close(graph(torch.tensor(0.5), torch.ones(2), torch.ones(2)), torch.tensor([0.5, 0.5]))
