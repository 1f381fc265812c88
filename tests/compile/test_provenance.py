"""Every node says which line it comes from, in which phase, which parameter it serves, and what its value is."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import Node

import ptrainx as px
from ptrainx import P
from ptrainx.compile.graph import is_collective, is_loop, loop_of, origin_of, schema_name, walk
from ptrainx.compile.provenance import annotate, argument_label, join_layers, merged_origin
from ptrainx.core.trace_context import Origin
from ptrainx.ops.loop import LOOP, LoopForm
from tests.compile.loops import traced
from tests.compile.models import convnet, gpt, mlp, scanned, train

CASES = {
    "data-parallel GPT": (gpt(), {"data": 2}, None),
    "sharded GPT": (gpt(), {"data": 2}, P("data")),
    "MLP": (mlp(), {"data": 2}, None),
    "sharded convnet": (convnet(), {"data": 2}, P("data")),
    "loop": (scanned(), {"data": 2}, None),
}


def layers_of(model: Any) -> set[str]:
    """The parameters' paths, as rules match them."""
    return {px.tree.path_str(path) for path, _ in px.tree.flatten_with_path(model.params)[0]}


def nodes_of(graph: Any) -> Iterator[tuple[Node, Origin]]:
    for node, _ in walk(graph.module.graph):
        if node.op not in ("placeholder", "output"):
            yield node, origin_of(node)


@functools.cache
def stages_of(name: str) -> tuple[Any, dict[str, Any]]:
    """(the model, its step by stage), traced once."""
    model, axes, weights = CASES[name]
    step, state, batch = train(model, px.make_mesh(axes, simulate=True), weights)
    traced = step.trace(state, *batch)
    return model, {"traced": traced, "lowered": traced.lower()}


@pytest.fixture(params=CASES)
def stages(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    return stages_of(request.param)


def test_every_node_tells_where_it_comes_from(stages: Any) -> None:
    model, by_name = stages
    known = layers_of(model)
    for name, stage in by_name.items():
        for graph in stage.graphs:
            met = set()
            for node, origin in nodes_of(graph):
                file, _, line = origin.source.rpartition(":")
                assert linecache.getline(file, int(line)), f"{node} has no source line: {origin}"
                assert origin.phase in ("forward", "backward", "update")
                assert origin.role in ("parameter", "gradient", "activation", "")
                if origin.phase != "update":
                    assert origin.layer, f"{node} {node.target} of {origin} serves no parameter"
                    assert origin.role, f"{node} {node.target} has no role"
                if origin.layer in known:
                    met.add((origin.layer, origin.phase))
            assert {layer for layer, phase in met if phase == "update"} == known
            if name == "traced":
                # Used and differentiated; a bias is used by the operator of its weight.
                assert met >= {(layer, "backward") for layer in known}
                assert met >= {(layer, "forward") for layer in known if layer.split("/")[-1] not in ("b", "bias")}


def test_products_belong_to_the_weight_that_they_use(stages: Any) -> None:
    """A product's layer is that of the one parameter whose shape it has among its operands, or whose gradient it is."""
    model, by_name = stages
    shapes = {px.tree.path_str(p): tuple(leaf.shape[-2:]) for p, leaf in px.tree.flatten_with_path(model.params)[0]}
    products = 0
    for node, origin in nodes_of(by_name["traced"].graphs[0]):
        if schema_name(node) in ("aten::mm", "aten::addmm"):
            products += 1
            involved = [tuple(n.meta["val"].shape) for n in (node, *node.all_input_nodes)]
            shape = shapes[origin.layer]
            assert shape in involved or shape[::-1] in involved, (node, origin)
    assert products


def test_gathers_and_reductions_name_their_parameter() -> None:
    model, by_name = stages_of("sharded GPT")
    found: dict[str, set[str]] = {}
    for node, origin in nodes_of(by_name["traced"].graphs[0]):
        if is_collective(node) and origin.reason.endswith("reshard"):
            found.setdefault(origin.role, set()).add(origin.layer)
    assert found == {"parameter": layers_of(model), "gradient": layers_of(model)}


def test_merged_reductions_name_all_their_layers() -> None:
    _, by_name = stages_of("data-parallel GPT")
    layers = [o.layer for n, o in nodes_of(by_name["lowered"].graphs[0]) if is_collective(n)]
    assert any("blocks/0..2" in layer for layer in layers), layers


def test_the_optimizer_s_state_belongs_to_its_parameter() -> None:
    model = mlp()
    step, state, batch = train(model, px.make_mesh(data=1))
    graph = step.lower(state, *batch).graphs[0].module.graph
    labels = [origin_of(n) for n in graph.nodes if n.op == "placeholder"]
    paths = [px.tree.path_str(p) for p, _ in px.tree.flatten_with_path(((state, *batch), {}))[0]]
    for path, origin in zip(paths, labels, strict=True):
        ends = [layer for layer in layers_of(model) if path.endswith("/" + layer)]
        assert origin.layer == (ends[0] if ends else ""), path
        assert origin.role == ("parameter" if "/params/" in path else "")


def test_without_a_gradient_parameters_are_known_by_name() -> None:
    evaluate = px.jit(lambda state, x: x @ state["params"]["w"], mesh=px.make_mesh(data=1))
    graph = evaluate.trace({"params": {"w": torch.ones(4, 4)}}, torch.ones(2, 4)).graphs[0]
    assert {o.layer for n, o in nodes_of(graph) if schema_name(n) == "aten::mm"} == {"w"}


def test_a_single_tensor_goes_by_its_argument_s_name() -> None:
    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sum()

    graph = px.jit(px.grad(loss), mesh=px.make_mesh(data=1)).trace(torch.ones(4, 4), torch.ones(2, 4)).graphs[0]
    assert {o.layer for _, o in nodes_of(graph)} == {"weight"}
    both = px.jit(px.grad(loss, (0, 1)), mesh=px.make_mesh(data=1)).trace(torch.ones(4, 4), torch.ones(2, 4))
    assert {o.layer for _, o in nodes_of(both.graphs[0])} == {"weight", "x"}


def test_the_layer_of_a_loop_s_body() -> None:
    """Inside a loop: the parameter where there is one, the loop's own line otherwise, outer loops first."""

    def marked(fn: Any, *shapes: tuple[int, ...], line: str) -> torch.fx.GraphModule:
        module = traced(fn, *shapes)
        for node in module.graph.nodes:
            node.meta["custom"] = {"origin": Origin(line)}
        return module

    def add_sine() -> torch.fx.GraphModule:
        return marked(lambda c, x: [torch.sin(c) + x], (4,), (4,), line="m.py:3")

    inner, thrice = add_sine(), LoopForm(1, 1, 3, False)
    middle = marked(lambda c, w, xs: [LOOP(inner, thrice, c @ w, xs)[0]], (4,), (4, 4), (3, 4), line="m.py:2")
    twice = LoopForm(1, 1, 2, False)
    outer = marked(lambda c, ws, xs: [LOOP(middle, twice, c, ws, xs)[0]], (4,), (2, 4, 4), (3, 4), line="m.py:1")
    annotate(outer.graph, [argument_label(p) for p in ("c", "params['w']", "xs")], "m.py:0")
    found = {(schema_name(n), origin_of(n).layer) for n, _ in walk(outer.graph) if schema_name(n)}
    assert ("aten::mm", "w") in found
    body = loop_of(next(n for n in outer.graph.nodes if is_loop(n))).body
    nested = next(n for n in body.graph.nodes if is_loop(n))
    assert origin_of(nested).layer == "scan@m.py:1/scan@m.py:2"
    only = add_sine()
    alone = marked(lambda c, xs: [LOOP(only, thrice, c, xs)[0]], (4,), (3, 4), line="m.py:2")
    annotate(alone.graph, [argument_label(p) for p in ("c", "xs")], "m.py:0")
    assert {origin_of(n).layer for n, _ in walk(alone.graph) if schema_name(n)} == {"scan@m.py:2"}


def test_a_loop_s_nodes_serve_stacked_parameters() -> None:
    """Gathers inside the loop belong to the stack that they slice; so do the gradients' reductions."""
    step, state, batch = train(scanned(), px.make_mesh(data=2, simulate=True))
    traced = step.trace(state, *batch).graphs[0]
    inside = {(origin_of(n).layer, times) for n, times in walk(traced.module.graph) if is_collective(n) and times == 3}
    assert inside == {(f"blocks/{name}", 3) for name in ("norm", "up", "down")}


JOINED = [
    ([], ""),
    (["wte"], "wte"),
    (["wte", "wte"], "wte"),
    (["blocks/0/qkv", "blocks/1/qkv", "blocks/2/qkv"], "blocks/0..2/qkv"),
    (["blocks/0/qkv", "blocks/1/o", "blocks/3/o"], "blocks/0..1,3"),
    (["blocks/0/qkv", "blocks/0/o"], "blocks/0/{o,qkv}"),
    ([f"blocks/0/{n}" for n in "abcd"], "blocks/0/*"),
    (["wte", "blocks/0/o", "lnf"], "blocks/0/o, lnf, wte"),
    ([*"abcde"], "a, b and 3 more"),
]


@pytest.mark.parametrize(("layers", "text"), JOINED)
def test_several_layers_in_short(layers: list[str], text: str) -> None:
    assert join_layers(layers) == text


def test_a_merged_origin_is_that_of_the_most_alike() -> None:
    first = Origin("a.py:1", "backward", True, "gradient of w", "blocks/0", "gradient")
    second = Origin("a.py:2", "backward", False, "gradient of v", "blocks/1", "activation")
    made = merged_origin([first, second], phase="update")
    assert made == Origin("a.py:1", "update", False, "gradient of w and 1 more", "blocks/0..1", "gradient")
    assert merged_origin([second, first, first]).reason == "gradient of w and 2 more"
    assert merged_origin([first]) == first
