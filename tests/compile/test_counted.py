"""What ranks really send, counted call by call, is what `comms()` says before anything runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.comms import CommReport
from ptrainx.errors import MeshError
from tests.compile.models import convnet, gpt, mlp, scanned, train
from tests.compile.programs import MLP, MLP_SPECS, X, sgd
from tests.support.pool import Pool

MODELS = {"GPT": gpt, "MLP": mlp, "convnet": convnet, "loop": scanned}


def predicted(report: CommReport) -> tuple[Counter, Counter]:
    """(calls, bytes) by kind and axis."""
    calls: Counter = Counter()
    sent: Counter = Counter()
    for c in report:
        calls[c.kind, c.axis] += c.count
        sent[c.kind, c.axis] += c.bytes
    return calls, sent


def compare(step: Any, args: Any, mesh: px.Mesh) -> int:
    """Runs a step twice, compiled inside and outside the count; the bytes of one call."""
    calls, expected = predicted(step.comms(*args))
    for _ in range(2):
        with px.testing.count_bytes(mesh) as sent:
            step(*args)
        assert (sent.calls, sent.bytes_of) == (calls, expected)
    return sent.total_bytes


def train_on_two(name: str, sharded: bool) -> int:
    mesh = px.make_mesh(data=2)
    step, state, batch = train(MODELS[name](), mesh, P("data") if sharded else None)
    kept = px.jit(step.fn, mesh=mesh, in_specs=step.in_specs, out_specs=step.out_specs)
    return compare(kept, (state, *batch), mesh)


@pytest.mark.parametrize("sharded", [False, True], ids=["data-parallel", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_training_sends_what_was_said(pool: Pool, name: str, sharded: bool) -> None:
    for total in pool.run(train_on_two, 2, name, sharded):
        assert total > 0


def by_tensors(axes: dict[str, int], batch_spec: Any) -> int:
    mesh = px.make_mesh(axes)
    step = px.jit(sgd, mesh=mesh, in_specs=(MLP_SPECS, batch_spec), out_specs=(MLP_SPECS, P()))
    return compare(step, (MLP, X), mesh)


def test_tensor_parallel(pool: Pool) -> None:
    for total in pool.run(by_tensors, 2, {"model": 2}, P()):
        assert total > 0


def test_two_axes(pool: Pool) -> None:
    for total in pool.run(by_tensors, 4, {"data": 2, "model": 2}, P("data")):
        assert total > 0


def gathered_and_scanned() -> int:
    """A loop of 3 steps, each with a gather of its weights and a sum at its end."""
    mesh = px.make_mesh(data=2)

    def fn(ws: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return px.ops.scan(lambda c, w: (torch.tanh(c @ px.reshard(w, P())), None), x, ws)[0].sum()

    step = px.jit(px.grad(fn), mesh=mesh, in_specs=(P(None, "data"), P("data")), out_specs=P(None, "data"))
    return compare(step, (torch.ones(3, 8, 8) / 8, X), mesh)


def test_a_loop_sends_in_every_step(pool: Pool) -> None:
    """Gathers and scatters of half a [8, 8] float matrix: 128 bytes a step each way at least."""
    for total in pool.run(gathered_and_scanned, 2):
        assert total >= 2 * 3 * 128


def test_nothing_is_sent_on_a_simulated_mesh() -> None:
    with pytest.raises(MeshError, match="nothing is sent"), px.testing.count_bytes(px.make_mesh(data=2, simulate=True)):
        pass


def accumulated_and_at_once() -> tuple[int, int]:
    """Bytes that a rank sends for gradients, of a batch at once and of eight microbatches."""
    mesh = px.make_mesh(data=2)
    w, x = torch.ones(8, 4), torch.ones(32, 8)
    fn = px.value_and_grad(lambda w, x: (x @ w).square().mean())
    found = []
    for one in (fn, px.accumulate_grads(fn, 8)):
        step = px.jit(one, mesh=mesh, in_specs=(P(), P("data")))
        step(w, x)
        with px.testing.count_bytes(mesh) as sent:
            step(w, x)
        found.append(sent.total_bytes)
    return found[0], found[1]


def test_microbatches_send_what_one_step_sends(pool: Pool) -> None:
    for once, accumulated in pool.run(accumulated_and_at_once, 2):
        # Gradient and loss: an all-reduce over two ranks sends as much as it reduces.
        assert once == accumulated == (8 * 4 + 1) * 4
