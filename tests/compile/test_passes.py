"""Each pass, before and after, on graphs small enough to read; results equal the function's own."""

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.graph import is_collective, is_wait, origin_of, schema_name, writes
from ptrainx.compile.passes.bucket import bucket_collectives
from ptrainx.compile.passes.common import share_common
from ptrainx.compile.passes.dead import drop_dead
from ptrainx.compile.passes.functionalize import functionalize
from ptrainx.compile.passes.identities import drop_identities
from ptrainx.compile.passes.schedule import issue_early

WORLD = {"data": 2}


def traced(fn, *args, in_specs=P("data")):
    mesh = px.make_mesh(WORLD, simulate=True)
    return px.jit(fn, mesh=mesh, in_specs=in_specs).trace(*args).graphs[0]


def operators(graph):
    return [schema_name(n).split("::")[-1] for n in graph.module.graph.nodes if n.op == "call_function"]


def same_result(fn, *args, in_specs=P("data")):
    mesh = px.make_mesh(WORLD, simulate=True)
    got = px.device_get(px.jit(fn, mesh=mesh, in_specs=in_specs)(*args))
    for want, have in zip(px.tree.leaves(px.device_get(fn(*[a.clone() for a in args]))), px.tree.leaves(got)):
        torch.testing.assert_close(have, want)


def unused(x):
    x.sum() * 2.0  # a reduction that nobody needs
    px.reshard(x, P())  # a gather that nobody reads
    return x + 1.0


def test_dead_code_goes_with_its_collectives():
    graph = traced(unused, torch.arange(4.0))
    assert "all_gather_into_tensor" in operators(graph)
    graph = drop_dead(drop_identities(graph))
    assert operators(graph) == ["add"]


def chain(x):
    return (x.detach().view(8, 1).view(8).detach() * 2.0).view(8)


def test_identities_go():
    graph = drop_dead(drop_identities(traced(chain, torch.arange(8.0), in_specs=P("data"))))
    assert "detach" not in operators(graph)
    same_result(chain, torch.arange(8.0))


def twice(h, w):
    z = h @ w  # a sum over `data` is owed
    return torch.tanh(px.reshard(z, P())), torch.exp(px.reshard(z, P()))


def test_what_is_computed_twice_is_computed_once():
    h, w = torch.randn(4, 8), torch.randn(8, 4)
    specs = (P(None, "data"), P("data"))
    before = drop_dead(drop_identities(traced(twice, h, w, in_specs=specs)))
    assert operators(before).count("all_reduce") > 1
    after = drop_dead(share_common(before))
    assert operators(after).count("all_reduce") == 1
    same_result(twice, h, w, in_specs=specs)


def test_numbers_of_different_types_are_different_operands():
    def fn(x):
        return torch.full((2,), 1) + x.sum(), torch.full((2,), 1.0) + x.sum(), torch.full((2,), True)

    same_result(fn, torch.arange(4))


def writes_temporary(x):
    y = x * 2.0
    y += 1.0
    y.mul_(3.0)
    return y


def writes_through_view(x):
    y = x * 2.0
    y[0].add_(7.0)
    y.t()[1].zero_()
    return y


def reads_before_and_after(x):
    y = x * 2.0
    z = y + 1.0
    y.add_(5.0)
    return y, z


@pytest.mark.parametrize("fn", [writes_temporary, writes_through_view, reads_before_and_after])
def test_writes_into_what_was_made_inside(fn):
    graph = functionalize(traced(fn, torch.ones(4, 4), in_specs=P()))
    assert not any(writes(n) for n in graph.module.graph.nodes)
    same_result(fn, torch.ones(4, 4), in_specs=P())


def loss(params, x):
    for w in params:
        x = torch.tanh(x @ w)
    return (x * x).mean()


def gradients(params, x):
    return px.grad(loss)(params, x)


def reductions(graph):
    return [n for n in graph.module.graph.nodes if is_collective(n)]


def test_gradient_reductions_share_a_bucket():
    params = [torch.randn(4, 4) for _ in range(5)]
    x = torch.randn(8, 4)
    graph = drop_dead(drop_identities(traced(gradients, params, x, in_specs=(P(), P("data")))))
    before = [n for n in reductions(graph) if origin_of(n).asked]
    assert len(before) == 5
    after = [n for n in reductions(bucket_collectives(graph)) if origin_of(n).asked]
    assert len(after) == 1
    assert after[0].args[0].meta["val"].numel() == 5 * 16
    assert "4 more" in origin_of(after[0]).reason
    mesh = px.make_mesh(WORLD, simulate=True)
    got = px.device_get(px.jit(gradients, mesh=mesh, in_specs=(P(), P("data")))(params, x))
    for want, have in zip(gradients(params, x), got):
        torch.testing.assert_close(have, want)


def test_buckets_have_a_size(monkeypatch):
    monkeypatch.setattr("ptrainx.compile.passes.bucket.BUCKET_BYTES", 2 * 64)
    params = [torch.randn(4, 4) for _ in range(5)]
    graph = drop_dead(drop_identities(traced(gradients, params, torch.randn(8, 4), in_specs=(P(), P("data")))))
    sizes = [n.args[0].meta["val"].numel() for n in reductions(bucket_collectives(graph)) if origin_of(n).asked]
    assert sorted(sizes) == [16, 32, 32]


def needs_the_first(w, x):
    """The second gradient depends on the first one's sum: they can't share a bucket."""
    first = px.grad(lambda w: (x @ w).sum())(w)
    second = px.grad(lambda v: ((x @ v) ** 2).sum())(first)
    return first, second


def test_a_reduction_that_needs_another_stays_apart():
    x, w = torch.randn(8, 4), torch.randn(4)
    graph = bucket_collectives(drop_dead(drop_identities(traced(needs_the_first, w, x, in_specs=(P(), P("data"))))))
    assert len([n for n in reductions(graph) if origin_of(n).asked]) == 2
    mesh = px.make_mesh(WORLD, simulate=True)
    got = px.device_get(px.jit(needs_the_first, mesh=mesh, in_specs=(P(), P("data")))(w, x))
    for want, have in zip(needs_the_first(w, x), got):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def test_collectives_start_early_and_are_awaited_late():
    def fn(x, w):
        total = px.reshard((x * w).sum(0), P())
        other = x * 3.0
        for _ in range(3):
            other = torch.tanh(other)
        return other + total

    graph = issue_early(
        drop_dead(drop_identities(traced(fn, torch.randn(4, 4), torch.randn(4, 4), in_specs=(P("data"), P("data")))))
    )
    nodes = [n for n in graph.module.graph.nodes if n.op == "call_function"]
    start = next(i for i, n in enumerate(nodes) if is_collective(n))
    wait = next(i for i, n in enumerate(nodes) if is_wait(n))
    assert nodes[start].args[0] is nodes[start - 1]
    assert nodes[wait] in nodes[wait + 1].all_input_nodes
    assert wait - start >= 4
