"""The reference names everything that is public, with the signatures that the code has."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest

import ptrainx as px
from tests.docs.pages import ROOT
from tests.layout.rooms import MODULES

PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md"))}
REFERENCE = "\n".join(PAGES.values())
MODULE_NAMES = [name for name in px.__all__ if isinstance(getattr(px, name), ModuleType)]
PUBLIC = [f"px.{name}" for name in px.__all__] + [
    f"px.{module}.{name}"
    for module in MODULE_NAMES
    for name in getattr(px, module).__all__
    if not (hasattr(px, name) and getattr(px, name) is getattr(getattr(px, module), name))
]
SIGNATURES = sorted(set(re.findall(r"^(?:### |\| )`(px\.[\w.]+)(\([^`]*\))`", REFERENCE, re.M)))
"""What stands in a heading, or first in the row of a table."""


def lookup(path: str):
    value = px
    for name in path.split(".")[1:]:
        value = getattr(value, name)
    return value


def signature_of(value) -> str:
    """Names, kinds and defaults of parameters, without annotations."""
    signature = inspect.signature(value)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_in_the_reference(name):
    last = name.rpartition(".")[2]
    errors = name.startswith("px.errors.") and f"## {last}" in PAGES["errors.md"]
    assert errors or re.search(rf"`{re.escape(name)}\b", REFERENCE), f"{name} is not in docs/reference"


@pytest.mark.parametrize(("path", "written"), SIGNATURES, ids=[path for path, _ in SIGNATURES])
def test_signatures_are_those_of_the_code(path, written):
    assert written == signature_of(lookup(path))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(px\.[\w.]+)", REFERENCE))))
def test_names_in_the_reference_exist(name):
    lookup(name)


def test_environment_variables_are_those_that_the_code_reads():
    pattern = re.compile(r"\bPTRAINX_[A-Z_]+\b")
    read = {name for file in MODULES.values() for name in pattern.findall(file.read_text())}
    assert set(pattern.findall(PAGES["environment.md"])) == read


@pytest.mark.parametrize("name", [name for name in px.errors.__all__ if name != "PtrainxError"])
def test_every_error_has_an_example(name):
    section = PAGES["errors.md"].partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    raised = re.findall(r"```text\n(\w+): ", section)
    known = {**vars(px.errors), **vars(px.runtime)}
    assert raised
    assert all(issubclass(known[kind], getattr(px.errors, name)) for kind in raised)
