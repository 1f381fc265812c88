"""Errors: one tree, one form of message, and they travel between processes."""

from __future__ import annotations

import pickle
import re

import pytest

from ptrainx.core import errors
from ptrainx.core.errors import PtrainxError

CLASSES = [getattr(errors, name) for name in errors.__all__]

BUILTIN_KIND = {
    "AgreementError": RuntimeError,
    "BackendError": RuntimeError,
    "DataError": ValueError,
    "DonationError": RuntimeError,
    "GradientError": TypeError,
    "HyperparameterError": ValueError,
    "InputError": ValueError,
    "MeshError": ValueError,
    "PassError": RuntimeError,
    "SpecError": ValueError,
    "TraceError": RuntimeError,
    "TreeError": TypeError,
    "WorkerError": RuntimeError,
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_one_of_ours_and_in_the_drawing(cls):
    assert issubclass(cls, PtrainxError)
    assert re.search(rf"\b{cls.__name__}\b", errors.__doc__)


@pytest.mark.parametrize("name", sorted(BUILTIN_KIND))
def test_errors_are_also_the_builtin_that_a_caller_would_catch(name):
    assert issubclass(getattr(errors, name), BUILTIN_KIND[name])


@pytest.mark.parametrize("name", ["HostReadError", "MutationError", "RandomnessError"])
def test_what_tracing_refuses_is_a_trace_error(name):
    assert issubclass(getattr(errors, name), errors.TraceError)


MESSAGES = [
    ({}, "it broke"),
    ({"fix": "mend it"}, "it broke\n  fix:      mend it"),
    ({"got": "3", "expected": "4"}, "it broke\n  got:      3\n  expected: 4"),
    (
        {"fix": "mend it", "expected": "4", "got": "3", "source": "train.py:7"},
        "it broke\n  at:       train.py:7\n  got:      3\n  expected: 4\n  fix:      mend it",
    ),
]


@pytest.mark.parametrize(("details", "text"), MESSAGES)
def test_message_form(details, text):
    assert str(errors.MeshError("it broke", **details)) == text


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling(cls):
    error = cls("it broke", got="3", expected="4", fix="mend it", source="train.py:7")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert (again.problem, again.got, again.expected, again.fix, again.source) == (
        "it broke",
        "3",
        "4",
        "mend it",
        "train.py:7",
    )
