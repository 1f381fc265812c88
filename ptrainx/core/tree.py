"""Pytrees: nested containers of leaves, over optree.

`None` is an empty node, dicts are ordered by key, and users' own classes join by `register_dataclass`. A *path* is the
tuple of keys from the root to a leaf; `path_str` writes it for rules (`blocks/3/qkv`), `path_expr` for error messages
(`state.params['blocks'][3]['qkv']`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import optree

from ptrainx.core.errors import TreeError

__all__ = [
    "NAMESPACE",
    "TrainState",
    "TreeDef",
    "flatten",
    "flatten_with_path",
    "leaves",
    "map",
    "map_with_path",
    "path_expr",
    "path_str",
    "register_dataclass",
    "structure",
    "unflatten",
]

NAMESPACE = "ptrainx"
TreeDef = optree.PyTreeSpec
Path = tuple[Any, ...]
T = TypeVar("T")


class _Field(str):
    """The name of a dataclass field or NamedTuple field in a path: prints as an attribute."""


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    """(leaves, structure) of a tree."""
    return optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Any:
    """The tree of this structure with these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of a tree, in order."""
    return optree.tree_leaves(tree, is_leaf, namespace=NAMESPACE)


def structure(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> TreeDef:
    """The structure of a tree."""
    return optree.tree_structure(tree, is_leaf, namespace=NAMESPACE)


def map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Applies `fn` to each leaf (of several trees of one structure, together).

    Where `tree` has a leaf, the others may have whole subtrees, which `fn` then gets.

    >>> map(lambda a, b: a + b, {"x": 1, "y": [2]}, {"x": 10, "y": [20]})
    {'x': 11, 'y': [22]}
    """
    first, treedef = flatten(tree, is_leaf)
    others = [_flatten_up_to(treedef, t, i) for i, t in enumerate(rest, 1)]
    return unflatten(treedef, [fn(*together) for together in zip(first, *others)])


def _flatten_up_to(treedef: TreeDef, tree: Any, number: int) -> list[Any]:
    try:
        return treedef.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise TreeError(
            # optree's message ends with the values themselves, which may be long.
            f"tree {number} after the first has another structure: {str(error).rpartition('; ')[0] or error}",
            got=str(structure(tree)),
            expected=f"{treedef}, or subtrees in place of its leaves",
            fix="pass trees that belong together: what was made from one tree, such as gradients, has its structure",
        ) from error


def flatten_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[Path, Any]], TreeDef]:
    """([(path, leaf), ...], structure) of a tree."""
    accessors, values, treedef = optree.tree_flatten_with_accessor(tree, is_leaf, namespace=NAMESPACE)
    return [(tuple(_key(entry) for entry in accessor), leaf) for accessor, leaf in zip(accessors, values)], treedef


def _key(entry: optree.PyTreeEntry) -> Any:
    if isinstance(entry, optree.NamedTupleEntry):
        return _Field(entry.field)
    return entry.entry


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """As `map`, with the leaf's path as the first argument of `fn`."""
    pairs, treedef = flatten_with_path(tree, is_leaf)
    others = [_flatten_up_to(treedef, t, i) for i, t in enumerate(rest, 1)]
    return unflatten(treedef, [fn(path, leaf, *more) for (path, leaf), *more in zip(pairs, *others)])


def path_str(path: Path) -> str:
    """A path as rules match it.

    >>> path_str(("blocks", 3, "qkv"))
    'blocks/3/qkv'
    """
    return "/".join(str(key) for key in path)


def path_expr(path: Path, root: str = "") -> str:
    """A path as Python would write it.

    >>> path_expr((_Field("params"), "w", 0), "state")
    "state.params['w'][0]"
    """
    return root + "".join(f".{key}" if isinstance(key, _Field) else f"[{key!r}]" for key in path)


def register_dataclass(cls: type[T]) -> type[T]:
    """Makes a dataclass a pytree node, its fields the children; usable as a decorator.

    Fields with `metadata={"static": True}` are part of the structure: they must be hashable, and a change of one
    retraces a jitted step.

    Raises:
        TreeError: `cls` is not a dataclass, or is registered already.
    """
    if not dataclasses.is_dataclass(cls):
        raise TreeError(f"{cls.__name__} is not a dataclass", fix="put @dataclasses.dataclass under the decorator")
    fields = [f for f in dataclasses.fields(cls) if f.init]
    dynamic = tuple(_Field(f.name) for f in fields if not f.metadata.get("static"))
    static = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten_node(node: Any) -> tuple[tuple, tuple, tuple]:
        return tuple(getattr(node, n) for n in dynamic), tuple(getattr(node, n) for n in static), dynamic

    def unflatten_node(meta: tuple, children: Iterable[Any]) -> Any:
        return cls(**dict(zip(dynamic, children)), **dict(zip(static, meta)))

    try:
        optree.register_pytree_node(cls, flatten_node, unflatten_node, namespace=NAMESPACE)  # type: ignore[arg-type]
    except ValueError as error:
        raise TreeError(f"{cls.__name__} is registered already", fix="register each class once") from error
    return cls


@register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a training step carries from call to call.

    Attributes:
        step: steps done, an integer.
        params: pytree of tensors.
        opt_state: what `optimizer.init(params)` gave.
        key: random key (see `px.random`), or None.
    """

    step: Any
    params: Any
    opt_state: Any = None
    key: Any = None

    def replace(self, **changes: Any) -> TrainState:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)
