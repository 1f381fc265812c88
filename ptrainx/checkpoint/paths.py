"""Where a leaf stands in its tree, in a form that JSON keeps: each step of a path says what kind of container it is in.

`{"blocks": [Layer(w=...)]}` has the path `(("key", "blocks"), ("index", 0), ("field", "w"))`: a dict's key, a place in
a list or tuple, a field of a NamedTuple or dataclass. So a dict with key 0 is not taken for a list.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import optree

from ptrainx.core import tree as px_tree
from ptrainx.core.errors import TreeError

__all__ = ["FlatTree", "Step", "TypedPath", "flatten", "from_json", "identity", "name", "near", "to_json"]

Key = str | int | float | bool | tuple
Kind = Literal["key", "index", "field"]
Step = tuple[Kind, Key]
TypedPath = tuple[Step, ...]

DEEPEST = 256
"""Steps of a path."""
LONGEST = 65_536
"""Characters of a key."""


class FlatTree(NamedTuple):
    """A tree's leaves with their paths, and its structure."""

    paths: list[TypedPath]
    leaves: list[Any]
    treedef: px_tree.TreeDef


def flatten(tree: Any) -> FlatTree:
    """The leaves of a tree with their typed paths.

    Raises:
        TreeError: keys that JSON can't keep, all of them told.
    """
    accessors, leaves, treedef = optree.tree_flatten_with_accessor(tree, namespace=px_tree.NAMESPACE)
    problems: list[str] = []
    paths = [tuple(_step(entry, problems) for entry in accessor) for accessor in accessors]
    if problems:
        raise TreeError(
            "the tree has keys that a checkpoint can't keep:\n    " + "\n    ".join(dict.fromkeys(problems)),
            expected="strings, integers, floats, bools, and tuples of them",
            fix="use such keys in dicts",
        )
    return FlatTree(paths, leaves, treedef)


def _step(entry: Any, problems: list[str]) -> Step:
    key = entry.entry
    if isinstance(entry, optree.NamedTupleEntry):
        return "field", entry.field
    if isinstance(entry, optree.MappingEntry):
        if not _can_be_kept(key):
            problems.append(f"{key!r}, a {type(key).__name__}")
        return "key", key
    return ("index", key) if isinstance(key, int) else ("field", str(key))


def _can_be_kept(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_can_be_kept, key))
    if isinstance(key, float):
        return type(key) is float and key - key == 0  # finite
    return type(key) in (int, bool) or (type(key) is str and len(key) <= LONGEST)


def to_json(path: TypedPath) -> list[list[Any]]:
    """A path as lists.

    >>> to_json((("key", "w"), ("index", 0)))
    [['key', 'w'], ['index', 0]]
    """
    return [[kind, _listed(key)] for kind, key in path]


def _listed(key: Any) -> Any:
    return [_listed(part) for part in key] if isinstance(key, tuple) else key


def from_json(value: Any) -> TypedPath:
    """A path from what `to_json` gave.

    Raises:
        ValueError: it is no path.
    """
    if not isinstance(value, list) or len(value) > DEEPEST:
        raise ValueError(f"a path of at most {DEEPEST} steps expected")
    return tuple(map(_step_from_json, value))


def _step_from_json(step: Any) -> Step:
    if not (isinstance(step, list) and len(step) == 2 and step[0] in ("key", "index", "field")):
        raise ValueError("a step of a path is [kind, key]")
    kind, key = step[0], _tupled(step[1], 0)
    kinds: dict[Any, Any] = {"index": int, "field": str, "key": object}
    if isinstance(key, str) and len(key) > LONGEST:
        raise ValueError("a key of a path is too long")
    if not isinstance(key, kinds[kind]) or (kind == "index" and key < 0):
        raise ValueError(f"{kind} {str(key)[:40]!r} is no step of a path")
    return kind, key


def _tupled(key: Any, depth: int) -> Any:
    if isinstance(key, list) and depth < 8:
        return tuple(_tupled(part, depth + 1) for part in key)
    if not _can_be_kept(key):
        raise ValueError("a key is a string, a number, or a list of them")
    return key


def identity(path: TypedPath) -> str:
    """A text that two paths share only if they are the same, kinds included: `True` is not `1`."""
    return json.dumps(to_json(path), separators=(",", ":"))


def name(path: TypedPath) -> str:
    """A path for people.

    >>> name((("key", "blocks"), ("index", 0), ("field", "w")))
    "['blocks'][0].w"
    """
    return "".join(f".{key}" if kind == "field" else f"[{key!r}]" for kind, key in path) or "(the tree itself)"


def near(path: TypedPath, others: Iterable[TypedPath]) -> list[str]:
    """Up to two of the other paths that this one may have been meant for."""
    return difflib.get_close_matches(name(path), [name(other) for other in others], 2, 0.7)
