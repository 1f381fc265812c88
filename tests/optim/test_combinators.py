"""chain is composition, masked leaves the rest alone, injected hyperparameters are state, updates are pure."""

from __future__ import annotations

import pytest
import torch

from ptrainx import optim
from ptrainx.core import tree
from ptrainx.core.errors import TreeError
from tests.optim.problem import gradient, start, trajectory

TRANSFORMS = {
    "identity": optim.identity(),
    "scale": optim.scale(0.5),
    "scale by a tensor": optim.scale(torch.tensor(0.5, dtype=torch.float64)),
    "schedule": optim.scale_by_schedule(optim.linear_schedule(0.1, 1.0, 3)),
    "learning rate": optim.scale_by_learning_rate(0.1),
    "decay": optim.add_decayed_weights(0.1),
    "decay by a tensor": optim.add_decayed_weights(torch.tensor(0.1, dtype=torch.float64)),
    "trace": optim.trace(0.9),
    "nesterov": optim.trace(0.9, nesterov=True),
    "clip": optim.clip(0.01),
    "clip by a tensor": optim.clip(torch.tensor(0.01, dtype=torch.float64)),
    "clip norm": optim.clip_by_global_norm(0.1),
    "clip norm by a tensor": optim.clip_by_global_norm(torch.tensor(0.1)),
    "adam": optim.scale_by_adam(),
    "lion": optim.scale_by_lion(),
    "rms": optim.scale_by_rms(),
    "rms, eps outside": optim.scale_by_rms(eps_in_sqrt=False),
    "rss": optim.scale_by_rss(),
    "chain": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.constant_schedule(0.1))),
    "masked": optim.masked(optim.scale_by_adam(), {"layers": [True, False], "gain": True, "unused": None}),
    "injected": optim.inject_hyperparams(optim.adamw)(0.1, weight_decay=0.1),
}

# These hand on, as they are, values that they have no business with.
PASSES_THROUGH = {"identity", "masked", "injected"}


def dtypes_and_shapes(values):
    return tree.structure(values), [(leaf.dtype, leaf.shape) for leaf in tree.leaves(values)]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_updates_and_state_keep_structure_dtype_and_shape(name, dtype):
    transform, params = TRANSFORMS[name], start(dtype)
    grads, state = gradient(params), transform.init(params)
    updates, new_state = transform.update(grads, state, params)
    assert dtypes_and_shapes(updates) == dtypes_and_shapes(grads)
    assert dtypes_and_shapes(new_state) == dtypes_and_shapes(state)
    if dtype != torch.float16:  # Adam's averages of squares vanish in float16
        assert all(leaf.isfinite().all() for leaf in tree.leaves(updates))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_update_writes_to_no_argument_and_returns_new_memory(name):
    transform, params = TRANSFORMS[name], start(torch.float32)
    arguments = (gradient(params), transform.init(params), params)
    before = [leaf.clone() for leaf in tree.leaves(arguments)]
    results = transform.update(*arguments)
    assert all(torch.equal(now, then) for now, then in zip(tree.leaves(arguments), before))
    if name not in PASSES_THROUGH:
        taken = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(arguments)}
        assert not any(leaf.untyped_storage().data_ptr() in taken for leaf in tree.leaves(results))


def test_state_in_the_parameters_dtype_takes_gradients_of_another():
    params = start(torch.bfloat16)
    grads = tree.map(lambda p: torch.ones_like(p, dtype=torch.float32), params)
    for name in ("trace", "adam", "lion", "rms", "rss", "decay"):
        transform = TRANSFORMS[name]
        state = transform.init(params)
        updates, new_state = transform.update(grads, state, params)
        assert dtypes_and_shapes(updates) == dtypes_and_shapes(grads), name
        assert dtypes_and_shapes(new_state) == dtypes_and_shapes(state), name


def test_apply_updates_keeps_the_parameters_dtype_and_rounds_once():
    params, updates = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0**-7 + 2.0**-10])
    assert optim.apply_updates(params, updates) == torch.tensor([1.0 + 2.0**-7], dtype=torch.bfloat16)
    assert optim.apply_updates(params, updates).dtype == torch.bfloat16


def test_apply_updates_leaves_a_parameter_whose_update_is_none():
    params = {"a": torch.ones(1), "b": torch.ones(1)}
    assert optim.apply_updates(params, {"a": torch.ones(1), "b": None}) == {"a": torch.tensor([2.0]), "b": params["b"]}


def test_chain_is_composition():
    params = start(torch.float64)
    links = [optim.clip_by_global_norm(0.1), optim.scale_by_adam(), optim.add_decayed_weights(0.1), optim.scale(-0.1)]
    optimizer, states = optim.chain(*links), [link.init(params) for link in links]
    by_hand, steps = params, 5
    for _ in range(steps):
        updates = gradient(by_hand)
        for i, link in enumerate(links):
            updates, states[i] = link.update(updates, states[i], by_hand)
        by_hand = optim.apply_updates(by_hand, updates)
    assert_same(trajectory(optimizer, params, steps)[-1], tree.leaves(by_hand))


def test_chain_of_nothing_is_the_identity():
    grads = gradient(start(torch.float32))
    updates, state = optim.chain().update(grads, optim.chain().init(grads))
    assert state == ()
    assert_same(tree.leaves(updates), tree.leaves(grads))


def test_chain_nests():
    flat = optim.chain(optim.clip(0.1), optim.trace(0.9), optim.scale(-0.1))
    nested = optim.chain(optim.chain(optim.clip(0.1), optim.trace(0.9)), optim.scale(-0.1))
    params = start(torch.float64)
    assert_same(trajectory(flat, params)[-1], trajectory(nested, params)[-1])


MASKS = {
    "tree": {"layers": [{"w": True, "b": False}, {"w": True, "b": False}], "gain": False, "unused": None},
    "prefix": {"layers": [{"w": True, "b": False}, False], "gain": True, "unused": None},
    "function": lambda params: tree.map(lambda p: p.ndim > 1, params),
    "function of the path": lambda params: tree.map_with_path(lambda path, p: path[-1] == "b", params),
    "all": True,
    "none": False,
}


@pytest.mark.parametrize("name", MASKS)
def test_masked_applies_to_marked_leaves_only(name):
    mask, params = MASKS[name], start(torch.float64)
    marks = mask(params) if callable(mask) else mask
    full = tree.leaves(tree.map(lambda m, sub: tree.map(lambda _: m, sub), marks, params))
    transform = optim.masked(optim.trace(0.5), mask)
    grads, state = gradient(params), transform.init(params)
    for _ in range(2):
        updates, state = transform.update(grads, state, params)
    # After two equal gradients the trace is 1.5 times one.
    expected = [g * 1.5 if m else g for m, g in zip(full, tree.leaves(grads))]
    assert_same(tree.leaves(updates), expected)
    assert len(tree.leaves(state)) == sum(full)


def test_masked_without_params_asks_the_updates():
    transform = optim.masked(optim.scale(2.0), lambda values: tree.map(lambda v: v.ndim > 1, values))
    grads = [torch.ones(1), torch.ones(1, 1)]
    assert_same(transform.update(grads, transform.init(grads))[0], [torch.ones(1), torch.full((1, 1), 2.0)])


def test_injected_schedules_give_the_same_trajectory_and_show_their_value():
    schedule = optim.linear_schedule(0.1, 0.0, 20)
    injected = optim.inject_hyperparams(optim.adamw)(schedule, weight_decay=0.1, mask=MASKS["function"])
    plain = optim.adamw(schedule, weight_decay=0.1, mask=MASKS["function"])
    params = start(torch.float64)
    for ours, other in zip(trajectory(injected, params), trajectory(plain, params)):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)
    state = injected.init(params)
    for step in range(3):
        _, state = injected.update(gradient(params), state, params)
        assert state.count == step + 1
        assert {k: v.item() for k, v in state.hyperparams.items()} == {
            "learning_rate": schedule(step),
            "weight_decay": 0.1,
        }


def test_injected_hyperparameters_can_be_replaced_between_steps():
    optimizer = optim.inject_hyperparams(optim.sgd, static_args=["momentum"])(0.5, momentum=0.0)
    state = optimizer.init(torch.zeros(1))
    assert state.hyperparams.keys() == {"learning_rate"}
    for rate in (0.5, 0.25, 0.125):
        state = state._replace(hyperparams={"learning_rate": torch.tensor(rate)})
        updates, state = optimizer.update(torch.ones(1), state)
        assert updates == -rate


def assert_same(ours, other):
    assert len(ours) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(ours, other))


def test_a_state_of_another_chain_is_refused():
    params = [torch.ones(2)]
    with pytest.raises(TreeError, match=r"chain\.update: the state is not of this chain"):
        optim.adamw(0.1).update(params, optim.sgd(0.1).init(params), params)


def test_gradients_of_another_structure_are_refused():
    optimizer = optim.adam(0.1)
    with pytest.raises(TreeError, match="structure"):
        optimizer.update({"a": torch.ones(2)}, optimizer.init({"b": torch.ones(2)}))
