"""`P`: printing, equality, hashing, pickling, and what it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest

from ptrainx.core import tree as px_tree
from ptrainx.core.errors import SpecError
from ptrainx.mesh import P, PartitionSpec

PRINTED = [
    (P(), "P()"),
    (P(None), "P(None)"),
    (P("data"), "P('data')"),
    (P("data", None), "P('data', None)"),
    (P(None, "model"), "P(None, 'model')"),
    (P(("data", "model")), "P(('data', 'model'))"),
    (P(("data", "model"), None, "expert"), "P(('data', 'model'), None, 'expert')"),
    (P(("data",)), "P('data')"),
    (P(["data", "model"]), "P(('data', 'model'))"),
    (P(()), "P(None)"),
    (P(unreduced=("data",)), "P(unreduced=('data',))"),
    (P(unreduced="data"), "P(unreduced=('data',))"),
    (P("model", unreduced=["data"]), "P('model', unreduced=('data',))"),
    (P(unreduced=("model", "data")), "P(unreduced=('data', 'model'))"),
]


@pytest.mark.parametrize(("spec", "text"), PRINTED, ids=[t for _, t in PRINTED])
def test_prints_as_it_is_written(spec, text):
    assert repr(spec) == text
    assert eval(text) == spec


@pytest.mark.parametrize(("spec", "text"), PRINTED, ids=[t for _, t in PRINTED])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))])
def test_copies_and_pickles_equal(spec, text, copied):
    again = copied(spec)
    assert again == spec
    assert repr(again) == text
    assert hash(again) == hash(spec)


EQUAL = [
    (P(), P(None, None)),
    (P("data"), P("data", None)),
    (P("data"), P(("data",), ())),
    (P(unreduced=("a", "b")), P(unreduced=("b", "a"))),
]


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=str)
def test_missing_entries_are_none(one, other):
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


DIFFERENT = [
    (P(), P("data")),
    (P("data"), P(None, "data")),
    (P(("data", "model")), P(("model", "data"))),
    (P("data"), P(unreduced=("data",))),
    (P(), P(unreduced=("data",))),
    (P("data"), ("data",)),
    (P(), None),
    (P(), ()),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=str)
def test_different(one, other):
    assert one != other


def test_p_is_the_short_name_and_a_leaf():
    assert P is PartitionSpec
    assert px_tree.leaves({"a": P("data"), "b": [P()]}) == [P("data"), P()]


def test_every_spec_is_true_and_has_a_length():
    assert all((P(), P("data"), P(unreduced=("data",))))
    assert [len(spec) for spec in (P(), P("data", None), P(unreduced="data"))] == [0, 2, 0]
    assert list(P("data", None, ("a", "b"))) == ["data", None, ("a", "b")]


def test_axes_in_the_order_of_the_dims():
    spec = P("c", None, ("a", "b"), unreduced="d")
    assert spec.axes == ("c", "a", "b")
    assert [spec.dim_of(axis) for axis in "abcde"] == [2, 2, 0, None, None]


REFUSED = [
    (lambda: P("data", "data"), r"axis 'data' is used twice in P\('data', 'data'\)"),
    (lambda: P(("data", "data")), r"axis 'data' is used twice"),
    (lambda: P("data", ("model", "data")), r"axis 'data' is used twice"),
    (lambda: P("data", unreduced="data"), r"axis 'data' is used twice in P\('data', unreduced=\('data',\)\)"),
    (lambda: P(unreduced=("data", "data")), r"axis 'data' is used twice"),
    (lambda: P(0), r"a partition spec has no entry 0"),
    (lambda: P(("data", None)), r"a partition spec has no entry \('data', None\)"),
    (lambda: P(P("data")), r"a partition spec has no entry P\('data'\)"),
    (lambda: P(unreduced=(1,)), r"unreduced=\(1,\) names no axes"),
    (lambda: P(unreduced=None), r"unreduced=None names no axes"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refused(make, message):
    with pytest.raises(SpecError, match=message) as caught:
        make()
    assert caught.value.expected
    assert caught.value.fix


def test_does_not_change():
    spec = P("data")
    with pytest.raises(AttributeError, match="make a new one"):
        spec.entries = ()
    with pytest.raises(AttributeError, match="does not change"):
        del spec.unreduced
    assert spec == P("data")
