"""The pass that narrows draws: before and after on small graphs, and equal results."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ptrainx.compile.passes.narrow_random import narrow_random
from ptrainx.core import torch_compat as tc
from ptrainx.mesh import AbstractMesh
from ptrainx.ops import random
from ptrainx.ops.random.operator import RANDOM

KEY = random.key(1)


def traced(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def printed(graph) -> list[str]:
    """One short line a node: `mul(random, 0.02)`."""
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            name = getattr(node.target, "_schema", None)
            name = name.name.split("::")[1] if name else node.target.__name__
            lines.append(f"{name}({', '.join(map(str, node.args))})")
    return lines


def check(fn, *args):
    """The narrowed graph; the original is unchanged, results are equal, and the metadata is that of the values."""
    module = traced(fn, *args)
    before = str(module.graph)
    graph = narrow_random(module.graph)
    assert str(module.graph) == before
    narrowed = GraphModule(module, graph)
    expected, got = module(*args), narrowed(*args)
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    values = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n):
            values[n] = super().run_node(n)
            return values[n]

    Recorder(narrowed).run(*args)
    for node, value in values.items():
        if isinstance(value, torch.Tensor):
            fake = node.meta["val"]
            assert (fake.shape, fake.dtype, fake.stride()) == (value.shape, value.dtype, value.stride())
    return graph


def drawn(graph) -> list[tuple[list[int], list[int]]]:
    """(start, size) of every draw."""
    return [(n.args[2], n.args[3]) for n in graph.nodes if n.target is RANDOM]


def test_before_and_after():
    def init(key):
        return (random.normal(key, (8, 6)).mul(0.02).split(2)[3].clone(),)

    assert printed(traced(init, KEY).graph)[:3] == [
        "random(key_1, [8, 6], [0, 0], [8, 6], normal, 0.0, 1.0)",
        "mul(random, 0.02)",
        "split(mul, 2)",
    ]
    assert printed(check(init, KEY)) == [
        "random(key_1, [8, 6], [6, 0], [2, 6], normal, 0.0, 1.0)",
        "mul(random_default, 0.02)",
    ]


NARROWED = {
    "the issue's example": (
        lambda k: (random.normal(k, (4096, 1024)) * 0.02).split(512)[3].clone(),
        [([1536, 0], [512, 1024])],
    ),
    "uniform with bounds, second dim": (
        lambda k: random.uniform(k, (8, 6), minval=-1.0, maxval=2.0).split(3, 1)[1].clone(),
        [([0, 3], [8, 3])],
    ),
    "truncated, transposed, cast": (
        lambda k: (random.truncated_normal(k, -2, 2, (8, 6)).t().to(torch.bfloat16) * 0.1).chunk(3)[1].clone(),
        [([0, 2], [8, 2])],
    ),
    "two axes, one after the other": (
        lambda k: random.normal(k, (8, 6)).split(4)[1].clone().split(2, 1)[2].clone(),
        [([4, 4], [4, 2])],
    ),
    "the same dim twice": (
        lambda k: random.normal(k, (8, 6)).split(4)[1].clone().split(2)[1].clone(),
        [([6, 0], [2, 6])],
    ),
    "an uneven last part": (lambda k: random.normal(k, (7, 3)).split(4)[1].clone(), [([4, 0], [3, 3])]),
    "a slice": (lambda k: random.randint(k, (9, 4), 5, 50, torch.int32)[2:5].clone(), [([2, 0], [3, 4])]),
    "a view that splits a dim": (
        lambda k: random.normal(k, (12, 8)).view(3, 4, 8).split(1)[2].clone(),
        [([8, 0], [4, 8])],
    ),
    "a view that merges dims": (
        lambda k: random.normal(k, (3, 4, 8)).view(12, 8).split(4)[1].clone(),
        [([1, 0, 0], [1, 4, 8])],
    ),
    "permuted": (
        lambda k: random.normal(k, (4, 3, 8)).permute(2, 0, 1).split(2, 1)[1].clone(),
        [([2, 0, 0], [2, 3, 8])],
    ),
    "a sum of two draws": (
        lambda k: (random.normal(k, (8, 6)) + random.uniform(k, (8, 6))).split(4)[1].clone(),
        [([4, 0], [4, 6]), ([4, 0], [4, 6])],
    ),
    "scaled by a broadcast row": (
        lambda k: (random.normal(k, (8, 6)) * random.uniform(k, (6,))).split(4)[1].clone(),
        [([0], [6]), ([4, 0], [4, 6])],
    ),
    "expanded": (lambda k: random.normal(k, (1, 6)).expand(8, 6).split(3, 1)[1].clone(), [([0, 3], [1, 3])]),
    "a mask": (lambda k: random.bernoulli(k, 0.5, (8, 6)).split(4)[1].clone(), [([4, 0], [4, 6])]),
    "two parts of one draw": (
        lambda k: torch.cat([random.normal(k, (8, 6)).split(2)[i] for i in (0, 2)]),
        [([0, 0], [2, 6]), ([4, 0], [2, 6])],
    ),
    "used whole": (lambda k: (lambda w: w.sum() + w.split(4)[1].sum())(random.normal(k, (8, 6))), [([0, 0], [8, 6])]),
    "a view that tears rows": (lambda k: random.normal(k, (4, 6)).view(3, 8).split(1)[1].clone(), [([0, 0], [4, 6])]),
    "a sum over the dim that is cut": (
        lambda k: random.normal(k, (8, 6)).cumsum(0).split(4)[1].clone(),
        [([0, 0], [8, 6])],
    ),
}


@pytest.mark.parametrize("case", NARROWED)
def test_draws_what_is_used(case):
    fn, expected = NARROWED[case]
    graph = check(lambda k: (fn(k),), KEY)
    assert drawn(graph) == expected


def test_fills_are_narrowed_too():
    def init(key):
        w = random.normal(key, (8, 6)).t()
        return w.split(3)[1].clone(), torch.zeros_like(w).split(3)[1].clone(), torch.ones(8, 6).split(2)[0].clone()

    graph = check(init, KEY)
    assert drawn(graph) == [([0, 3], [8, 3])]
    assert max(n.meta["val"].numel() for n in graph.nodes if n.op == "call_function") == 24


def test_a_fill_that_is_used_whole_does_not_keep_the_draw_whole():
    def init(key):
        w = random.normal(key, (8, 6))
        return w.split(4)[1].clone(), torch.full_like(w, 3.0)

    assert drawn(check(init, KEY)) == [([4, 0], [4, 6])]


def test_graphs_without_draws_stay():
    def fn(x):
        return (x.mul(2).split(2)[1].clone(),)

    module = traced(fn, torch.ones(4, 3))
    assert printed(narrow_random(module.graph)) == [
        line for line in printed(module.graph) if line != "getitem(split, 0)"
    ]


def test_origins_are_kept():
    module = traced(lambda k: (random.normal(k, (8, 6)).mul(2).split(4)[1].clone(),), KEY)
    for node in module.graph.nodes:
        node.meta["custom"] = {"origin": node.name}
    graph = narrow_random(module.graph)
    assert [n.meta["custom"]["origin"] for n in graph.nodes if n.op == "call_function"] == ["random", "mul"]


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize(
    "placements", [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(1)), (Shard(1), Shard(0))]
)
def test_what_dtensor_emits(rank, placements):
    view = AbstractMesh(data=4, model=2).rank_view(rank)
    shape = (16, 24)

    def init(key):
        spec = tc.make_spec(view, (Replicate(), Replicate()), key.shape, (1,), key.dtype)
        w = random.normal(tc.wrap_local(key, spec), shape) * 0.02
        m = torch.zeros_like(w)
        return [t.redistribute(view, placements).to_local() for t in (w, m)]

    graph = check(init, KEY)
    parts = 1
    for placement, n in zip(placements, (4, 2)):
        parts *= n if isinstance(placement, Shard) else 1
    assert max(n.meta["val"].numel() for n in graph.nodes if n.op == "call_function") == 16 * 24 // parts
    assert not [line for line in printed(graph) if line.startswith(("split", "clone"))]


def test_a_sharded_init_draws_every_number_once():
    mesh, shape = AbstractMesh(data=4, model=2), (10, 6)
    whole = torch.full(shape, float("nan"))

    def init(view, key):
        spec = tc.make_spec(view, (Replicate(), Replicate()), key.shape, (1,), key.dtype)
        value = random.normal(tc.wrap_local(key, spec), shape)
        return (value.redistribute(view, (Shard(0), Shard(1))).to_local(),)

    for rank in range(8):
        module = traced(functools.partial(init, mesh.rank_view(rank)), KEY)
        graph = narrow_random(module.graph)
        (local,) = GraphModule(module, graph)(KEY)
        for start, size in drawn(graph):
            block = tuple(slice(a, a + n) for a, n in zip(start, size))
            assert whole[block].isnan().all()
            whole[block] = local
    assert torch.equal(whole, random.normal(KEY, shape))
