"""Trees of specs: prefixes spread over a value tree, and rules that choose a spec by a leaf's path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ptrainx.core import tree as px_tree
from ptrainx.core.errors import SpecError, TreeError
from ptrainx.mesh.partition_spec import PartitionSpec

__all__ = ["SpecTree", "match_rules", "spread"]

SpecTree = Any
"""A PartitionSpec, None, or a container of spec trees."""


def spread(specs: SpecTree, values: Any, root: str = "") -> list[PartitionSpec | None]:
    """One spec a leaf of `values`, from a spec tree that may be a prefix of it.

    Args:
        specs: at each node a `P`, None (own placement going in, as propagated coming out), or a container like the
            one in `values` there.
        values: the value tree.
        root: how the value is called in messages.

    Raises:
        TreeError: the trees do not fit; every misfit is listed with its path.
    """
    found: list[PartitionSpec | None] = []
    problems: list[str] = []
    _spread(specs, values, root, found, problems)
    if problems:
        raise TreeError(
            "the spec tree does not fit the value tree:\n    " + "\n    ".join(problems),
            fix="a spec tree has the value's containers, or a P or None in place of a whole subtree",
        )
    return found


def _spread(specs: SpecTree, value: Any, path: str, found: list, problems: list[str]) -> None:
    if specs is None or isinstance(specs, PartitionSpec):
        found.extend([specs] * len(px_tree.leaves(value)))
        return
    if _is_leaf(specs):
        problems.append(f"{path or 'value'}: {type(specs).__name__} {specs!r} is no spec")
        return
    if value is None or _is_leaf(value) or type(specs) is not type(value):
        problems.append(f"{path or 'value'}: the spec is a {type(specs).__name__}, the value a {type(value).__name__}")
        return
    ours, theirs = _children(specs), _children(value)
    problems.extend(f"{path}{key}: in the specs, not in the value" for key in ours if key not in theirs)
    problems.extend(f"{path}{key}: in the value, not in the specs" for key in theirs if key not in ours)
    for key, child in theirs.items():
        if key in ours:
            _spread(ours[key], child, path + key, found, problems)


def _is_leaf(value: Any) -> bool:
    return value is not None and px_tree.structure(value).is_leaf()


def _children(node: Any) -> dict[str, Any]:
    pairs, _ = px_tree.flatten_with_path(node, is_leaf=lambda x: x is not node)
    children = {px_tree.path_expr(path): child for path, child in pairs}
    return children


def match_rules(rules: Sequence[tuple[str, PartitionSpec]], tree: Any) -> SpecTree:
    """Chooses each leaf's spec by the first rule whose pattern is found in the leaf's path.

    Args:
        rules: (regular expression, spec) pairs, tried in order with `re.search` on paths such as `blocks/3/qkv`. A
            spec for more dims than the leaf has is an error when it is used, not here.
        tree: any tree, for instance `px.eval_shape(init, key)`.

    Returns:
        a tree of specs of the same structure.

    Raises:
        SpecError: a leaf that no rule matches (all such leaves are listed); a rule that is no pair of a pattern and a
            spec.

    >>> match_rules([(r"up$", PartitionSpec(None, "model")), (r".*", PartitionSpec())], {"up": 0, "b": 1})
    {'up': P(None, 'model'), 'b': P()}
    """
    compiled = [_rule(i, rule) for i, rule in enumerate(rules)]
    pairs, treedef = px_tree.flatten_with_path(tree)
    specs, unmatched = [], []
    for path, _ in pairs:
        name = px_tree.path_str(path)
        matching = [spec for pattern, spec in compiled if pattern.search(name)]
        if not matching:
            unmatched.append(repr(name))
        specs.extend(matching[:1])
    if unmatched:
        shown = ", ".join(unmatched[:8]) + (f" and {len(unmatched) - 8} more" if len(unmatched) > 8 else "")
        raise SpecError(
            f"no rule matches {shown}",
            got=f"patterns {', '.join(repr(pattern.pattern) for pattern, _ in compiled)}" if compiled else "no rules",
            fix='end the rules with (r".*", P()) to replicate the rest',
        )
    return px_tree.unflatten(treedef, specs)


def _rule(number: int, rule: Any) -> tuple[re.Pattern[str], PartitionSpec]:
    fits = isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[1], PartitionSpec)
    try:
        if fits:
            return re.compile(rule[0]), rule[1]
        why = ""
    except (re.error, TypeError) as error:
        why = f": {error}"
    raise SpecError(
        f"rule {number} is no pair of a regular expression and a spec{why}",
        got=repr(rule),
        fix='write (r"/(qkv|up)$", P(None, "model"))',
    )
