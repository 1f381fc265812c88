"""Every report for a thousand devices that are not there, of a whole training step, on this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.timeline import Hardware, Link
from ptrainx.errors import TraceError
from tests.compile.models import gpt

DEVICES = 1024
MODEL = gpt(layers=2, D=64, T=64, B=DEVICES, V=128, heads=4)
PARAMETERS = sum(leaf.numel() for leaf in px.tree.leaves(MODEL.params))


@pytest.fixture(scope="module", params=[None, P("data")], ids=["data-parallel", "sharded"])
def lowered(request: pytest.FixtureRequest) -> Any:
    params = dict(MODEL.params, wpe=torch.ones(DEVICES, 64), wte=torch.ones(DEVICES, 64), lnf=torch.ones(64))

    def loss(p: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return MODEL.loss({**p, "wpe": p["wpe"][:64], "wte": p["wte"][:128]}, tokens, targets)

    return train_on(px.AbstractMesh(data=DEVICES), loss, params, request.param)


def train_on(mesh: px.AbstractMesh, loss: Any, params: Any, weights: Any) -> Any:
    """Lowered; weights with less than 1,024 rows stay whole."""
    optimizer = px.optim.adamw(1e-3)
    state = {"params": params, "opt": optimizer.init(params)}

    def place(leaf: Any) -> P:
        return weights if weights is not None and leaf.ndim and leaf.shape[0] % DEVICES == 0 else P()

    specs = px.tree.map(place, state)

    @px.jit(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=(specs, P()), donate_argnums=0)
    def step(state: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        def whole(p: Any) -> torch.Tensor:
            return loss(px.reshard(p, P()), tokens, targets)

        value, grads = px.value_and_grad(whole)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": px.optim.apply_updates(state["params"], updates), "opt": opt}, value

    return step.lower(state, *MODEL.batch)


def test_one_rank_stands_for_all(lowered: Any) -> None:
    assert [graph.rank for graph in lowered.graphs] == [0]


def test_comms(lowered: Any) -> None:
    """Each of the tree's gradients goes over the wire: as all-reduce 2 (n-1)/n of its bytes, scattered (n-1)/n."""
    small = PARAMETERS - (64 + 128) * 64
    large = 2 * DEVICES * 64
    sharded = any(c.kind == "reduce_scatter" for c in lowered.comms())
    sent = sum(c.bytes for c in lowered.comms() if c.phase == "backward")
    weight = small * 2 + large * (1 if sharded else 2)
    assert sent == pytest.approx(4 * weight * (DEVICES - 1) / DEVICES, rel=1e-3)


def test_cost_and_memory(lowered: Any) -> None:
    """A row of the batch a rank; the activations of one row and the whole parameters fit the peak."""
    products = sum(leaf.numel() for leaf in px.tree.leaves(MODEL.params["blocks"]) if leaf.ndim == 2)
    assert lowered.cost().flops >= 3 * 2 * 64 * products
    memory = lowered.memory()
    assert memory.peak_bytes > 4 * PARAMETERS
    assert "peak" in str(memory)
    assert {"forward", "backward", "update"} == {c.phase for c in lowered.cost()}


def test_text_and_time(lowered: Any) -> None:
    text = lowered.as_text()
    assert "i64[1024@data,64] = argument tokens" in text
    assert len(text.splitlines()) > 300
    found = lowered.timeline(Hardware(1e14, 2e12, link=Link(5e10, 1e-6)))
    assert found.compute < found.total <= found.unoverlapped


def test_two_axes() -> None:
    mesh = px.AbstractMesh(data=32, model=32)
    params = {"up": torch.ones(64, 1024), "down": torch.ones(1024, 64)}
    specs = {"up": P(None, "model"), "down": P("model")}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ p["up"]) @ p["down"]).square().mean()

    lowered = px.jit(px.grad(loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs).lower(
        params, torch.ones(64, 64)
    )
    # A 32nd of each product on a 32nd of the rows: three products of the first layer but one, three of the second.
    assert lowered.cost().flops == (2 + 3) * 2 * (64 // 32) * 64 * (1024 // 32)
    assert {axis for c in lowered.comms() for axis in c.axis.split("*")} == {"data", "model"}


def test_what_a_loop_implies_counts_every_step() -> None:
    """A sum of 8 floats over 2 ranks before each of four exponentials: 4 * 32 bytes; told by line and layer."""

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        def body(c: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, None]:
            return c + (x.t() @ x * w).sum(0).exp(), None

        return px.ops.scan(body, torch.zeros(8), params["w"])[0]

    args = ({"w": torch.ones(4, 8)}, torch.ones(4, 8))
    options: dict[str, Any] = {"mesh": px.make_mesh(data=2, simulate=True), "in_specs": (P(), P("data"))}
    line = fn.__code__.co_firstlineno + 2
    with pytest.raises(TraceError, match=rf"implies communication of 128 bytes(.|\n)*\bw\b(.|\n)*planning.py:{line}"):
        px.jit(fn, max_implicit_bytes=127, **options)(*args)
    px.jit(fn, max_implicit_bytes=128, **options)(*args)
