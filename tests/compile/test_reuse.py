"""Memory that is taken over in place never changes a result; checked against the function itself on copies."""

import pytest
import torch

import ptrainx as px
from ptrainx.compile.reuse import plan_reuse


def swap(p, m):
    return m, p


def both_views(p, m):
    view = p.t()
    return p * 2.0, view + m


CASES = {
    "update": lambda p, m: (p - 0.1 * m, 0.9 * m + p),
    "swap": swap,
    "swap computed": lambda p, m: (m * 1.0, p * 2.0),
    "identity and use": lambda p, m: (m, m + p),
    "transposed self": lambda p, m: (p + p.t(), m + 1),
    "same operand twice": lambda p, m: (p * p, m + m),
    "matmul": lambda p, m: (p @ m, m + 1),
    "reduced, then written": lambda p, m: (p / p.sum(), m + p.mean()),
    "rolled": lambda p, m: (torch.roll(p, 1, 0), m + p),
    "one value, two results": lambda p, m: ((p + m),) * 2,
    "unchanged": lambda p, m: (p, m + p),
    "view read later": both_views,
    "broadcast": lambda p, m: (p[:1] + m, m[0] * 2.0),
    "dtype changes": lambda p, m: ((p > 0) * m, p.double() + m),
    "parts of one": lambda p, m: tuple(c * 2.0 + c.sum() for c in (p + m).chunk(2)),
    "expanded": lambda p, m: (p[:1].expand(4, 4) + m, p + m),
    "chain": lambda p, m: ((((p + m) * 2.0).sqrt() + 1.0).exp(), m),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("donate", [(), (0,), (0, 1)])
def test_results_are_those_of_the_function(name, donate):
    fn = CASES[name]
    p, m = torch.rand(4, 4) + 1.0, torch.rand(4, 4) + 1.0
    expected = fn(p.clone(), m.clone())
    kept = [t.clone() for t in (p, m)]
    args = [t.clone() for t in kept]
    got = px.jit(fn, mesh=px.make_mesh(data=1), donate_argnums=donate)(*args)
    for want, have in zip(expected, px.device_get(got)):
        assert torch.equal(want, have)
    for i, (arg, before) in enumerate(zip(args, kept)):
        if i not in donate:
            assert torch.equal(arg, before), f"argument {i} was not donated and has changed"


def update(p, m, g):
    m = 0.9 * m + g
    return p - 0.1 * m, m


def test_an_update_is_written_where_the_parameter_was():
    graph = px.jit(update, mesh=px.make_mesh(data=1)).lower(*[torch.rand(4, 4)] * 3).graphs[0].module.graph
    donated = plan_reuse(graph, {0, 1})
    assert {node.args[index].op for node, index in donated.items()} >= {"placeholder"}
    temporaries_only = plan_reuse(graph, set())
    assert all(node.args[index].op != "placeholder" for node, index in temporaries_only.items())


def test_the_donated_buffer_holds_the_result():
    mesh = px.make_mesh(data=1)
    p, m, g = px.device_put([torch.rand(64, 64) for _ in range(3)], None, mesh)
    addresses = {p.to_local().data_ptr(), m.to_local().data_ptr()}
    p, m = px.jit(update, mesh=mesh, donate_argnums=(0, 1))(p, m, g)
    assert {p.to_local().data_ptr(), m.to_local().data_ptr()} == addresses


def test_a_view_of_what_is_computed_once_for_several_readers_is_not_overwritten() -> None:
    """Equal values become one, whose views belong to different readers."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        places = [torch.arange(4.0) for _ in range(3)]
        return places[0].unsqueeze(1) * 5 + x, places[1].unsqueeze(1) * 9 + x, places[2] + x

    x = torch.ones(4, 4)
    got = px.jit(step, mesh=px.make_mesh(data=1, simulate=True))(x)
    for a, b in zip(px.device_get(got), step(x)):
        assert torch.equal(a, b)
