"""What a graph computes: floating-point operations and the bytes that operators read and write.

Enters: a rank's graph, before or after the passes. Leaves: a `CostReport`, by phase and layer. Operations are those of
torch's `flop_counter`: products, convolutions and attention, a multiplication and an addition each one; whatever is
in a loop counts once a step. Bytes are those of every operand read and every result written, views apart: what an
unfused program moves between memory and processor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from ptrainx.compile.graph import is_collective, is_wait, origin_of, schema_name, walk
from ptrainx.compile.trace import RankGraph
from ptrainx.core import torch_compat as tc

__all__ = ["Cost", "CostReport", "node_bytes", "node_flops", "report_cost"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one phase computes for one layer, on one rank.

    Attributes:
        phase: forward, backward or update.
        layer: a parameter's path, several in short, a loop, or "".
        flops: floating-point operations of products, convolutions and attention.
        bytes: read and written by operators; collectives apart.
        operators: how many run.
    """

    phase: str
    layer: str
    flops: int
    bytes: int
    operators: int


class CostReport(list[Cost]):
    """The rows of `cost()`, in the order of execution; prints as a table of phases and layers."""

    @property
    def flops(self) -> int:
        """Floating-point operations of one call on one rank."""
        return sum(c.flops for c in self)

    @property
    def bytes(self) -> int:
        """Bytes read and written by operators of one call on one rank."""
        return sum(c.bytes for c in self)

    def by(self, *fields: str, depth: int | None = None) -> CostReport:
        """The rows summed over what is not named.

        Args:
            *fields: of "phase" and "layer".
            depth: how many parts of a layer's path to keep: 2 makes `blocks/3` of `blocks/3/qkv`.
        """
        found: dict[tuple[str, str], list[int]] = {}
        for c in self:
            layer = c.layer if depth is None else "/".join(c.layer.split("/")[:depth])
            key = (c.phase if "phase" in fields else "", layer if "layer" in fields else "")
            total = found.setdefault(key, [0, 0, 0])
            for i, n in enumerate((c.flops, c.bytes, c.operators)):
                total[i] += n
        return CostReport(Cost(phase, layer, *total) for (phase, layer), total in found.items())

    def __str__(self) -> str:
        head = ("phase", "layer", "operators", "flops", "bytes")
        rows = [(c.phase, c.layer, f"{c.operators:,}", f"{c.flops:,}", f"{c.bytes:,}") for c in self]
        operators = sum(c.operators for c in self)
        rows.append(("total", "", f"{operators:,}", f"{self.flops:,}", f"{self.bytes:,}"))
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        return "\n".join(
            "  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in (head, *rows)
        )


def report_cost(graph: RankGraph) -> CostReport:
    """The cost of a rank's graph."""
    found: dict[tuple[str, str], list[int]] = {}
    for node, times in walk(graph.module.graph):
        if schema_name(node):
            origin = origin_of(node)
            total = found.setdefault((origin.phase, origin.layer), [0, 0, 0])
            for i, n in enumerate((node_flops(node), node_bytes(node), 1)):
                total[i] += times * n
    return CostReport(Cost(phase, layer, *total) for (phase, layer), total in found.items())


def node_flops(node: Node) -> int:
    """The floating-point operations of one run of a node."""
    target: Any = node.target
    formula = _formulas().get(getattr(target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def node_bytes(node: Node) -> int:
    """The bytes that one run of a node reads and writes; none of a view, a collective or a wait."""
    target: Any = node.target
    name = schema_name(node)
    if not name or is_collective(node) or is_wait(node) or target.is_view:
        return 0
    values = node.meta.get("val")
    results = [v for v in (values if isinstance(values, (tuple, list)) else [values]) if isinstance(v, torch.Tensor)]
    operands = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    own = {tc.storage_id(v) for v in operands}
    # A result in an operand's memory is a view that the operator chose to make (`reshape`).
    if name in _MAYBE_VIEWS and all(tc.storage_id(v) in own for v in results):
        return 0
    return sum(_touched(v) for v in (*operands, *results))


_MAYBE_VIEWS = {"aten::reshape", "aten::contiguous", "aten::_unsafe_view", "aten::flatten", "aten::_reshape_alias"}


def _touched(value: torch.Tensor) -> int:
    """The bytes of a tensor's distinct elements: an expanded dim counts once."""
    distinct = 1
    for size, stride in zip(value.shape, value.stride()):
        distinct *= size if stride else min(size, 1)
    return distinct * value.element_size()


_added: dict[Any, Callable[..., int]] = {}


def _formulas() -> dict[Any, Callable[..., int]]:
    """torch's formulas, and those of kernels that it has none for, in terms of its own."""
    if not _added:
        aten = torch.ops.aten
        attention = flop_registry[aten._scaled_dot_product_flash_attention]
        backward = flop_registry[aten._scaled_dot_product_flash_attention_backward]
        _added.update(flop_registry)
        _added[aten._scaled_dot_product_flash_attention_for_cpu] = lambda q, k, v, *_, out_val, **__: attention(
            q, k, v, out_val=out_val
        )
        _added[aten._scaled_dot_product_flash_attention_for_cpu_backward] = lambda grad, q, k, v, *_, out_val, **__: (
            backward(grad, q, k, v, out_val=out_val)
        )
        _added[torch.ops.mkldnn._linear_pointwise] = _linear_flops
    return _added


def _linear_flops(x: torch.Tensor, weight: torch.Tensor, *_: Any, out_val: torch.Tensor, **__: Any) -> int:
    """x @ weight.T: [..., K], [N, K]."""
    return 2 * x.numel() * weight.shape[0]
