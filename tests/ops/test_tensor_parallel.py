"""Tensor- and sequence-parallel blocks: values and gradients of one device, and exactly what is sent.

A row is a function of parameters and data with its plain form, their specs, and what it sends on a mesh of data=2,
model=2: the label that reports give it, kind, axis and bytes of each. All rows are one program. The specs hold on each
mesh; B = 4 rows of T = 8 tokens, width D = 16, vocabulary V = 30,
which 4 ranks split unevenly.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P
from tests.compile.programs import assert_close, values

B, T, D, V = 4, 8, 16, 30
X = values(B, T, D)
TOKENS = (torch.arange(B * T).reshape(B, T) * 7 + 3) % V
TARGETS = TOKENS.roll(1, 1).index_fill(1, torch.tensor([2]), -100).index_fill(0, torch.tensor([0]), -100)
MODEL, COLUMNS, SEQUENCE, WIDTH = P("model"), P(None, "model"), P("data", "model"), P("data", None, "model")


class Row(NamedTuple):
    """A block: its form on a mesh, its plain form, its operands, integers among them, and what is sent."""

    fn: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor]
    floats: tuple[torch.Tensor, ...]
    specs: tuple[P, ...]
    sends: tuple[str, ...] = ()
    data: tuple[torch.Tensor, ...] = ()
    data_spec: P = P("data")


def weighed(out: torch.Tensor) -> torch.Tensor:
    """A number to which every element contributes otherwise."""
    return out if out.ndim == 0 else (out * torch.linspace(0.5, 1.5, out.shape[-1])).square().sum()


def mlp(x, up, up_bias, down, down_bias):
    return F.gelu(x @ up + up_bias) @ down + down_bias


def split_mlp(sequence_dim):
    def fn(x, up, up_bias, down, down_bias):
        hidden = F.gelu(px.ops.column_parallel(x, up, up_bias))
        return px.ops.row_parallel(hidden, down, down_bias, sequence_dim=sequence_dim)

    return fn


def plain_loss(logits, targets, z_loss=0.0, **settings):
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **settings)
    counted = (targets != settings.get("ignore_index", -100)).flatten()
    squares = logits.flatten(0, -2).logsumexp(-1).square()[counted]
    return loss + z_loss * (squares.sum() if settings.get("reduction") == "sum" else squares.mean())


def losses(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").reshape(targets.shape)


WEIGHTS = (values(D, 32, seed=1), values(32, seed=2), values(32, D, seed=3), values(D, seed=4))
LOGITS, HEAD, TABLE = 8 * values(B, T, V, seed=5), 2 * values(D, V, seed=6), values(V, D, seed=7)
ACTIVATION = 2 * 8 * D * 4  # bytes of a rank's rows [B / 2, T, D], in float32
ROWS_BYTES = 2 * 8 * 4  # of a number for each of them

ROWS = {
    "mlp": Row(
        split_mlp(None), mlp, (X, *WEIGHTS), (P("data"), COLUMNS, MODEL, MODEL, P()),
        (f"px.ops.row_parallel: the result: all_reduce model {ACTIVATION}",
         f"gradient of px.ops.column_parallel: x: all_reduce model {ACTIVATION}"),
    ),
    "mlp, sequence": Row(
        split_mlp(1), mlp, (X, *WEIGHTS), (SEQUENCE, COLUMNS, MODEL, MODEL, P()),
        (f"px.ops.column_parallel: x: all_gather model {ACTIVATION // 2}",
         f"px.ops.row_parallel: the result: reduce_scatter model {ACTIVATION // 2}",
         f"gradient of px.ops.row_parallel: the result: all_gather model {ACTIVATION // 2}",
         f"gradient of px.ops.column_parallel: x: reduce_scatter model {ACTIVATION // 2}"),
    ),
    "embedding": Row(
        lambda table, tokens: px.ops.vocab_parallel_embedding(tokens, table),
        lambda table, tokens: F.embedding(tokens, table), (TABLE,), (MODEL,),
        (f"px.ops.vocab_parallel_embedding: the result: all_reduce model {ACTIVATION}",),
        (TOKENS,),
    ),
    "embedding, sequence": Row(
        lambda table, tokens: px.ops.vocab_parallel_embedding(tokens, table, sequence_dim=1),
        lambda table, tokens: F.embedding(tokens, table), (TABLE,), (MODEL,),
        (f"px.ops.vocab_parallel_embedding: the result: reduce_scatter model {ACTIVATION // 2}",
         f"gradient of px.ops.vocab_parallel_embedding: the result: all_gather model {ACTIVATION // 2}"),
        (TOKENS,),
    ),
    "cross-entropy": Row(
        lambda logits, targets: px.ops.cross_entropy(logits, targets, label_smoothing=0.1, z_loss=0.01),
        lambda logits, targets: plain_loss(logits, targets, 0.01, label_smoothing=0.1),
        (LOGITS,), (WIDTH,),
        (f"px.ops.cross_entropy: statistics of the rows: all_reduce model {4 * ROWS_BYTES}",
         "px.ops.cross_entropy: targets that count: all_reduce data 4"),
        (TARGETS,),
    ),
    "cross-entropy of each row": Row(
        lambda logits, targets: px.ops.cross_entropy(logits, targets, reduction="none"), losses,
        (LOGITS,), (WIDTH,),
        (f"px.ops.cross_entropy: statistics of the rows: all_reduce model {3 * ROWS_BYTES}",),
        (TARGETS,),
    ),
    "chunked": Row(
        lambda x, head, targets: px.ops.chunked_cross_entropy(x, head, targets, chunk=12, z_loss=0.01),
        lambda x, head, targets: plain_loss(x @ head, targets, 0.01), (X, HEAD), (SEQUENCE, COLUMNS),
        (f"px.ops.chunked_cross_entropy: hidden values: all_gather model {ACTIVATION // 2}",
         f"px.ops.chunked_cross_entropy: statistics of the rows: all_reduce model {3 * ROWS_BYTES}",
         "px.ops.chunked_cross_entropy: targets that count: all_reduce data 4",
         f"gradient of px.ops.chunked_cross_entropy: hidden values: reduce_scatter model {ACTIVATION // 2}"),
        (TARGETS,),
    ),
    "chunked, the head whole": Row(
        lambda x, head, targets: px.ops.chunked_cross_entropy(x, head, targets, chunk=16, reduction="sum"),
        lambda x, head, targets: plain_loss(x @ head, targets, reduction="sum"),
        (X, HEAD), (SEQUENCE, P()), (), (TARGETS,), SEQUENCE,
    ),
    "norms, sequence": Row(
        lambda x, w, b: px.ops.layer_norm(px.ops.rms_norm(x, w), w, b),
        lambda x, w, b: F.layer_norm(F.rms_norm(x, (D,), w, 1e-6), (D,), w, b),
        (X, 1 + values(D, seed=8), values(D, seed=9)), (SEQUENCE, P(), P()),
    ),
    "rms norm, width": Row(
        lambda x, w: px.ops.rms_norm(x, w), lambda x, w: F.rms_norm(x, (D,), w, 1e-6),
        (X, 1 + values(D, seed=8)), (WIDTH, MODEL),
        (f"px.ops.rms_norm: sums of the rows: all_reduce model {2 * ROWS_BYTES}",),
    ),
    "layer norm, width": Row(
        lambda x, w, b: px.ops.layer_norm(x, w, b), lambda x, w, b: F.layer_norm(x, (D,), w, b),
        (X, 1 + values(D, seed=8), values(D, seed=9)), (WIDTH, MODEL, MODEL),
        (f"px.ops.layer_norm: sums of the rows: all_reduce model {4 * ROWS_BYTES}",),
    ),
}  # fmt: skip


def everything(floats: dict[str, tuple], data: dict[str, tuple]) -> Any:
    """Rows' numbers, and the gradients of all their operands."""

    def total(floats: dict[str, tuple]) -> Any:
        found = {name: weighed(ROWS[name].fn(*floats[name], *data[name])) for name in floats}
        return sum(found.values()), found

    gradients, found = px.grad(total, has_aux=True)(floats)
    return found, gradients


def expected(names: list[str]) -> Any:
    """The same by the plain forms and autograd."""
    leaves = {name: [x.clone().requires_grad_() for x in ROWS[name].floats] for name in names}
    found = {name: weighed(ROWS[name].plain(*leaves[name], *ROWS[name].data)) for name in names}
    sum(found.values()).backward()
    return {n: x.detach() for n, x in found.items()}, {n: tuple(x.grad for x in leaves[n]) for n in names}


def check(mesh: px.Mesh, names: list[str]) -> None:
    """Rows on a mesh."""
    rows = {name: ROWS[name] for name in names}
    floats, data = {n: r.floats for n, r in rows.items()}, {n: r.data for n, r in rows.items()}
    specs = {n: r.specs for n, r in rows.items()}, {n: r.data_spec for n, r in rows.items()}
    assert_close(px.jit(everything, mesh=mesh, in_specs=specs)(floats, data), expected(names), rtol=1e-5, atol=1e-5)


def on_real_ranks(axes: dict[str, int], names: list[str]) -> None:
    """The same on processes."""
    check(px.make_mesh(axes), names)


FEW = ["mlp, sequence", "embedding, sequence", "chunked", "rms norm, width"]
"""One of each kind."""


@pytest.mark.parametrize(
    ("axes", "names"),
    [({"data": 2, "model": 2}, list(ROWS)), ({"data": 1, "model": 4}, FEW[1:3])],
    ids=["2x2", "4"],
)
def test_values_and_gradients_are_those_of_one_device(axes, names):
    check(px.make_mesh(axes, simulate=True), names)


@pytest.mark.processes
@pytest.mark.parametrize(("world", "data", "names"), [(2, 1, FEW)], ids=["2"])
def test_values_and_gradients_of_processes(pool, world, data, names):
    pool.run(on_real_ranks, world, {"data": data, "model": 2}, names)


@pytest.mark.parametrize("name", ROWS)
def test_what_is_sent(name):
    """But for the sums that gradients owe in the end."""
    row = ROWS[name]
    step = px.jit(
        px.grad(lambda floats, data: weighed(row.fn(*floats, *data)), reduce=False),
        mesh=px.AbstractMesh(data=2, model=2),
        in_specs=(row.specs, row.data_spec),
    )
    sent: collections.Counter[str] = collections.Counter()
    for c in step.comms(row.floats, row.data):
        if not c.reason.startswith("a sum owed in the result"):
            sent[f"{c.reason}: {c.kind} {c.axis}"] += c.bytes
    assert {f"{what} {n}" for what, n in sent.items()} == set(row.sends)


def test_plain_values():
    for row in ROWS.values():
        assert_close(row.fn(*row.floats, *row.data), row.plain(*row.floats, *row.data), rtol=1e-5)


def test_a_loss_in_chunks_holds_no_more_logits_than_a_chunk():
    def peak(loss):
        step = px.jit(px.grad(loss), mesh=px.AbstractMesh(data=2, model=2), in_specs=(P("data"), COLUMNS, P("data")))
        report = step.lower(torch.ones(64, 8), torch.ones(8, 1024), torch.zeros(64, dtype=torch.int64)).memory()
        return report.peak_bytes - report.argument_bytes

    logits = 32 * 512 * 4  # of a rank
    assert peak(lambda x, head, targets: px.ops.cross_entropy(x @ head, targets)) > 2 * logits
    assert peak(lambda x, head, targets: px.ops.chunked_cross_entropy(x, head, targets, chunk=4)) < logits


def test_inside_a_loop_and_remat():
    """Two layers and the loss of each one's output, as a loop over layers' weights."""

    def loss(weights, head, table, tokens, targets):
        def body(x, layer):
            h = px.ops.column_parallel(px.ops.rms_norm(x), layer["up"])
            x = x + px.ops.row_parallel(h.relu(), layer["down"], sequence_dim=1)
            return x, px.ops.chunked_cross_entropy(x, head, targets, chunk=9)

        x = px.ops.vocab_parallel_embedding(tokens, table, sequence_dim=1)
        return px.scan(px.remat(body), x, weights)[1].sum()

    weights = {"up": values(2, D, 32), "down": values(2, 32, D, seed=1)}
    args = (weights, HEAD, TABLE, TOKENS, TARGETS)
    specs = ({"up": P(None, None, "model"), "down": P(None, "model")}, COLUMNS, MODEL, P("data"), P("data"))
    grad = px.value_and_grad(loss, argnums=(0, 1, 2))
    got = px.jit(grad, mesh=px.make_mesh(data=1, model=2, simulate=True), in_specs=specs)(*args)

    leaves = px.tree.map(lambda x: x.clone().requires_grad_(), (weights, HEAD, TABLE))
    layers, head, table = leaves
    x, want = F.embedding(TOKENS, table), torch.zeros(())
    for up, down in zip(layers["up"], layers["down"]):
        x = x + (F.rms_norm(x, (D,), None, 1e-6) @ up).relu() @ down
        want = want + plain_loss(x @ head, TARGETS)
    want.backward()
    assert_close(got, (want.detach(), px.tree.map(lambda x: x.grad, leaves)), rtol=1e-5, atol=1e-5)


def test_in_bfloat16_losses_are_computed_in_float32():
    x, head = X.bfloat16(), HEAD.bfloat16()
    step = px.jit(
        px.value_and_grad(lambda x, head: px.ops.chunked_cross_entropy(x, head, TARGETS, chunk=12), argnums=(0, 1)),
        mesh=px.make_mesh(data=1, model=2, simulate=True),
        in_specs=(SEQUENCE, COLUMNS),
    )
    loss, gradients = step(x, head)
    leaves = [v.double().requires_grad_() for v in (x, head)]
    want = plain_loss(leaves[0] @ leaves[1], TARGETS)
    want.backward()
    assert loss.dtype == torch.float32
    assert abs(loss - want) < 5e-3 * want
    for got, leaf in zip(px.device_get(gradients), leaves):
        assert got.dtype == torch.bfloat16
        assert (got - leaf.grad).norm() < 2e-2 * leaf.grad.norm()


def test_logits_that_a_mask_rules_out_are_no_nan():
    masked = LOGITS.clone()
    masked[..., V // 2 :] = -torch.inf  # all that the last rank has
    targets = TARGETS % (V // 2)
    step = px.jit(
        px.value_and_grad(lambda logits: px.ops.cross_entropy(logits, targets)),
        mesh=px.make_mesh(data=2, model=2, simulate=True),
        in_specs=WIDTH,
    )
    leaf = masked.clone().requires_grad_()
    want = plain_loss(leaf, targets)
    want.backward()
    assert_close(step(masked), (want.detach(), leaf.grad))


def test_in_the_body_of_shard_map_a_loss_is_of_a_ranks_part():
    mesh = px.make_mesh(data=2, model=1, simulate=True)

    def mean(head, x, targets):
        return px.pmean(px.ops.chunked_cross_entropy(x, head, targets, chunk=3), "data")

    around = px.shard_map(mean, in_specs=(P(), P("data"), P("data")), out_specs=P())
    got = px.jit(px.value_and_grad(around), mesh=mesh)(HEAD, X, TOKENS)
    leaf = HEAD.clone().requires_grad_()
    want = plain_loss(X @ leaf, TOKENS)
    want.backward()
    assert_close(got, (want.detach(), leaf.grad), rtol=1e-5)


W = values(D, 32)
MISTAKES = {
    "a weight split the other way": (
        lambda x: px.ops.row_parallel(px.ops.column_parallel(x, W), px.reshard(W.t(), COLUMNS)),
        px.errors.SpecError, r"(?s)split over 'model' along dim 1.*P\('model'\)",
    ),
    "a rank without rows": (
        lambda x: px.ops.vocab_parallel_embedding(TOKENS * 0, px.reshard(W[:1], MODEL)),
        px.errors.SpecError, "a table of size 1 leaves a rank without any",
    ),
    "no such dim": (
        lambda x: px.ops.row_parallel(px.ops.column_parallel(x, W), W.t(), sequence_dim=3),
        px.errors.SpecError, "sequence_dim=3 is no dim",
    ),
    "no such axis": (lambda x: px.ops.column_parallel(x, W, axis="tensor"), px.errors.SpecError, "names axis 'tensor'"),
    "targets of another shape": (
        lambda x: px.ops.cross_entropy(x, TARGETS[0]), px.errors.InputError, r"logits \[\.\.\., V\]"
    ),
    "a head of another width": (
        lambda x: px.ops.chunked_cross_entropy(x, W[1:], TARGETS), px.errors.InputError, r"head \[D, V\]"
    ),
    "settings": (
        lambda x: px.ops.cross_entropy(x, TARGETS, label_smoothing=2.0, z_loss=-1.0, reduction="max"),
        px.errors.InputError, "label_smoothing=2.0.*z_loss=-1.0.*reduction='max'",
    ),
    "a second derivative": (
        lambda x: px.grad(lambda x: px.grad(px.ops.cross_entropy)(x, TOKENS % D).square().sum())(x),
        px.errors.GradientError, "differentiated twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name):
    fn, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        px.jit(fn, mesh=px.make_mesh(data=2, model=2, simulate=True), in_specs=P("data"))(X)
