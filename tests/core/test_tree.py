"""Pytrees: order, paths, empty containers, users' own classes."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from typing import Any, NamedTuple

import pytest
import torch

from ptrainx.core import tree as px_tree
from ptrainx.core.errors import TreeError


class Moments(NamedTuple):
    mu: Any
    nu: Any


@px_tree.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    w: Any
    b: Any = None
    activation: str = dataclasses.field(default="gelu", metadata={"static": True})


# tree, leaves in order, paths as rules see them, paths as Python writes them
TREES = [
    (None, [], [], []),
    ({}, [], [], []),
    ([], [], [], []),
    ((), [], [], []),
    ({"a": None, "b": [], "c": {}}, [], [], []),
    (1, [1], [""], ["t"]),
    ({"b": 1, "a": 2}, [2, 1], ["a", "b"], ["t['a']", "t['b']"]),
    (collections.OrderedDict(b=1, a=2), [1, 2], ["b", "a"], ["t['b']", "t['a']"]),
    (collections.defaultdict(list, {"a": [1]}), [1], ["a/0"], ["t['a'][0]"]),
    ({1: "x", "a": "y"}, ["x", "y"], ["1", "a"], ["t[1]", "t['a']"]),
    ([1, None, (2, [3])], [1, 2, 3], ["0", "2/0", "2/1/0"], ["t[0]", "t[2][0]", "t[2][1][0]"]),
    (Moments(1, {"w": 2}), [1, 2], ["mu", "nu/w"], ["t.mu", "t.nu['w']"]),
    (Layer(1), [1], ["w"], ["t.w"]),
    (Layer(w=[1, 2], b=3), [1, 2, 3], ["w/0", "w/1", "b"], ["t.w[0]", "t.w[1]", "t.b"]),
    (
        px_tree.TrainState(step=0, params={"blocks": [{"qkv": 1}]}, opt_state=(Moments(2, 3),), key=None),
        [0, 1, 2, 3],
        ["step", "params/blocks/0/qkv", "opt_state/0/mu", "opt_state/0/nu"],
        ["t.step", "t.params['blocks'][0]['qkv']", "t.opt_state[0].mu", "t.opt_state[0].nu"],
    ),
]


@pytest.mark.parametrize(("tree", "leaves", "names", "expressions"), TREES, ids=[str(t[0])[:40] for t in TREES])
def test_leaves_paths_and_back(tree, leaves, names, expressions):
    assert px_tree.leaves(tree) == leaves
    pairs, treedef = px_tree.flatten_with_path(tree)
    assert [leaf for _, leaf in pairs] == leaves
    assert [px_tree.path_str(path) for path, _ in pairs] == names
    assert [px_tree.path_expr(path, "t") for path, _ in pairs] == expressions
    assert px_tree.unflatten(treedef, leaves) == tree
    assert px_tree.map(lambda leaf: leaf, tree) == tree
    assert type(px_tree.map(lambda leaf: leaf, tree)) is type(tree)
    assert px_tree.structure(tree) == treedef == px_tree.flatten(tree)[1]


@pytest.mark.parametrize(("expression", "tree"), [(e, t[0]) for t in TREES for e in t[3]])
def test_a_path_expression_is_python(expression, tree):
    assert eval(expression, {"t": tree}) in px_tree.leaves(tree)


def test_map_keeps_the_order_of_a_dict():
    assert list(px_tree.map(str, {"z": 1, "a": 2})) == ["z", "a"]


def test_map_over_several_trees():
    assert px_tree.map(lambda a, b: a + b, {"x": 1, "y": [2]}, {"y": [20], "x": 10}) == {"x": 11, "y": [22]}


def test_map_gives_subtrees_of_the_others_where_the_first_has_a_leaf():
    assert px_tree.map(lambda a, b: (a, len(b)), {"x": 1}, {"x": [5, 6]}) == {"x": (1, 2)}


def test_map_with_path():
    out = px_tree.map_with_path(lambda path, a, b: f"{px_tree.path_str(path)}={a + b}", {"x": [1]}, {"x": [2]})
    assert out == {"x": ["x/0=3"]}


def test_is_leaf_stops_the_descent():
    tree = {"a": (1, 2), "b": None}
    assert px_tree.leaves(tree, is_leaf=lambda node: isinstance(node, tuple)) == [(1, 2)]
    assert px_tree.leaves(tree, is_leaf=lambda node: node is None) == [1, 2, None]


MISFITS = [
    ({"a": 1}, {"b": 1}, r"missing key\(s\): \['a'\]"),
    ([1], (1,), "Expected an instance of list"),
    ([1, 2], [1], "tree 1 after the first has another structure"),
    (None, [1], "Expected None"),
    (Moments(1, 2), (1, 2), "tree 1 after the first"),
    (Layer(1), Layer(1, activation="relu"), "tree 1 after the first"),
]


@pytest.mark.parametrize(("first", "other", "message"), MISFITS, ids=[str(m[0]) for m in MISFITS])
@pytest.mark.parametrize("map_", [px_tree.map, px_tree.map_with_path])
def test_trees_that_do_not_fit(map_, first, other, message):
    with pytest.raises(TreeError, match=message):
        map_(lambda *args: 0, first, other)


def test_an_error_of_the_function_stays_itself():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        px_tree.map(lambda leaf: int("x"), [1])
    assert type(caught.value) is ValueError


def test_a_static_field_is_structure():
    assert px_tree.leaves(Layer(1, 2, activation="relu")) == [1, 2]
    assert px_tree.structure(Layer(1)) == px_tree.structure(Layer(2))
    assert px_tree.structure(Layer(1)) != px_tree.structure(Layer(1, activation="relu"))
    assert hash(px_tree.structure(Layer(1))) == hash(px_tree.structure(Layer(2)))
    assert px_tree.map(lambda leaf: leaf + 1, Layer(1, 2, activation="relu")) == Layer(2, 3, activation="relu")


def test_fields_that_init_does_not_take_are_made_again():
    @px_tree.register_dataclass
    @dataclasses.dataclass
    class Twice:
        w: Any
        doubled: Any = dataclasses.field(init=False)

        def __post_init__(self):
            self.doubled = 2 * self.w

    assert px_tree.leaves(Twice(3)) == [3]
    assert px_tree.map(lambda leaf: leaf + 1, Twice(3)).doubled == 8


def test_an_unregistered_dataclass_is_a_leaf():
    @dataclasses.dataclass
    class Plain:
        w: int

    plain = Plain(1)
    assert px_tree.leaves([plain]) == [plain]


def test_only_dataclasses_register_and_once():
    with pytest.raises(TreeError, match=r"int is not a dataclass\n  fix: +put @dataclasses\.dataclass under"):
        px_tree.register_dataclass(int)
    with pytest.raises(TreeError, match="Layer is registered already"):
        px_tree.register_dataclass(Layer)


def test_train_state_replace_and_pickle():
    state = px_tree.TrainState(step=0, params={"w": 1})
    later = state.replace(step=1)
    assert (state.step, later.step, later.params) == (0, 1, {"w": 1})
    assert pickle.loads(pickle.dumps(later)) == later
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 2
    with pytest.raises(TypeError, match="stepp"):
        state.replace(stepp=1)


def test_tensors_are_leaves_whatever_their_type():
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert px_tree.leaves({"w": parameter})[0] is parameter
