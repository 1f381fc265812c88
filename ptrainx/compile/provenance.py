"""Which parameter every node of a graph serves, and what its value is to the step.

Enters: a graph as it was traced, where differentiation has left two kinds of marks (on the way into a function, each
differentiated leaf; on the way out, its gradient). Leaves: the same graph, every node's `Origin` with `layer` and
`role`. `merged_origin` says what a node is that a pass makes of several. Next stage: `passes`.

A layer is a parameter's path as rules match it (`blocks/3/qkv`):

- a parameter, and what views, casts and gathers make of it: its own;
- an activation: that of the parameter it is computed with, else of the latest one on its way;
- in the backward: that of the forward operation whose derivative it is;
- a gradient, from the operator that makes it through its reductions: its parameter's;
- in the update, and of the optimizer's state: that of the one parameter it is about, none where several meet;
- inside a loop, what serves no parameter: the loop itself, as `scan@train.py:31`.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from ptrainx.compile.graph import (
    body_of,
    is_call,
    is_collective,
    is_loop,
    is_wait,
    loop_of,
    origin_of,
    output_node,
    schema_name,
)
from ptrainx.core.trace_context import Origin

__all__ = ["ArgumentLabel", "annotate", "argument_label", "join_layers", "merged_origin"]

_CARRIERS = {
    "_to_copy", "_unsafe_view", "alias", "clone", "contiguous", "detach", "expand", "narrow", "permute", "reshape",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "to", "transpose", "unsqueeze", "view",
    "cat", "constant_pad_nd", "chunk", "unbind", "stack",
}  # fmt: skip
"""Operators that move a value or convert it, and compute nothing."""


@dataclasses.dataclass(frozen=True)
class ArgumentLabel:
    """What is known of an argument before the trace: its path as rules match it, and the layer if it is a parameter
    by name."""

    path: str = ""
    layer: str = ""


def argument_label(expression: str) -> ArgumentLabel:
    """The label of an argument from its path in Python's form.

    A leaf under a field, key or argument called `params` is a parameter, whether or not it is differentiated.

    >>> argument_label("state.params['blocks'][3]['qkv']")
    ArgumentLabel(path='state/params/blocks/3/qkv', layer='blocks/3/qkv')
    """
    found = re.findall(r"^(\w+)|\.(\w+)|\['([^']*)'\]|\[(\w+)\]", expression)
    keys = [next(filter(None, groups), "") for groups in found]
    layer = keys[keys.index("params") + 1 :] if "params" in keys else []
    return ArgumentLabel("/".join(keys), "/".join(layer))


def annotate(graph: Graph, arguments: Sequence[ArgumentLabel], source: str) -> None:
    """Completes the origins of a traced graph, its loops' bodies included.

    Args:
        graph: as traced; nodes marked with a role are what is known.
        arguments: a label for each of the first placeholders; captured values come after them.
        source: `file:line` of the function, for what has no line of its own: its arguments.
    """
    for node in graph.nodes:
        if not (node.meta.get("custom") or {}).get("origin"):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), "origin": Origin(source)}
    sweep = _Sweep(graph, {}, "")
    sweep.label_arguments(arguments)
    sweep.run()


class _Sweep:
    """One graph's annotation.

    Args:
        graph: the graph.
        layer_of_call: call of a torch function -> layer of its forward; shared by a graph and the bodies of its loops.
        loop: the loop whose body this is, "" outside.
    """

    def __init__(self, graph: Graph, layer_of_call: dict[int, str], loop: str):
        self.graph, self.layer_of_call, self.loop = graph, layer_of_call, loop
        self.layer: dict[Node, str] = {}
        self.role: dict[Node, str] = {}
        self.parts: dict[Node, list[tuple[str, str]]] = {}  # of a loop: its results, one by one
        self.called: set[int] = set()
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.placeholders = [n for n in graph.nodes if n.op == "placeholder"]

    def label_arguments(self, arguments: Sequence[ArgumentLabel]) -> None:
        """Parameters as far as marks tell; by name otherwise; the optimizer's state by the ends of paths."""
        for node in self.graph.nodes:
            origin = origin_of(node)
            if origin.role == "parameter" and origin.layer:
                self._trace_back(node, origin.layer)
        known = {layer for layer in self.layer.values() if layer}
        for node, label in zip(self.placeholders, arguments):
            if node in self.layer:
                continue
            if label.layer:
                self._set(node, label.layer, "parameter")
            elif (of := _longest_suffix(label.path, known)) is not None:
                self._set(node, of, "")

    def label_operands(self, labels: Sequence[tuple[str, str]]) -> None:
        """Of a loop's body: the layers and roles of what it is given."""
        for node, (layer, role) in zip(self.placeholders, labels):
            self._set(node, layer, role)

    def _trace_back(self, node: Node, layer: str) -> None:
        current: Node | None = node
        while current is not None and current not in self.layer:
            self._set(current, layer, "parameter")
            current = _carried(current)

    def _set(self, node: Node, layer: str, role: str) -> None:
        self.layer[node], self.role[node] = layer, role

    def run(self, gradients: Mapping[int, str] | None = None) -> None:
        """Annotates; `gradients` are the results of a loop's body that are gradients, by index, with their layers."""
        self._mark_gradients(gradients or {})
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._visit(node)
        self._fill_from_readers()
        for node in self.graph.nodes:
            if node.op != "output":
                origin = dataclasses.replace(
                    origin_of(node), layer=self.layer.get(node, "") or self.loop, role=self.role.get(node, "")
                )
                node.meta["custom"] = {**(node.meta.get("custom") or {}), "origin": origin}

    def _mark_gradients(self, results: Mapping[int, str]) -> None:
        """From each gradient back to the operator that makes it."""
        todo = [(n, origin_of(n).layer) for n in self.graph.nodes if origin_of(n).role == "gradient"]
        outputs = output_node(self.graph).args[0]
        todo += [(outputs[i], layer) for i, layer in results.items()]  # type: ignore[index]
        while todo:
            node, layer = todo.pop()
            if not isinstance(node, Node) or node in self.layer or node.op == "placeholder":
                continue
            self._set(node, layer, "gradient")
            carried = _carried(node)
            if is_loop(node):
                continue
            if carried is not None:
                todo.append((carried, layer))
            elif schema_name(node) == "aten::add" and _same_shapes(node):
                todo += [(operand, layer) for operand in node.all_input_nodes]

    def _visit(self, node: Node) -> None:
        if is_loop(node):
            self._visit_loop(node)
            return
        if is_call(node):
            self._visit_call(node)
            return
        if node in self.layer:
            return
        origin = origin_of(node)
        carried = _carried(node)
        if node.target is operator.getitem and carried in self.parts:
            self._set(node, *self.parts[carried][int(node.args[1])])  # type: ignore[arg-type]
        elif origin.layer:
            self._set(node, origin.layer, origin.role)
        elif carried is not None and self.role.get(carried) in ("parameter", "gradient"):
            self._set(node, self.layer[carried], self.role[carried])
        elif origin.phase == "update":
            self._set(node, self._only_layer(node), "")
        else:
            self._set(node, self._layer_of_activation(node, origin), "activation")

    def _layer_of_activation(self, node: Node, origin: Origin) -> str:
        if origin.phase == "backward" and self.layer_of_call.get(origin.call):
            return self.layer_of_call[origin.call]
        operands = [n for n in node.all_input_nodes if self.layer.get(n)]
        parameters = [n for n in operands if self.role[n] == "parameter"]
        if parameters:
            layer = self.layer[max(parameters, key=_size)]
        else:
            layer = self.layer[max(operands, key=self.order.__getitem__)] if operands else ""
        if origin.phase == "forward" and layer:
            self.layer_of_call[origin.call] = layer
        return layer

    def _only_layer(self, node: Node) -> str:
        layers = {self.layer[n] for n in node.all_input_nodes if self.layer.get(n)}
        return layers.pop() if len(layers) == 1 else ""

    def _fill_from_readers(self) -> None:
        """What nothing precedes (indices, masks) belongs to the layer that reads it first."""
        for node in reversed(self.graph.nodes):
            if self.layer.get(node) or node.op in ("placeholder", "output") or origin_of(node).phase == "update":
                continue
            readers = sorted((u for u in node.users if u in self.order), key=self.order.__getitem__)
            self.layer[node] = next((self.layer[u] for u in readers if self.layer.get(u)), "")

    def _visit_loop(self, node: Node) -> None:
        loop = loop_of(node)
        operands = [n for group in loop.operands for n in group]
        gradients = {
            int(user.args[1]): self.layer[user]  # type: ignore[arg-type]
            for user in node.users
            if user.target is operator.getitem and self.role.get(user) == "gradient"
        }
        name = f"scan@{origin_of(node).source}"
        inside = _Sweep(loop.body.graph, self.layer_of_call, f"{self.loop}/{name}" if self.loop else name)
        inside.label_operands([self._outside(n, i < loop.form.n_carry) for i, n in enumerate(operands)])
        inside.run(gradients)
        self._set(node, inside.loop, "")
        results: Iterable[Node] = output_node(loop.body.graph).args[0]  # type: ignore[assignment]
        self.parts[node] = [(inside.layer.get(n, "") or inside.loop, inside.role.get(n, "")) for n in results]

    def _visit_call(self, node: Node) -> None:
        """A pipeline, or a piece of its stages, whose body is annotated at its first call."""
        self._set(node, "", "")
        body = body_of(node)
        if id(body) not in self.called:
            self.called.add(id(body))
            inside = _Sweep(body.graph, self.layer_of_call, self.loop or f"pipeline@{origin_of(node).source}")
            inside.called = self.called
            inside.run()
        self.parts[node] = [("", "")] * len(node.meta["val"])

    def _outside(self, node: Node, carried: bool) -> tuple[str, str]:
        """The layer and role of a loop's operand; a carry comes from outside in the first step only."""
        role = self.role.get(node, "")
        return ("" if carried and role != "parameter" else self.layer.get(node, "")), role


def _carried(node: Node) -> Node | None:
    """The operand that a node moves or converts, if it does no more."""
    moves = is_collective(node) or is_wait(node) or node.target is operator.getitem
    if not moves and schema_name(node).removeprefix("aten::") not in _CARRIERS:
        return None
    operands = node.all_input_nodes
    return operands[0] if len(operands) == 1 else None


def _same_shapes(node: Node) -> bool:
    shapes = {getattr(n.meta.get("val"), "shape", None) for n in (node, *node.all_input_nodes)}
    return len(shapes) == 1


def _size(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _longest_suffix(path: str, known: Iterable[str]) -> str | None:
    """The longest of the known paths that a path ends with."""
    fitting = [k for k in known if path == k or path.endswith("/" + k)]
    return max(fitting, key=len) if fitting else None


def merged_origin(origins: Sequence[Origin], **changes: object) -> Origin:
    """The origin of a node that does the work of several: that of the most alike, and all their layers.

    Args:
        origins: of the nodes, in order.
        **changes: fields of the result that are known better.
    """
    kinds = Counter((o.phase, o.source) for o in origins)
    first = max(origins, key=lambda o: (kinds[o.phase, o.source], o.role == "gradient"))

    made = dataclasses.replace(
        first,
        asked=all(o.asked for o in origins),
        layer=join_layers(o.layer for o in origins),
        reason=first.reason if len(origins) == 1 else f"{first.reason} and {len(origins) - 1} more",
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def join_layers(layers: Iterable[str]) -> str:
    """Several layers in short.

    >>> join_layers(["blocks/0/qkv", "blocks/1/qkv", "blocks/2/qkv"])
    'blocks/0..2/qkv'
    >>> join_layers(["blocks/0/qkv", "blocks/0/o", "blocks/1/qkv"])
    'blocks/0..1'
    >>> join_layers(["wte", "lnf", "blocks/0/qkv"])
    'blocks/0/qkv, lnf, wte'
    """
    unique = {tuple(layer.split("/")) for layer in layers if layer}
    groups: dict[str, list[tuple[str, ...]]] = {}
    for keys in sorted(unique):
        groups.setdefault(keys[0], []).append(keys)
    names = [_joined(group) for group in groups.values()]
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _joined(group: list[tuple[str, ...]]) -> str:
    if len(group) == 1:
        return "/".join(group[0])
    depth = next((i for i in range(min(map(len, group))) if len({keys[i] for keys in group}) > 1), min(map(len, group)))
    head, branches = group[0][:depth], {keys[depth] for keys in group if len(keys) > depth}
    if not all(b.isdigit() for b in branches):
        return "/".join((*head, f"{{{','.join(sorted(branches))}}}" if len(branches) <= 3 else "*"))
    tails = {keys[depth + 1 :] for keys in group}
    rest = tails.pop() if len(tails) == 1 else ()
    return "/".join((*head, _ranges(sorted(map(int, branches))), *rest))


def _ranges(numbers: list[int]) -> str:
    """`0..3,7`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
