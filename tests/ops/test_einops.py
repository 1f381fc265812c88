"""Einops patterns on sharded values: einops' own answer on one device, and what is sent.

A row is a pattern with its operands, their specs, and what it sends on top of the sums that it leaves owed: pairs of
kind and mesh axis, for a mesh of data=2, model=2. All rows of a mesh are one program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import einops
import pytest
import torch

import ptrainx as px
from ptrainx import P
from tests.compile.programs import assert_close, values


class Row(NamedTuple):
    """A pattern, operands as (shape, spec), sizes of axes, and what is sent."""

    call: str
    pattern: str
    operands: tuple[tuple[tuple[int, ...], P], ...]
    sends: tuple[tuple[str, str], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def label(self) -> str:
        """How reports call it."""
        return f"px.ops.{self.call.split()[0]} {self.pattern!r}"

    @property
    def specs(self) -> tuple[P, ...]:
        """Of the operands."""
        return tuple(spec for _, spec in self.operands)

    def args(self) -> tuple[torch.Tensor, ...]:
        """The operands."""
        return tuple(values(*shape, seed=i) for i, (shape, _) in enumerate(self.operands))

    def run(self, functions: Any, *args: torch.Tensor) -> torch.Tensor:
        """The pattern by `px.ops` or by einops."""
        name, _, reduction = self.call.partition(" ")
        return getattr(functions, name)(*args, self.pattern, *([reduction] if reduction else []), **dict(self.sizes))


def one(call: str, pattern: str, shape: tuple[int, ...], spec: P, *sends: tuple[str, str], **sizes: int) -> Row:
    """A row of one operand."""
    return Row(call, pattern, ((shape, spec),), sends, tuple(sizes.items()))


def product(pattern: str, *operands: tuple[tuple[int, ...], P], sends: tuple[tuple[str, str], ...] = ()) -> Row:
    """A row of `einsum`."""
    return Row("einsum", pattern, operands, sends)


BOTH, LAST, FLAT = P("data", "model"), P("data", None, "model"), P(("data", "model"))
GATHER = ("all_gather", "model")
ROWS = [
    # What is split stays major in its dim.
    one("rearrange", "b t d -> d t b", (2, 3, 4), LAST),
    one("rearrange", "b t (h d) -> b h t d", (2, 3, 8), LAST, h=4),
    one("rearrange", "b h t d -> b t (h d)", (2, 4, 3, 2), BOTH),
    one("rearrange", "b t (k h d) -> k b t h d", (2, 3, 8), P("data"), k=2, h=2),
    one("rearrange", "... d -> d ...", (4, 3, 4), LAST),
    one("rearrange", "b (t 1) d -> b 1 (t d)", (2, 4, 3), BOTH),
    one("rearrange", "(b t) d -> b t d", (8, 3), FLAT, b=2),
    one("rearrange", "(b t) d -> t b d", (8, 3), FLAT, b=4),
    one("rearrange", "b t d -> (b t) d", (2, 4, 3), BOTH),
    # It does not.
    one("rearrange", "b t (h d) -> b t (d h)", (2, 3, 8), LAST, GATHER, h=4),
    one("rearrange", "b h t d -> t b (h d)", (2, 2, 3, 4), P("data", None, None, "model"), GATHER),
    one("rearrange", "b t c -> (b t) c", (4, 4, 3), BOTH, GATHER),
    one("rearrange", "b t c -> (t b) c", (4, 2, 3), BOTH, ("all_gather", "data")),
    one("rearrange", "b t c -> c (t b)", (4, 4, 3), P(None, FLAT[0])),
    one("rearrange", "t (h d) -> t h d", (2, 6), BOTH, GATHER, h=3),
    one("rearrange", "b (h d) -> b d h", (3, 8), P(None, FLAT[0]), h=2),
    one("rearrange", "b (h d) e -> b h d e", (3, 8, 1), P(None, "model"), h=8),
    # Reductions.
    one("reduce sum", "b t d -> b d", (4, 3, 4), LAST),
    one("reduce mean", "b (t k) -> t b", (4, 8), BOTH, k=2),
    one("reduce min", "b (t k) -> b t", (4, 8), BOTH, k=2),
    one("reduce prod", "b (t 2) c -> c b", (4, 8, 2), P("data")),
    one("reduce sum", "b t d -> b", (4, 3, 4), LAST),
    one("reduce mean", "b t d -> ", (4, 3, 4), LAST),
    one("reduce max", "b t d -> t b", (4, 3, 4), LAST, ("all_reduce", "model")),
    # Repeats.
    one("repeat", "b d -> b (d r)", (4, 4), BOTH, r=3),
    one("repeat", "b d -> b 2 d 1", (4, 4), BOTH),
    one("repeat", "b d -> b (r d)", (4, 4), BOTH, GATHER, r=3),
    # Products.
    product("b t d, d h -> b t h", ((2, 3, 4), P("data")), ((4, 6), P(None, "model"))),
    product("b t d, d e -> t b e", ((2, 3, 4), LAST), ((4, 6), P("model"))),
    product("b d, d h -> b h", ((4, 8), BOTH), ((8, 2), P())),
    product("b n i h, b n j h -> b n i j", ((2, 2, 3, 4), BOTH), ((2, 2, 5, 4), BOTH)),
    product("b n i j, b n j h -> b i n h", ((2, 2, 3, 5), BOTH), ((2, 2, 5, 4), BOTH)),
    product("i d, j d -> i j", ((4, 6), P("model")), ((6, 6), P("model")), sends=(GATHER,)),
    product("i, j -> j i", ((4,), P("data")), ((4,), P("model"))),
    product("... d, d h -> ... h", ((2, 3, 4), P("data")), ((4, 2), P(None, "model"))),
    product("a b, b c, c d -> a d", ((4, 4), P("data")), ((4, 2), P("model")), ((2, 2), P())),
    product("i i j k, l -> i l", ((3, 3, 4, 2), P()), ((2,), P("model"))),
]  # fmt: skip
ARGS = [row.args() for row in ROWS]


WEIGHTS = [torch.linspace(0.5, 1.5, r.numel()).reshape(r.shape) for r in (row.run(einops, *row.args()) for row in ROWS)]
"""One for each element of a result, so that each has a gradient of its own."""


def everything(all_args: list[tuple[torch.Tensor, ...]], some: slice = slice(None)) -> Any:
    """Some rows' results, and the gradients of all operands."""

    def loss(all_args: list[tuple[torch.Tensor, ...]]) -> Any:
        results = [row.run(px.ops, *args) for row, args in zip(ROWS[some], all_args)]
        return sum((result * weight).sum() for result, weight in zip(results, WEIGHTS[some])), results

    gradients, results = px.grad(loss, has_aux=True)(all_args)
    return results, gradients


def expected(some: slice = slice(None)) -> Any:
    """The same by einops and autograd."""
    leaves = px.tree.map(lambda x: x.clone().requires_grad_(), ARGS[some])
    results = [row.run(einops, *args) for row, args in zip(ROWS[some], leaves)]
    sum((result * weight).sum() for result, weight in zip(results, WEIGHTS[some])).backward()
    return [x.detach() for x in results], px.tree.map(lambda x: x.grad, leaves)


SPECS = ([row.specs for row in ROWS],)


def on_real_ranks() -> None:
    """A part of the rows, on processes."""
    some = slice(1, None, 12)
    specs = ([row.specs for row in ROWS[some]],)
    step = px.jit(lambda args: everything(args, some), mesh=px.make_mesh(data=1, model=2), in_specs=specs)
    assert_close(step(ARGS[some]), expected(some))


def test_values_and_gradients_are_those_of_one_device():
    step = px.jit(everything, mesh=px.make_mesh(data=2, model=2, simulate=True), in_specs=SPECS)
    assert_close(step(ARGS), expected())


@pytest.mark.processes
def test_values_and_gradients_of_processes(pool):
    pool.run(on_real_ranks, 2)


def test_what_is_sent():
    def results(all_args):
        return [row.run(px.ops, *args) for row, args in zip(ROWS, all_args)]

    comms = px.jit(results, mesh=px.AbstractMesh(data=2, model=2), in_specs=SPECS).comms(ARGS)
    named = {row.label: [(c.kind, c.axis, c.count) for c in comms if row.label in c.reason] for row in ROWS}
    assert named == {row.label: [(*sent, 1) for sent in row.sends] for row in ROWS}
    assert all(c.reason.startswith("a sum owed in the result") for c in comms if "px.ops" not in c.reason)


def test_a_broken_axis_is_named():
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    with pytest.raises(px.errors.TraceError, match=r"breaks h \(split by 'model'\)"):
        px.jit(
            lambda x: px.ops.rearrange(x, "b (h d) -> b (d h)", h=4),
            mesh=mesh,
            in_specs=P("data", "model"),
            max_implicit_bytes=0,
        )(torch.ones(4, 8))


def test_sums_that_gradients_owe_stay_owed():
    def loss(w, x):
        w = px.ops.rearrange(w, "d (k h) -> k d h", k=2)
        return px.ops.einsum(x, w, "b d, k d h -> k b h").square().sum()

    w, x = values(4, 8), values(8, 4)
    step = px.jit(
        px.grad(loss, reduce=False),
        mesh=px.AbstractMesh(data=2, model=2),
        in_specs=(P(), P("data")),
        out_specs=P(unreduced=("data",)),
    )
    assert not step.comms(w, x)


def test_inside_loops_remat_and_an_unevenly_split_dim():
    def loss(w, x):
        def body(h, w):
            heads = px.ops.rearrange(h, "b (n d) -> n b d", n=2)
            return px.ops.rearrange(px.ops.einsum(heads, w, "n b d, n d e -> n b e"), "n b e -> b (n e)").tanh(), None

        h, _ = px.scan(px.remat(body), x, w)
        return px.ops.reduce(h[:3], "b d -> d b", "max").sum()

    w, x = values(3, 2, 4, 4), values(4, 8)
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    got = px.jit(px.value_and_grad(loss), mesh=mesh, in_specs=(P(None, "model"), P("data", "model")))(w, x)
    leaf = w.clone().requires_grad_()
    want = loss(leaf, x)
    want.backward()
    assert_close(got, (want.detach(), leaf.grad))


def test_in_the_body_of_shard_map_a_pattern_is_of_a_ranks_part():
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    x = values(4, 8)
    parts = px.shard_map(
        lambda x: px.ops.einsum(px.ops.rearrange(x, "b (h d) -> h (d b)", d=2), torch.ones(4), "h k, k -> h k"),
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
    )(x)
    part = einops.rearrange(x[:2, :4], "b (h d) -> h (d b)", d=2)
    torch.testing.assert_close(px.device_get(parts)[:2, :4], part)


def test_the_eager_backend_and_second_derivatives():
    mesh = px.make_mesh(data=2, model=2, simulate=True)

    def cube(w, x):
        return px.ops.einsum(px.ops.rearrange(x, "b (h d) -> h b d", h=2), w, "h b d, h d -> b").pow(3).sum()

    def second(w, x):
        return px.grad(lambda w: px.grad(cube)(w, x).square().sum())(w)

    w, x = values(2, 2), values(4, 4)
    specs = (P("model"), P("data", "model"))
    assert_close(px.jit(px.grad(cube), mesh=mesh, in_specs=specs, backend="eager")(w, x), px.grad(cube)(w, x))
    leaf = w.clone().requires_grad_()
    (first,) = torch.autograd.grad(
        (torch.einsum("bhd,hd->b", x.reshape(4, 2, 2), leaf) ** 3).sum(), leaf, create_graph=True
    )
    assert_close(px.jit(second, mesh=mesh, in_specs=specs)(w, x), torch.autograd.grad(first.square().sum(), leaf)[0])


def test_plain_values_and_several_tensors():
    x = values(2, 3)
    assert_close(px.ops.rearrange([x, x], "n a b -> a (n b)"), einops.rearrange([x, x], "n a b -> a (n b)"))
    assert_close(px.ops.reduce(x, "a b -> b", torch.sum), x.sum(0))


BAD = {
    "a dim too few": lambda x: px.ops.rearrange(x, "a b c -> a"),
    "an axis that vanishes": lambda x: px.ops.rearrange(x, "a b -> a"),
    "a size that does not divide": lambda x: px.ops.rearrange(x, "a (b c) -> a b c", b=3),
    "an unknown reduction": lambda x: px.ops.reduce(x, "a b -> a", "median"),
    "sizes that differ": lambda x: px.ops.einsum(x, torch.ones(3, 2), "a b, b c -> a c"),
    "no pattern": lambda x: px.ops.einsum(x, x),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_told(name):
    with pytest.raises(px.errors.InputError, match=r"px\.ops\.\w+"):
        BAD[name](torch.ones(4, 4))
    with pytest.raises(px.errors.InputError, match=r"px\.ops\.\w+"):
        px.jit(BAD[name], mesh=px.make_mesh(data=2, simulate=True), in_specs=P("data"))(torch.ones(4, 4))


def test_a_placed_value_outside_of_a_step_is_refused():
    x = px.device_put(torch.ones(4, 4), P("data"), px.make_mesh(data=2, simulate=True))
    with pytest.raises(px.errors.TraceError, match=r"outside of a step"):
        px.ops.rearrange(x, "a b -> b a")
