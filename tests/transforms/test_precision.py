"""Precision: what is cast, what is sent in which dtype, and gradients equal to sums done by hand in that dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P
from ptrainx.errors import InputError
from tests.compile.programs import values

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
ROWS, SIZE = 8, 8 * 8
W, X = values(8, 8), values(ROWS, 8, seed=1)
BFLOATS = [px.Precision(compute=bf16, reduce=r) for r in (f32, bf16)]
HALVES = [px.Precision(compute=f16, reduce=r) for r in (f32, f16)]


def loss(w, x):
    """A sum over rows, so that each row's share of the gradient is the same wherever it is computed."""
    return (x @ w).float().square().sum()


def gathered(w, x):
    return loss(px.reshard(w, P(None, None)), x)


def layers(w, x):
    """The same loss, its matrix a slice of a stack that a loop gathers."""
    total, _ = px.scan(lambda c, layer: (c + gathered(layer, x), None), torch.zeros(()), torch.stack([w, w]))
    return total / 2


def rematerialized(w, x):
    return px.remat(gathered)(w, x)


# --- the answer by hand ----------------------------------------------------------------------------------------------


def share(rows, policy, w=W):
    """The gradient of some rows in the compute dtype, by torch alone."""
    low = w.to(policy.compute).requires_grad_()
    return torch.autograd.grad(loss(low, rows.to(policy.compute)), low)[0]


def summed(shares, dtype):
    total = shares[0].to(dtype)
    for more in shares[1:]:
        total = total + more.to(dtype)
    return total.to(f32)


def by_hand(policy, devices, microbatches=1):
    """Each device adds up its microbatches in float32, the devices' sums are added up in `reduce`."""
    blocks = X.chunk(devices)
    own = [summed([share(b[i::microbatches], policy) for i in range(microbatches)], f32) / microbatches for b in blocks]
    return summed([g.to(policy.reduce) for g in own], policy.reduce)


# --- the forms -------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """A gradient function of (policy), where the parameter lies, what is sent for it, and how many microbatches."""

    grad: Any
    spec: Any
    kinds: tuple[str, ...]
    microbatches: int = 1


def unreduced(policy):
    grad = px.grad(policy(loss), reduce=False)
    return lambda w, x: policy.reshard(grad(w, x), P("data"))


FORMS = {
    "replicated": Form(lambda p: px.grad(p(loss)), P(), ("all_reduce",)),
    "policy inside": Form(lambda p: px.grad(lambda w, x: 1.0 * p(loss)(w, x)), P(), ("all_reduce",)),
    "unreduced, then scattered": Form(unreduced, P(), ("reduce_scatter",)),
    "in parts, implied gather": Form(lambda p: px.grad(p(loss)), P("data"), ("all_gather", "reduce_scatter")),
    "in parts": Form(lambda p: px.grad(p(gathered)), P("data"), ("all_gather", "reduce_scatter")),
    "in columns": Form(lambda p: px.grad(p(gathered)), P(None, "data"), ("all_gather", "reduce_scatter")),
    "rematerialized": Form(lambda p: px.grad(p(rematerialized)), P("data"), ("all_gather", "reduce_scatter")),
    "accumulated": Form(lambda p: px.accumulate_grads(px.grad(p(loss)), 2), P(), ("all_reduce",), 2),
    "accumulated in a loop": Form(lambda p: px.accumulate_grads(px.grad(p(loss)), 4), P(), ("all_reduce",), 4),
    "accumulated, in parts": Form(
        lambda p: px.accumulate_grads(px.grad(p(loss)), 2), P("data"), ("all_gather", "reduce_scatter"), 2
    ),
}


def bytes_sent(comms):
    found: dict[str, set[int]] = {}
    for row in comms:
        found.setdefault(row.kind, set()).add(row.bytes // row.count)
    return found


@pytest.mark.parametrize("policy", BFLOATS, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_gathers_move_the_compute_dtype_and_sums_the_reduce_dtype(name, policy):
    form = FORMS[name]
    mesh = px.make_mesh(data=2, simulate=True)
    step = px.jit(form.grad(policy), mesh=mesh, in_specs=(form.spec, P("data")))
    wide = policy.reduce.itemsize
    expected = {"all_gather": SIZE // 2 * 2, "reduce_scatter": SIZE // 2 * wide, "all_reduce": SIZE * wide}
    assert bytes_sent(step.comms(W, X)) == {kind: {expected[kind]} for kind in form.kinds}
    got = px.device_get(step(W, X))
    want = by_hand(policy, 2, form.microbatches)
    assert got.dtype == f32
    if form.microbatches == 1:
        assert torch.equal(got, want)
    else:  # the order of additions is not by device first
        torch.testing.assert_close(got, want, rtol=0, atol=policy_eps(policy) * want.abs().max().item())


def policy_eps(policy):
    return 4 * torch.finfo(policy.reduce).eps


OTHERS = [
    *(({"data": 1, "model": 1}, "graph", policy) for policy in (BFLOATS[0], HALVES[1])),
    *(({"data": 2, "model": 2}, "graph", policy) for policy in (*BFLOATS, *HALVES)),
    ({"data": 2, "model": 2}, "eager", BFLOATS[1]),
]


@pytest.mark.parametrize(("axes", "backend", "policy"), OTHERS, ids=str)
def test_on_other_meshes_and_backends(axes, backend, policy):
    mesh = px.make_mesh(axes, simulate=True)
    step = px.jit(px.value_and_grad(policy(loss)), mesh=mesh, in_specs=(P("data", "model"), P("data")), backend=backend)
    value, grad = px.device_get(step(W, X))
    want = by_hand(policy, axes["data"])
    assert (value.dtype, grad.dtype) == (f32, f32)
    bound = 4 * torch.finfo(policy.compute).eps
    torch.testing.assert_close(value, loss(W, X), rtol=bound, atol=0)
    torch.testing.assert_close(grad, want, rtol=0, atol=bound * want.abs().max().item())


def test_layers_of_a_loop_are_gathered_one_by_one_in_the_compute_dtype():
    mesh = px.make_mesh(data=2, simulate=True)
    policy = px.Precision(compute=bf16)
    step = px.jit(px.grad(policy(layers)), mesh=mesh, in_specs=(P("data"), P("data")))
    sent = step.comms(W, X)
    assert {(row.kind, row.count, row.bytes // row.count) for row in sent if row.kind == "all_gather"} == {
        ("all_gather", 2, SIZE)
    }
    assert {row.bytes // row.count for row in sent if row.kind == "reduce_scatter"} == {SIZE // 2 * 4}
    want = by_hand(policy, 2)
    bound = 2 * torch.finfo(bf16).eps * want.abs().max().item()
    torch.testing.assert_close(px.device_get(step(W, X)), want, rtol=0, atol=bound)


def test_bfloat16_parameters_are_summed_wide_and_rounded_once():
    mesh = px.make_mesh(data=2, simulate=True)
    policy = px.Precision(params=bf16, compute=bf16, reduce=f32)
    low = policy.cast_to_params(W)
    step = px.jit(px.grad(policy(loss)), mesh=mesh, in_specs=(P(), P("data")))
    assert bytes_sent(step.comms(low, X)) == {"all_reduce": {SIZE * 4}}
    want = summed([share(rows, policy, low.float()) for rows in X.chunk(2)], f32).to(bf16)
    assert torch.equal(px.device_get(step(low, X)), want)


# --- what is cast ----------------------------------------------------------------------------------------------------


def model(params, x):
    return F.linear(torch.relu(F.linear(x, params["a"])), params["b"])


def test_one_device_computes_what_autocast_computes():
    params, target = {"a": values(16, 8), "b": values(4, 16, seed=2)}, values(ROWS, 4, seed=3)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    with torch.autocast("cpu", bf16):
        expected = model(leaves, X)
    ((expected.float() - target) ** 2).mean().backward()

    def objective(params, x):
        return ((px.Precision(compute=bf16)(model)(params, x) - target) ** 2).mean()

    grads = px.grad(objective)(params, X)
    assert torch.equal(px.Precision(compute=bf16)(model)(params, X), expected.float())
    for name in params:
        assert torch.equal(grads[name], leaves[name].grad)


def test_floats_are_cast_and_nothing_else():
    seen = {}

    def fn(tree, *, flag):
        seen.update(tree, flag=flag)
        return tree

    given = {
        "double": torch.ones(2, dtype=torch.float64),
        "float": torch.ones(2),
        "tokens": torch.arange(3),
        "mask": torch.tensor([True]),
        "complex": torch.ones(1, dtype=torch.complex64),
        "key": px.random.key(0),
        "number": 0.5,
        "nothing": None,
    }
    out = px.Precision(compute=bf16, output=f16)(fn)(given, flag=torch.zeros(()))
    assert (seen["double"].dtype, seen["float"].dtype, seen["flag"].dtype) == (bf16, bf16, bf16)
    for name in ("tokens", "mask", "complex", "key", "number", "nothing"):
        assert seen[name] is given[name]
        assert out[name] is given[name]
    assert (out["double"].dtype, out["float"].dtype) == (f16, f16)


def test_casts_of_trees():
    policy = px.Precision(params=f16, compute=bf16, output=torch.float64)
    tree = {"w": torch.ones(2), "n": torch.arange(2)}
    for cast, dtype in (
        (policy.cast_to_params, f16),
        (policy.cast_to_compute, bf16),
        (policy.cast_to_output, torch.float64),
    ):
        assert (cast(tree)["w"].dtype, cast(tree)["n"].dtype) == (dtype, torch.int64)


def test_a_policy_of_one_dtype_adds_nothing():
    mesh = px.make_mesh(data=2, simulate=True)
    texts = [
        px.jit(px.grad(fn), mesh=mesh, in_specs=(P("data"), P("data"))).lower(W, X).comms()
        for fn in (gathered, px.Precision()(gathered))
    ]
    assert [(r.kind, r.bytes) for r in texts[0]] == [(r.kind, r.bytes) for r in texts[1]]


def test_of_several_policies_the_widest_reduction_counts():
    mesh = px.make_mesh(data=2, simulate=True)

    def two(w, x):
        halves = x.chunk(2, 1)
        return sum(px.Precision(compute=bf16, reduce=r)(loss)(w[:4], h) for r, h in zip((bf16, f32), halves))

    step = px.jit(px.grad(two), mesh=mesh, in_specs=(P(), P("data")))
    assert [row.bytes for row in step.comms(W, X) if row.phase == "backward"] == [SIZE * 4]


# --- the text form and mistakes --------------------------------------------------------------------------------------

TEXTS = {
    "bf16": px.Precision(compute=bf16),
    "fp16": px.Precision(compute=f16),
    "float32": px.Precision(),
    "params=bf16, compute=bfloat16": px.Precision(params=bf16, compute=bf16),
    "params=f32,compute=half,reduce=f16,output=f64": px.Precision(f32, f16, f16, torch.float64),
}


@pytest.mark.parametrize("text", TEXTS)
def test_policies_as_text(text):
    assert px.Precision.parse(text) == TEXTS[text]
    assert px.Precision.parse(str(TEXTS[text])) == TEXTS[text]


MISTAKES = {
    "integers": (lambda: px.Precision(compute=torch.int8, reduce=torch.bool), ("compute, reduce", "reduce=torch.bool")),
    "a name": (lambda: px.Precision(compute="bf16"), ("compute='bf16'", "px.Precision.parse")),
    "eight bits": (lambda: px.Precision(compute=torch.float8_e4m3fn), ("float8_e4m3fn", "torch.bfloat16")),
    "unknown names": (
        lambda: px.Precision.parse("compute=int8,speed=f32"),
        ("compute=int8, speed=f32", "params, compute"),
    ),
    "twice": (lambda: px.Precision.parse("compute=bf16,compute=f32"), ("compute=bf16, compute=f32", "at most once")),
    "no dtype": (lambda: px.Precision.parse("fast"), ("compute=fast", 'write "bf16"')),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_with_a_way_out(name):
    call, parts = MISTAKES[name]
    with pytest.raises(InputError) as caught:
        call()
    assert all(part in str(caught.value) for part in (*parts, "fix:"))


# --- real ranks ------------------------------------------------------------------------------------------------------


def on_real_ranks() -> list[Any]:
    mesh = px.make_mesh(data=2)
    results = []
    for name in ("replicated", "in columns"):
        form = FORMS[name]
        for policy in BFLOATS:
            step = px.jit(form.grad(policy), mesh=mesh, in_specs=(form.spec, P("data")))
            said = step.comms(W, X).total_bytes
            step(W, X)
            with px.testing.count_bytes(mesh) as sent:
                grad = step(W, X)
            results.append((said, sent.total_bytes, px.device_get(grad)))
    return results


@pytest.mark.processes
@pytest.mark.long
def test_two_processes_send_what_comms_says(pool):
    forms = [(policy, name) for name in ("replicated", "in columns") for policy in BFLOATS]
    for results in pool.run(on_real_ranks, 2):
        for (policy, name), (said, sent, grad) in zip(forms, results, strict=True):
            wide = policy.reduce.itemsize
            want = SIZE * wide if name == "replicated" else SIZE + SIZE // 2 * wide
            assert (said, sent) == (want, want)
            assert torch.equal(grad, by_hand(policy, 2))
