"""The examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.layout.rooms import MODULES

FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples(module: str) -> list[doctest.DocTest]:
    """The docstrings of a module that hold examples."""
    return [test for test in FINDER.find(importlib.import_module(module)) if test.examples]


WITH_EXAMPLES = [module for module, file in MODULES.items() if ">>>" in file.read_text()]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_print_what_they_say(module):
    runner = doctest.DocTestRunner(verbose=False)
    for test in examples(module):
        said: list[str] = []
        runner.run(test, out=said.append)
        assert not said, "".join(said)


def test_no_example_is_skipped():
    skipped = [module for module in WITH_EXAMPLES if "doctest: +SKIP" in MODULES[module].read_text()]
    assert skipped == []
