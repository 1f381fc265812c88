"""The examples in the docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from ptrainx import optim

MODULES = [module.name for module in pkgutil.iter_modules(optim.__path__, "ptrainx.optim.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_exports_are_sorted_and_real():
    assert optim.__all__ == sorted(optim.__all__)
    assert all(hasattr(optim, name) for name in optim.__all__)
