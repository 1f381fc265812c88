"""Markdown pages: their code blocks, what these print, their headings and links.

A block of `python` runs; those of one page run in order, in one namespace. A block of `text` right after it is what it
prints, where `...` stands for anything. A block of `python raises` must raise; the text after it is the error's name
and message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import io
import linecache
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
SCRIPT = "train.py"
"""What the blocks of a page are called in source lines: as if they had been copied into one file."""

_FENCE = re.compile(r"^(```+)([^\n`]*)\n(.*?)^\1[ \t]*$", re.M | re.S)


@dataclasses.dataclass
class Block:
    """A fenced block: its language, the words after it, its text, where the text stands in the page."""

    language: str
    words: tuple[str, ...]
    text: str
    start: int
    stop: int
    output: Block | None = None


def name_of(page: Path) -> str:
    """A page as its links call it."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, each `python` block with the `text` block that directly follows it."""
    content = page.read_text()
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(content):
        language, *words = match[2].split() or [""]
        block = Block(language, tuple(words), match[3], match.start(3), match.end(3))
        before = found[-1] if found else None
        if language == "text" and before and before.language == "python" and not content[end : match.start()].strip():
            before.output = block
        found.append(block)
        end = match.end()
    return found


def run(code: list[Block], namespace: dict[str, Any]) -> list[str]:
    """Runs python blocks in order, and returns what each prints, or the error that it raises."""
    printed = []
    line = 0
    source = "".join(block.text for block in code)
    # Source lines in messages are looked up here.
    linecache.cache[SCRIPT] = (len(source), None, source.splitlines(True), SCRIPT)
    for block in code:
        out = io.StringIO()
        program = compile("\n" * line + block.text, SCRIPT, "exec")
        line += block.text.count("\n")
        with contextlib.redirect_stdout(out), mock.patch.object(sys, "argv", [SCRIPT]):
            if "raises" in block.words:
                print(_raised(program, namespace))
            else:
                exec(program, namespace)
        printed.append(out.getvalue())
    return printed


def _raised(program: Any, namespace: dict[str, Any]) -> str:
    try:
        exec(program, namespace)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the block raises nothing")


def matches(expected: str, printed: str) -> bool:
    """Whether a text block is what was printed; `...` stands for anything."""
    return doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)


def anchors(page: Path) -> set[str]:
    """What `#anchor` links may point at, in the form that GitHub gives headings."""
    text = _FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ +(.+?)\s*$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    """The targets of a page's links, those in code apart."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))
    return re.findall(r"\]\(([^)\s]+)\)", text)
