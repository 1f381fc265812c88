"""Spec trees: prefixes spread over a value tree, misfits told by path, rules that choose specs."""

from __future__ import annotations

import collections
import re
from typing import Any, NamedTuple

import pytest

from ptrainx.core import tree as px_tree
from ptrainx.core.errors import SpecError, TreeError
from ptrainx.mesh import P, match_rules
from ptrainx.mesh.spec_tree import spread


class Moments(NamedTuple):
    mu: Any
    nu: Any


D, M, R = P("data"), P(None, "model"), P()
STATE = px_tree.TrainState(step=0, params={"b": 1, "w": [2, 3]}, opt_state=Moments(4, 5))

# specs, values, one spec a leaf
SPREAD = [
    (None, 1, [None]),
    (D, 1, [D]),
    (D, [], []),
    (D, None, []),
    (None, [1, 2], [None, None]),
    (D, {"b": 1, "w": [2, 3]}, [D, D, D]),
    ({"b": D, "w": None}, {"b": 1, "w": [2, 3]}, [D, None, None]),
    ({"w": [M, None], "b": D}, {"b": 1, "w": [2, 3]}, [D, M, None]),
    ((None, D), (1, {"x": 2, "y": 3}), [None, D, D]),
    ((D, None), (1, None), [D]),
    ((D, M), (None, 2), [M]),
    ({}, {}, []),
    ({"a": {}}, {"a": {}}, []),
    (Moments(D, M), Moments(1, [2, 3]), [D, M, M]),
    (R, STATE, [R] * 6),
    (px_tree.TrainState(step=None, params=M, opt_state=Moments(D, None)), STATE, [None, M, M, M, D, None]),
    (collections.OrderedDict(b=D, a=M), collections.OrderedDict(b=1, a=2), [D, M]),
]


@pytest.mark.parametrize(("specs", "values", "expected"), SPREAD, ids=[f"{s[0]}"[:50] for s in SPREAD])
def test_spread(specs, values, expected):
    assert spread(specs, values) == expected


# specs, values, every problem with its path
MISFITS = [
    ([D], {"a": 1}, ["batch: the spec is a list, the value a dict"]),
    ([D], 1, ["batch: the spec is a list, the value a int"]),
    ({"a": D}, {"b": 1}, ["batch['a']: in the specs, not in the value", "batch['b']: in the value, not in the specs"]),
    ([D, D], [1], ["batch[1]: in the specs, not in the value"]),
    ([D], [1, 2, 3], ["batch[1]: in the value, not in the specs", "batch[2]: in the value, not in the specs"]),
    ("data", [1], ["batch: str 'data' is no spec"]),
    ({"a": ["data"]}, {"a": [1]}, ["batch['a'][0]: str 'data' is no spec"]),
    ((D,), [1], ["batch: the spec is a tuple, the value a list"]),
    ({"a": [D]}, {"a": None}, ["batch['a']: the spec is a list, the value a NoneType"]),
    ((D, M), Moments(1, 2), ["batch: the spec is a tuple, the value a Moments"]),
    (
        {"x": 3, "y": [D]},
        {"x": 1, "y": 2},
        ["batch['x']: int 3 is no spec", "batch['y']: the spec is a list, the value a int"],
    ),
    (
        px_tree.TrainState(step=R, params={"w": D}),
        STATE,
        ["batch.params['b']: in the value, not in the specs"],
    ),
]


@pytest.mark.parametrize(("specs", "values", "problems"), MISFITS, ids=[m[2][0] for m in MISFITS])
def test_every_misfit_is_told_by_its_path(specs, values, problems):
    with pytest.raises(TreeError) as caught:
        spread(specs, values, "batch")
    told = str(caught.value).split("\n  fix:")[0].split("\n    ")
    assert told[0] == "the spec tree does not fit the value tree:"
    assert told[1:] == problems
    assert "None in place of a whole subtree" in caught.value.fix


def test_a_misfit_without_a_root_is_told_too():
    with pytest.raises(TreeError, match=re.escape("['b'][0]: str 'x' is no spec")):
        spread({"b": ["x"]}, {"b": [1]})


PARAMS = {
    "blocks": [{"qkv": 0, "o": 0, "up": 0, "down": 0, "norm": 0}, {"qkv": 0, "o": 0, "up": 0, "down": 0, "norm": 0}],
    "embed": 0,
}
RULES = [(r"/(qkv|up)$", P(None, "model")), (r"/(o|down)$", P("model")), (r".*", P())]


def test_rules_of_the_first_page():
    block = {"qkv": P(None, "model"), "o": P("model"), "up": P(None, "model"), "down": P("model"), "norm": P()}
    assert match_rules(RULES, PARAMS) == {"blocks": [block, block], "embed": P()}


def test_rules_see_the_whole_path_of_a_state():
    specs = match_rules(
        [(r"^params/w/0$", P("data")), (r"^opt_state/(mu|nu)", P("model")), (r"^step$|b$|w/1", P())], STATE
    )
    assert specs == px_tree.TrainState(
        step=P(), params={"b": P(), "w": [P("data"), P()]}, opt_state=Moments(P("model"), P("model"))
    )


def test_the_first_rule_wins_and_the_search_is_anywhere():
    assert match_rules([("w", P("a")), ("weight", P("b"))], {"weight": 0}) == {"weight": P("a")}


@pytest.mark.parametrize("tree", [None, {}, [], {"a": None}])
def test_a_tree_without_leaves_needs_no_rules(tree):
    assert match_rules([], tree) == tree


def test_a_lone_leaf_has_the_empty_path():
    assert match_rules([("^$", P("data"))], 1) == P("data")


BAD_RULES = [
    ([("w", P())], {"w": 0, "b": 0}, r"no rule matches 'b'\n  got: +patterns 'w'\n  fix: .*\(r\"\.\*\", P\(\)\)"),
    ([], {"w": 0}, r"no rule matches 'w'\n  got: +no rules"),
    ([("x", P())], {str(i): 0 for i in range(20)}, r"'0', '1', .* and 12 more\n"),
    ([("w", "data")], {"w": 0}, r"rule 0 is no pair .*\n  got: +\('w', 'data'\)"),
    ([(".*", P()), ("w", None)], {"w": 0}, r"rule 1 is no pair"),
    ([("(", P())], {"w": 0}, r"rule 0 is no pair of a regular expression and a spec: missing \)"),
    ([(1, P())], {"w": 0}, r"rule 0 is no pair"),
    (["w"], {"w": 0}, r"rule 0 is no pair"),
]


@pytest.mark.parametrize(("rules", "tree", "message"), BAD_RULES, ids=[b[2][:40] for b in BAD_RULES])
def test_rules_that_do_not_do(rules, tree, message):
    with pytest.raises(SpecError, match=message):
        match_rules(rules, tree)
