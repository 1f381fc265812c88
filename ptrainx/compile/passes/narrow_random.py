"""Narrows random draws to the part that is used: a jitted init then holds only its own shards.

In: the traced graph of one rank, in which an array is drawn (or filled) whole, passes through elementwise operators,
casts, views and permutations, and is then cut to a shard. Out: the graph in which the shard alone is drawn.

    before                                        after
    r = random(key, [8, 6], [0, 0], [8, 6], ...)  r = random(key, [8, 6], [4, 0], [4, 6], ...)
    m = mul(r, 0.02)                              m = mul(r, 0.02)
    s = split(m, 4); g = s[1]; c = clone(g)

Every number of a draw is a function of key and global index, so the result is the same in every bit. A draw that is
also used whole stays as it is. The pass asks for nothing but fake values in `node.meta["val"]`, and keeps them right.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ptrainx.core import torch_compat as tc
from ptrainx.ops.random.operator import RANDOM

__all__ = ["narrow_random"]

aten = torch.ops.aten
# (first index, length) for each dim of a node's value.
Region = tuple[tuple[int, int], ...]

_FACTORIES = {aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format}
# What fills a new array whose shape comes from another: the value, or None if it is the last argument.
_LIKES = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.full_like.default: None,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_full.default: None,
}
_COPIES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.lift_fresh_copy.default,
}
_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_PERMUTATIONS = {aten.permute.default, aten.t.default, aten.transpose.int}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
_DEEPEST = 100


def narrow_random(graph: Graph) -> Graph:
    """The graph in which draws and fills are no larger than what is used of them.

    Args:
        graph: operators on local tensors, with fake values in `meta["val"]`; it is left as it is.

    Returns:
        a new graph with the same inputs and, bit for bit, the same outputs.
    """
    graph = _copy(graph)
    _forget_likes(graph)
    _sweep(graph)
    for node in list(graph.nodes):
        cut = _cut(node)
        if cut is None or not node.users or _is_whole(cut[1], cut[0]) or not _pays(*cut):
            continue
        with graph.inserting_before(node):
            narrow = _Narrowing(graph).block(*cut)
        if _keeps_layout(node, narrow):
            node.replace_all_uses_with(narrow)
            _drop_clones(narrow)
    _sweep(graph)
    graph.lint()
    return graph


def _copy(graph: Graph) -> Graph:
    copies: dict[Node, Node] = {}
    result = Graph(graph.owning_module)
    for node in graph.nodes:
        copies[node] = result.node_copy(node, copies.__getitem__)
    return result


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _is_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in value.shape)


def _is_whole(region: Region, node: Node) -> bool:
    return all(first == 0 and n == full for (first, n), full in zip(region, _shape(node)))


def _is_pointwise(node: Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.pointwise in target.tags
        and not target._schema.is_mutable
    )


def _cut(node: Node) -> tuple[Node, Region] | None:
    """(source, region) if the node is a rectangular part of another node's value."""
    if node.op != "call_function" or not _is_tensor(node):
        return None
    args: tuple[Any, ...] = node.args
    if node.target is operator.getitem:
        split = args[0]
        if split.target not in _SPLITS or not _is_tensor(split.args[0]):
            return None
        source, dim = split.args[0], split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        parts = [part.shape[dim] for part in split.meta["val"]]
        first = sum(parts[: args[1]])
    elif node.target is aten.slice.Tensor:
        defaults: tuple[Any, ...] = (None, 0, None, None, 1)
        source, dim, first, _, step = args + defaults[len(args) :]
        first = first or 0
        if node.kwargs or step != 1 or not isinstance(first, int) or not _is_tensor(source):
            return None
        first = min(max(first + _shape(source)[dim] if first < 0 else first, 0), _shape(source)[dim])
    else:
        return None
    region = [(0, n) for n in _shape(source)]
    region[dim] = (first, _shape(node)[dim])
    return source, tuple(region)


def _operand(arg: Node, node: Node, region: Region) -> Region:
    """The region of an operand that broadcasts to the node's value."""
    outer = len(_shape(node)) - len(_shape(arg))
    return tuple(
        (0, 1) if n == 1 and full != 1 else part
        for n, full, part in zip(_shape(arg), _shape(node)[outer:], region[outer:])
    )


def _before_permutation(node: Node, region: Region) -> Region:
    ndim = len(region)
    args: tuple[Any, ...] = node.args
    order = list(range(ndim))
    if node.target is aten.permute.default:
        order = [dim % ndim for dim in args[1]]
    elif ndim > 1:
        i, j = (0, 1) if node.target is aten.t.default else (args[1] % ndim, args[2] % ndim)
        order[i], order[j] = order[j], order[i]
    source = list(region)
    for position, dim in enumerate(order):
        source[dim] = region[position]
    return tuple(source)


def _before_view(old: Sequence[int], new: Sequence[int], region: Region) -> Region | None:
    """The region of `old` that a region of its view as `new` comes from; None if it is no rectangle.

    >>> _before_view((8, 6), (4, 2, 6), ((2, 2), (0, 2), (0, 6)))
    ((4, 4), (0, 6))
    """
    if math.prod(old) == 0:
        return None
    result: list[tuple[int, int]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        # The smallest groups of dims, old and new, that hold the same number of elements.
        i0, j0 = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while math.prod(old[i0:i]) != math.prod(new[j0:j]):
            if math.prod(old[i0:i]) < math.prod(new[j0:j]):
                i += 1
            else:
                j += 1
        group = _one_group(old[i0:i], new[j0:j], region[j0:j])
        if group is None:
            return None
        result += group
    return tuple(result)


def _one_group(old: Sequence[int], new: Sequence[int], region: Region) -> Region | None:
    whole = tuple((0, n) for n in old)
    cut = [k for k, ((first, n), full) in enumerate(zip(region, new)) if (first, n) != (0, full)]
    if not cut:
        return whole
    # A single range of elements: only one dim is cut, and all dims left of it have size one; the same on the old side.
    k = cut[0]
    major = next((d for d, n in enumerate(old) if n != 1), None)
    if len(cut) > 1 or any(n != 1 for n in new[:k]) or major is None:
        return None
    inner_new, inner_old = math.prod(new[k + 1 :]), math.prod(old[major + 1 :])
    first, n = region[k][0] * inner_new, region[k][1] * inner_new
    if first % inner_old or n % inner_old:
        return None
    return (*whole[:major], (first // inner_old, n // inner_old), *whole[major + 1 :])


def _sources(node: Node, region: Region) -> list[tuple[Node, Region]] | None:
    """The parts of other nodes that a region of this node is computed from; None if they are no rectangles."""
    target, first = node.target, node.args[0] if node.args else None
    if target is RANDOM or target in _FACTORIES:
        return []
    cut = _cut(node)
    if cut is not None:
        source, outer = cut
        return [(source, tuple((a + b, n) for (a, _), (b, n) in zip(outer, region)))]
    if not isinstance(first, Node) or not all(map(_is_tensor, node.all_input_nodes)):
        operands = node.all_input_nodes
        return None if not (_is_pointwise(node) and all(map(_is_tensor, operands))) else _operands(node, region)
    if target in _COPIES:
        return [(first, region)]
    if target in _VIEWS:
        before = _before_view(_shape(first), _shape(node), region)
        return None if before is None else [(first, before)]
    if target in _PERMUTATIONS:
        return [(first, _before_permutation(node, region))]
    return _operands(node, region) if target is aten.expand.default or _is_pointwise(node) else None


def _operands(node: Node, region: Region) -> list[tuple[Node, Region]]:
    return [(arg, _operand(arg, node, region)) for arg in node.all_input_nodes]


def _draws(node: Node, region: Region, depth: int = 0) -> set[Node] | None:
    """The draws and fills that would be narrowed to compute only this region; None if it can't be computed alone."""
    if _is_whole(region, node):
        return set()
    if node.op != "call_function" or depth > _DEEPEST:
        return None
    sources = _sources(node, region)
    if sources is None:
        return None
    found: set[Node] = set() if sources else {node}
    for source, part in sources:
        below = _draws(source, part, depth + 1)
        if below is None:
            return None
        found |= below
    return found


def _pays(source: Node, region: Region) -> bool:
    draws = _draws(source, region)
    return bool(draws) and not any(_wanted_whole(draw) for draw in draws or ())


def _wanted_whole(node: Node, seen: set[Node] | None = None) -> bool:
    """Whether something other than cuts that can be narrowed uses the value."""
    seen = set() if seen is None else seen
    for user in node.users:
        if user in seen:
            continue
        seen.add(user)
        cut = _cut(user)
        if cut is not None and not _is_whole(cut[1], cut[0]):
            wanted = bool(user.users) and _draws(*cut) is None
        else:
            wanted = not (_passes(user) or cut or user.target in _SPLITS) or _wanted_whole(user, seen)
        if wanted:
            return True
    return False


def _passes(node: Node) -> bool:
    kinds = _COPIES | _VIEWS | _PERMUTATIONS | {aten.expand.default}
    return node.op == "call_function" and (node.target in kinds or _is_pointwise(node))


class _Narrowing:
    """Adds the nodes that compute regions of other nodes, each region once."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.done: dict[tuple[Node, Region], Node] = {}

    def block(self, node: Node, region: Region) -> Node:
        """The node whose value is this region of that node's value."""
        if _is_whole(region, node):
            return node
        if (node, region) not in self.done:
            self.done[node, region] = self._compute(node, region)
        return self.done[node, region]

    def _compute(self, node: Node, region: Region) -> Node:
        target: Any = node.target
        size = [n for _, n in region]
        sources = _sources(node, region) or []
        if target is RANDOM:
            key, shape, start, _, *rest = node.args
            moved = [a + first for a, (first, _) in zip(start, region)]  # type: ignore[arg-type]
            return self.add(target, (key, shape, moved, size, *rest), {}, node)
        if target in _FACTORIES:
            return self.add(target, (size, *node.args[1:]), node.kwargs, node)
        blocks = {source: self.block(source, part) for source, part in sources}
        if _cut(node) is not None or (target is aten.clone.default and not node.kwargs):
            return blocks[sources[0][0]]
        if target in _VIEWS or target is aten.expand.default:
            op = aten.expand.default if target is aten.expand.default else aten.reshape.default
            return self.add(op, (blocks[sources[0][0]], size), {}, node)
        args, kwargs = map_arg((node.args, node.kwargs), blocks.__getitem__)
        return self.add(target, args, kwargs, node)

    def add(self, target: Callable[..., Any], args: tuple, kwargs: Any, origin: Node) -> Node:
        """A new node, with what the one that it stands for knows of its origin."""
        new = self.graph.call_function(target, args, dict(kwargs))
        new.meta = {name: value for name, value in origin.meta.items() if name not in ("val", "tensor_meta")}
        new.meta["val"] = _fake_value(target, args, kwargs, origin)
        return new


def _fake_value(target: Callable[..., Any], args: tuple, kwargs: Any, origin: Node) -> Any:
    args, kwargs = map_arg((args, dict(kwargs)), lambda arg: arg.meta["val"])
    with tc.unset_fake_temporarily(), origin.meta["val"].fake_mode:
        return target(*args, **kwargs)


def _forget_likes(graph: Graph) -> None:
    """Makes `zeros_like(draw)` and its kin independent of the draw, which they would keep whole."""
    for node in list(graph.nodes):
        if node.target not in _LIKES or not _is_tensor(node):
            continue
        value = _LIKES[node.target]
        fill = node.args[-1] if value is None else value
        order = _dims_by_stride(node.meta["val"])
        if order is None or not isinstance(fill, (int, float, bool)):
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(_filled(graph, node, fill, order))


def _dims_by_stride(value: torch.Tensor) -> list[int] | None:
    """The dims of a dense tensor, major to minor in memory; None if it is not dense."""
    order = sorted(range(value.ndim), key=lambda dim: (-value.stride()[dim], dim))
    return order if value.permute(order).is_contiguous() else None


def _filled(graph: Graph, node: Node, fill: float, order: list[int]) -> Node:
    adder, value = _Narrowing(graph), node.meta["val"]
    size = [value.shape[dim] for dim in order]
    full = adder.add(aten.full.default, (size, fill), {"dtype": value.dtype, "device": value.device}, node)
    if order == sorted(order):
        return full
    return adder.add(aten.permute.default, (full, [order.index(dim) for dim in range(len(order))]), {}, node)


def _plain_clones(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is aten.clone.default and not user.kwargs]


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(n == 1 or i == j for n, i, j in zip(a.shape, a.stride(), b.stride()))


def _keeps_layout(cut: Node, narrow: Node) -> bool:
    """Whether the copies of a cut would come out with the same strides."""
    copied = _fake_value(aten.clone.default, (narrow,), {}, cut)
    return all(_same_layout(user.meta["val"], copied) for user in _plain_clones(cut))


def _drop_clones(node: Node) -> None:
    """Takes away the copy of a shard that nothing else shares."""
    for user in _plain_clones(node):
        if _is_private(node) and _same_layout(user.meta["val"], node.meta["val"]):
            user.replace_all_uses_with(node)
            user.graph.erase_node(user)


def _is_private(node: Node) -> bool:
    if len(node.users) != 1 or node.op != "call_function":
        return False
    if node.target is RANDOM or node.target in _FACTORIES | {aten._to_copy.default} or _is_pointwise(node):
        return True
    viewed = node.target in _PERMUTATIONS or node.target in _VIEWS
    return viewed and isinstance(node.args[0], Node) and _is_private(node.args[0])


def _sweep(graph: Graph) -> None:
    """Takes away the pure nodes that nothing uses any more."""
    for node in reversed(list(graph.nodes)):
        pure = _passes(node) or _cut(node) is not None or node.target in _SPLITS | _FACTORIES | _LIKES.keys()
        if not node.users and node.op == "call_function" and (pure or node.target is RANDOM):
            graph.erase_node(node)
