"""What errors say: word for word for the mistakes of the table, and in form for every error of the library."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ptrainx as px
from tests.errors.mistakes import MISTAKES

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = Path(__file__).with_name("messages.txt")
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)


def said(name: str) -> str:
    """A mistake's error as a user reads it; without what differs from run to run."""
    with pytest.raises(px.errors.PtrainxError) as caught:
        MISTAKES[name]()
    text = f"{type(caught.value).__name__}: {caught.value}"
    text = re.sub(r"\S*tests/errors/mistakes\.py:\d+", "mistakes.py", text)
    text = re.sub(r" at 0x\w+", "", text.replace(str(Path.cwd()), "FOLDER"))
    return re.sub(r"(ptrainx run -n 4) \S+`", r"\1 train.py`", text)


def written() -> dict[str, str]:
    """The file's messages, by mistake."""
    _, *parts = HEADING.split(MESSAGES.read_text())
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2])}


def document() -> str:
    """What the file should hold."""
    intro = "What errors say, by mistake: `python -m tests.errors` writes this file.\n"
    return "\n".join([intro, *(f"## {name}\n\n{said(name)}\n" for name in MISTAKES)])


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_is_the_one_on_file(name: str) -> None:
    assert said(name) == written()[name]


def test_the_file_holds_nothing_else() -> None:
    assert list(written()) == list(MISTAKES)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_message_says_what_was_found_or_expected_and_what_to_do(name: str) -> None:
    with pytest.raises(px.errors.PtrainxError) as caught:
        MISTAKES[name]()
    error = caught.value
    assert error.fix or error.expected, "what to do"
    assert all(len(line) < 400 for line in str(error).splitlines())


def raised() -> Iterator[tuple[str, set[str | None]]]:
    """(file:line, parts) of each error that the library makes."""
    for room in ("ptrainx", "mesh", "ops"):
        for file in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                call = getattr(node, "exc", None) if isinstance(node, ast.Raise) else getattr(node, "value", None)
                if isinstance(node, (ast.Raise, ast.Return)) and isinstance(call, ast.Call):
                    kind = getattr(px.errors, getattr(call.func, "id", ""), None)
                    if isinstance(kind, type) and issubclass(kind, px.errors.PtrainxError) and not kind("").fix:
                        yield f"{file.relative_to(ROOT)}:{node.lineno}", {word.arg for word in call.keywords}


def test_every_error_says_what_would_be_right_or_what_to_do() -> None:
    sites = list(raised())
    assert len(sites) > 150
    assert [site for site, parts in sites if not parts & {"fix", "expected", None}] == []
