"""Casts and gathers: a cast goes first where nobody reads the wide value; a cast there and back is nothing."""

from __future__ import annotations

import pytest
import torch

import ptrainx as px
from ptrainx import P
from ptrainx.compile.graph import schema_name
from ptrainx.compile.passes.identities import drop_identities
from tests.compile.programs import values

X, f32, bf16, f16 = values(8, 8), torch.float32, torch.bfloat16, torch.float16
SIZE = 8 * 8


def whole(x):
    return px.reshard(x, P(None, None))


# program, where the argument lies, bytes that the gather sends to the other device
CASES = {
    "rows": (lambda x: whole(x).to(bf16) * 2, P("data"), SIZE),
    "columns": (lambda x: whole(x).to(f16) * 2, P(None, "data"), SIZE),
    "views": (lambda x: whole(x).view(4, 16).to(bf16) * 2, P("data"), SIZE),
    "a slice": (lambda x: whole(x)[:, 1:5].to(bf16) * 2, P("data"), SIZE),
    "two casts": (lambda x: (whole(x).to(bf16) * 2, whole(x).t().to(bf16) * 3), P("data"), SIZE),
    "two dtypes": (lambda x: (whole(x).to(bf16) * 2, whole(x).to(f16) * 3), P("data"), 2 * SIZE),
    "the wide one is read": (lambda x: (whole(x).to(bf16) * 2, whole(x) * 3), P("data"), 2 * SIZE),
    "the wide one is returned": (lambda x: (whole(x).to(bf16) * 2, whole(x)), P("data"), 2 * SIZE),
    "to a wider one": (lambda x: whole(x).to(torch.float64) * 2, P("data"), 2 * SIZE),
    "to integers": (lambda x: whole(x).to(torch.int8) * 2, P("data"), 2 * SIZE),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_gathered(name):
    fn, spec, sent = CASES[name]
    step = px.jit(fn, mesh=px.make_mesh(data=2, simulate=True), in_specs=spec, out_specs=P())
    assert sum(row.bytes for row in step.comms(X)) == sent
    with px.make_mesh(data=1):
        expected = fn(px.device_put(X, P()))  # operator by operator, without any pass
    for got, want in zip(px.tree.leaves(px.device_get(step(X))), px.tree.leaves(px.device_get(expected)), strict=True):
        assert torch.equal(got, want)


# dtype of the argument, dtype between, whether the pair of casts goes
PAIRS = [(bf16, f32, True), (f16, f32, True), (f32, torch.float64, True), (bf16, f16, False), (f32, bf16, False)]


@pytest.mark.parametrize(("start", "between", "goes"), PAIRS, ids=str)
def test_a_cast_there_and_back(start, between, goes):
    step = px.jit(lambda x: x.to(between).to(start) * 2, mesh=px.make_mesh(data=2, simulate=True), in_specs=P("data"))
    graph = drop_identities(step.trace(X.to(start)).graphs[0])
    casts = [node for node in graph.module.graph.nodes if schema_name(node) == "aten::_to_copy" and node.users]
    product = next(node for node in graph.module.graph.nodes if schema_name(node) == "aten::mul")
    assert (product.args[0] not in casts) == goes
    assert torch.equal(px.device_get(step(X.to(start))), X.to(start).to(between).to(start) * 2)
