"""A graph under construction in which the same computation on the same values is one node.

Logical ranks of a device that hold the same value, such as a replicated parameter, so come to share everything that is
computed from it: nothing has to know which values are replicated.
"""

from __future__ import annotations

import collections
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ptrainx.compile.graph import is_pure, schema_name
from ptrainx.compile.passes.common import NEVER_SHARED, key_of
from ptrainx.core import torch_compat as tc

__all__ = ["Builder"]

COMPARED = 1 << 16
"""Constants with more elements are taken to be different."""

wait = torch.ops._c10d_functional.wait_tensor.default


class Builder:
    """Adds nodes at the end of a new graph.

    Args:
        fake_mode: of the fake values of its nodes.

    Attributes:
        graph: the graph.
        root: what its `get_attr` nodes name.
    """

    def __init__(self, fake_mode: Any):
        self.fake_mode = fake_mode
        self.graph = Graph()
        self.root = torch.nn.Module()
        self._known: dict[Any, Node] = {}
        self._asked: collections.Counter[Any] = collections.Counter()
        self._constants: dict[Any, Node] = {}

    def placeholder(self, name: str, like: torch.Tensor, meta: dict[str, Any] | None = None) -> Node:
        """An argument with the shape, strides and dtype of a tensor."""
        node = self.graph.placeholder(name)
        node.meta = {**(meta or {}), "val": self.fresh(like)}
        return node

    def fresh(self, like: torch.Tensor) -> torch.Tensor:
        """A fake value with memory of its own."""
        with self.fake_mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def constant(self, value: torch.Tensor) -> Node:
        """A tensor that is part of the program; one with the same elements as before is that one."""
        with tc.no_dispatch_modes():
            elements = repr(value.detach().flatten().tolist()) if value.numel() <= COMPARED else id(value)
        content = (value.dtype, tuple(value.shape), elements)
        if content not in self._constants:
            name = f"constant_{len(self._constants)}"
            setattr(self.root, name, value)
            node = self._constants[content] = self.graph.get_attr(name)
            node.meta["val"] = self.fresh(value)
        return self._constants[content]

    def body(self, module: GraphModule) -> Node:
        """What names the body of a loop."""
        name = f"loop_body_{sum(1 for _ in self.root.children())}"
        self.root.add_module(name, module)
        return self.graph.get_attr(name)

    def add(self, rank: int, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node that does what no node of some rank does, with what another knows of its origin.

        A rank that asks for the same thing twice gets two nodes: one may be meant to be computed again.
        """
        again = (rank, target, key_of(args), key_of(kwargs))
        self._asked[again] += 1
        shared = (*again[1:], self._asked[again])
        if shared in self._known:
            return self._known[shared]
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {name: value for name, value in like.meta.items() if name not in ("val", "tensor_meta")}
        node.meta["val"] = self._run(target, args, kwargs)
        if is_pure(node) and schema_name(node) not in NEVER_SHARED:
            self._known[shared] = node
        return node

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        values, options = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        if target is operator.getitem:
            return values[0][values[1]]
        with self.fake_mode:
            return target(*values, **options)

    def collective(self, rank: int, like: Node, target: Any, *args: Any) -> Node:
        """The wait for a collective of devices."""
        return self.add(rank, like, wait, self.add(rank, like, target, *args))

    def contiguous(self, rank: int, like: Node, node: Node) -> Node:
        """A value whose elements lie in order."""
        if node.meta["val"].is_contiguous():
            return node
        return self.copy(rank, like, node)

    def copy(self, rank: int, like: Node, node: Node) -> Node:
        """A value in memory of its own, which begins where an allocator puts it: kernels may look at that."""
        return self.add(rank, like, torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)

    def part(self, rank: int, like: Node, node: Node, dim: int, index: int, count: int) -> Node:
        """Part `index` of `count` equal ones along a dim, in memory of its own."""
        if count == 1:
            return node
        size = node.meta["val"].shape[dim] // count
        cut = self.add(rank, like, torch.ops.aten.slice.Tensor, node, dim, index * size, (index + 1) * size)
        return self.copy(rank, like, cut)

    def joined(self, rank: int, like: Node, nodes: list[Node], dim: int) -> Node:
        """Values one behind another."""
        return nodes[0] if len(nodes) == 1 else self.add(rank, like, torch.ops.aten.cat.default, nodes, dim)

    def finish(self, results: list[Node], meta: dict[str, Any]) -> GraphModule:
        """The graph as a module."""
        self.graph.output(results).meta = dict(meta)
        return GraphModule(self.root, self.graph)
