"""The layout: which room may import which, and what every module looks like."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

import ptrainx
from tests.layout.rooms import LEVEL, MODULES, PACKAGE, ROOT, SHORTHANDS, imports, parsed, room_of

PRIVATE = re.compile(r"torch\.(\w+\.)*_(?!_)\w+(\.\w+)*")
EXTENSION_POINTS = re.compile(r"torch\.(_check|_ops\.OpOverload|utils\._python_dispatch\.TorchDispatchMode)\b")
"""Names with an underscore that torch's documentation tells those who extend it to use."""
SOURCES = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()
]  # fmt: skip

every_module = pytest.mark.parametrize("module", MODULES)


def test_every_folder_of_the_package_is_a_known_room():
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms == set(LEVEL)


def test_every_file_at_the_top_is_a_shorthand():
    assert {p.stem for p in PACKAGE.glob("*.py")} == {"__init__", *SHORTHANDS}


@every_module
def test_arrows_point_left(module):
    room = room_of(module)
    if room not in LEVEL:
        return  # the top may import every room
    for imported in imports(MODULES[module]):
        if imported.split(".")[0] != "ptrainx":
            continue
        other = room_of(imported)
        # `import ptrainx`, where a room looks for the package itself and not for something in it.
        if other is None:
            assert room == "cli", f"{module} imports ptrainx as a whole"
            continue
        assert other in LEVEL, f"{module} imports {imported}, which is for users"
        assert other == room or LEVEL[other] < LEVEL[room], (
            f"{module} imports {imported}: {other} is not left of {room}"
        )


def test_the_graph_of_module_imports_has_no_circle():
    known = set(MODULES)

    def resolve(name: str) -> str | None:
        return name if name in known else name.rpartition(".")[0] if name.rpartition(".")[0] in known else None

    # What a package's __init__ gathers is for those outside it; inside a room the files are imported by name.
    graph = {
        module: {found for name in imports(file) if (found := resolve(name)) not in (None, module)}
        for module, file in MODULES.items()
        if file.name != "__init__.py"
    }
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done or module not in graph:
            return
        path.append(module)
        for other in sorted(graph[module]):
            visit(other)
        path.pop()
        done.add(module)

    for module in graph:
        visit(module)


@pytest.mark.parametrize("file", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_at_the_root_are_imported_through_the_package(file):
    bare = [name for name in imports(file) if name.split(".")[0] in ("mesh", "ops")]
    assert not bare, f"{file} imports {bare}: write ptrainx.{bare[0]}"


@every_module
def test_private_torch_names_stay_in_the_seam(module):
    if module.startswith("ptrainx.core.torch_compat"):
        return
    private = [n for n in imports(MODULES[module]) if PRIVATE.match(n) and not EXTENSION_POINTS.match(n)]
    assert not private, f"{module} imports {private}"
    # Operators, as in torch.ops.aten._to_copy, are named so by ATen's schema.
    code = "\n".join(_own_code(MODULES[module])).replace("torch.ops.", "")
    used = [match[0] for match in PRIVATE.finditer(code) if not EXTENSION_POINTS.match(match[0])]
    assert not used, f"{module} uses {used}"


def _own_code(file: Path) -> list[str]:
    """The lines of a file with imports and string literals blanked: a name in a message is no use of it."""
    lines = file.read_text().splitlines()
    for node in ast.walk(parsed(file)):
        text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            for i in range(first, last + 1):
                start = node.col_offset if i == first else 0
                stop = node.end_col_offset if i == last else len(lines[i])
                lines[i] = lines[i][:start] + " " * ((stop or start) - start) + lines[i][stop:]
    return [line.partition("#")[0] for line in lines]


@every_module
def test_has_a_docstring(module):
    assert ast.get_docstring(parsed(MODULES[module])), f"{module} has no docstring"


@every_module
def test_is_under_400_lines(module):
    assert len(MODULES[module].read_text().splitlines()) <= 400


@every_module
def test_exports_are_sorted_and_real(module):
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None)
    if names is None:
        # Programs, and packages that gather nothing.
        body = [n for n in parsed(MODULES[module]).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert not [n.name for n in body if not n.name.startswith("_")], f"{module} has public names and no __all__"
        return
    assert names == sorted(names, key=_export_order)
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(loaded, name)] == []


def _export_order(name: str) -> tuple[int, str]:
    """Constants, classes, functions, each by name, as ruff (RUF022) sorts them too."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2), name


@every_module
def test_init_files_only_gather(module):
    if MODULES[module].name == "__init__.py":
        allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
        assert all(isinstance(node, allowed) for node in parsed(MODULES[module]).body)


@pytest.mark.parametrize("room", ["mesh", "ops"])
def test_rooms_at_the_root_are_reached_by_relative_links(room):
    link = PACKAGE / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"
    assert (ROOT / room / "__init__.py").is_file()
    assert importlib.import_module(f"ptrainx.{room}").__name__ == f"ptrainx.{room}"


def test_nothing_is_left_open():
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError\(")
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in MODULES.values()
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def test_version_is_the_one_of_the_metadata():
    assert f'version = "{ptrainx.__version__}"' in (ROOT / "pyproject.toml").read_text()
