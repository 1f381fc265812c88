"""Trajectories equal torch.optim's, in every dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ptrainx import optim
from ptrainx.core import tree
from tests.optim.problem import STEPS, gradient, loss, start, trajectory

PAIRS: dict[str, tuple[optim.GradientTransformation, Callable]] = {
    "sgd": (optim.sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd with momentum": (optim.sgd(0.05, 0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "momentum": (optim.momentum(0.05, 0.8), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8)),
    "nesterov": (
        optim.sgd(0.05, 0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "sgd with an L2 penalty": (
        optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.1, 0.5)),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1),
    ),
    "adam": (optim.adam(0.05), lambda p: torch.optim.Adam(p, lr=0.05)),
    "adam, other rates": (
        optim.adam(0.02, b1=0.5, b2=0.9, eps=1e-3),
        lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.5, 0.9), eps=1e-3),
    ),
    "adam without memory": (optim.adam(0.01, b1=0.0), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.999))),
    "adamw": (optim.adamw(0.05, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1)),
    "adamw, learning rate a tensor": (
        optim.adamw(torch.tensor(0.05, dtype=torch.float64), weight_decay=torch.tensor(0.1, dtype=torch.float64)),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    ),
    "rmsprop": (
        optim.rmsprop(0.01, decay=0.99, eps_in_sqrt=False),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.99),
    ),
    "rmsprop with momentum": (
        optim.rmsprop(0.01, decay=0.9, eps_in_sqrt=False, momentum=0.5),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, momentum=0.5),
    ),
    # torch adds eps outside the root, optax inside: without eps they are one.
    "adagrad": (
        optim.adagrad(0.1, initial_accumulator_value=0.2, eps=0.0),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2, eps=0.0),
    ),
}

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6}


def reference(make: Callable, dtype: torch.dtype, schedule: optim.Schedule | None = None) -> list[list[torch.Tensor]]:
    params = tree.map(lambda p: p.requires_grad_(), start(dtype))
    optimizer, path = make(tree.leaves(params)), []
    for step in range(STEPS):
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = schedule(step)
        optimizer.zero_grad()
        loss(params).backward()
        optimizer.step()
        path.append([leaf.detach().clone() for leaf in tree.leaves(params)])
    return path


def assert_equal_paths(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]], tolerance: float) -> None:
    assert len(ours) == len(theirs) == STEPS
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)  # dtypes are compared too


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_trajectory_equals_torch(name, dtype):
    ours, theirs = PAIRS[name]
    assert_equal_paths(trajectory(ours, start(dtype)), reference(theirs, dtype), TOLERANCE[dtype])


def test_a_bfloat16_step_is_the_float64_step_rounded():
    """Trajectories in bfloat16 part at once; one step from one state, an update of order 1, is comparable."""
    low = {"w": torch.linspace(-3, 3, 1000).to(torch.bfloat16), "s": torch.tensor(0.7, dtype=torch.bfloat16)}
    for name, (_, make) in PAIRS.items():
        ours, double = PAIRS[name][0], tree.map(lambda p: p.to(torch.float64).requires_grad_(), low)
        grads = tree.map(lambda p: (p * 0.37).sin(), low)
        updates, _ = ours.update(grads, ours.init(low), low)
        leaves = tree.leaves(double)
        before = [leaf.detach().clone() for leaf in leaves]
        for leaf, grad in zip(leaves, tree.leaves(grads)):
            leaf.grad = grad.to(torch.float64)
        make(leaves).step()
        for update, new, old in zip(tree.leaves(updates), leaves, before):
            assert update.dtype == torch.bfloat16
            torch.testing.assert_close(update.double(), new.detach() - old, rtol=2**-6, atol=1e-4, msg=name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_schedule_sets_the_learning_rate_of_each_step_from_0(dtype):
    schedule = optim.warmup_cosine_decay_schedule(0.01, 0.1, 5, 20, 0.02)
    theirs = reference(lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.1), dtype, schedule)
    assert_equal_paths(trajectory(optim.adamw(schedule, weight_decay=0.1), start(dtype)), theirs, TOLERANCE[dtype])


def test_weight_decay_mask_equals_parameter_groups():
    params = tree.map(lambda p: p.requires_grad_(), start(torch.float64))
    matrices = [p for p in tree.leaves(params) if p.ndim > 1]
    others = [p for p in tree.leaves(params) if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.05)
    for _ in range(STEPS):
        theirs.zero_grad()
        loss(params).backward()
        theirs.step()
    masked = optim.adamw(0.05, weight_decay=0.3, mask=lambda p: tree.map(lambda leaf: leaf.ndim > 1, p))
    ours = trajectory(masked, start(torch.float64))[-1]
    torch.testing.assert_close(ours, [p.detach() for p in tree.leaves(params)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_norm", [5.0, 49.0, 1e30])
@pytest.mark.parametrize("grad", [[3.0, 4.0], [0.0, 0.0], [1e-30, 0.0]], ids=str)
def test_below_the_bound_nothing_changes_at_all(grad, max_norm):
    grads = torch.tensor(grad)
    for bound in (max_norm, torch.tensor(max_norm)):
        clipper = optim.clip_by_global_norm(bound)
        assert torch.equal(clipper.update(grads, clipper.init(grads))[0], grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e6])
def test_clip_by_global_norm_equals_clip_grad_norm(dtype, max_norm):
    grads = gradient(start(dtype))
    parameters = tree.leaves(start(dtype))
    for parameter, grad in zip(parameters, tree.leaves(grads)):
        parameter.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    clipper = optim.clip_by_global_norm(max_norm)
    clipped, _ = clipper.update(grads, clipper.init(grads))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(optim.global_norm(grads), norm, rtol=tolerance, atol=0)
    # torch divides by norm + 1e-6 where it clips; ours reaches max_norm exactly.
    slack = (norm + 1e-6) / norm if norm + 1e-6 > max_norm else 1.0
    for ours, parameter in zip(tree.leaves(clipped), parameters):
        torch.testing.assert_close(ours, parameter.grad * slack, rtol=tolerance, atol=tolerance * 1e-3)
