"""The rooms of the package, in the order in which arrows may point, and the modules in them, read without importing."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ptrainx"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"core"}),
    frozenset({"mesh"}),
    frozenset({"ops"}),
    frozenset({"compile"}),
    frozenset({"transforms"}),
    frozenset({"optim", "checkpoint", "data", "observe", "runtime"}),
    frozenset({"cli"}),
)
"""A room imports rooms of layers before its own, and its own files."""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

SHORTHANDS = {"debug", "errors", "random", "schedules", "testing", "tree"}
"""Modules at the top that gather names for users; no room imports them."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package with its file; rooms behind symbolic links included."""
    for room in (PACKAGE, *(p for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__")):
        files = room.glob("*.py") if room is PACKAGE else room.resolve().rglob("*.py")
        for file in files:
            inside = Path(room.name if room is not PACKAGE else "", file.relative_to(room.resolve()))
            parts = [*inside.parent.parts, inside.stem]
            yield ".".join(["ptrainx", *(part for part in parts if part != "__init__")]), file


MODULES = dict(sorted(modules()))


@functools.cache
def parsed(file: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(file.read_text(), str(file))


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever it does; `from a import b` as `a.b`."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str | None:
    """`ptrainx.mesh.axes` -> "mesh"; None outside the package."""
    parts = module.split(".")
    return parts[1] if parts[0] == "ptrainx" and len(parts) > 1 else None
