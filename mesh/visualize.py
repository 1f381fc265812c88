"""`visualize_sharding`: a picture of which rank holds which block, for the terminal and as HTML."""

from __future__ import annotations

import dataclasses
import html
import io
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rich.box import SQUARE
from rich.console import Console, Group
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text
from torch.distributed.tensor import DTensor

from ptrainx.core import tree as px_tree
from ptrainx.core.avals import ShapeDtypeStruct, as_tensor
from ptrainx.core.errors import InputError, MeshError
from ptrainx.mesh.layout import ArrayLayout, bytes_text, ranks_text
from ptrainx.mesh.mesh import AbstractMesh, Mesh, ambient_mesh
from ptrainx.mesh.partition_spec import PartitionSpec
from ptrainx.mesh.placement import check_spec, spec_of
from ptrainx.mesh.spec_tree import SpecTree, spread

__all__ = ["ShardingView", "visualize_sharding"]

# Light enough for black text, in an order that keeps neighbours apart.
COLORS = (
    "#8ecae6",
    "#ffb703",
    "#95d5b2",
    "#f4a3b5",
    "#cdb4db",
    "#ffd6a5",
    "#a3b8f0",
    "#d9ed92",
    "#f2b880",
    "#9be0d8",
    "#e5b3e8",
    "#c9c9c9",
)
MOST_LINES = 8  # rows or columns of a drawn grid
MOST_LEAVES = 200  # rows of a table of leaves


def visualize_sharding(
    value: Any,
    specs: SpecTree = None,
    mesh: AbstractMesh | None = None,
    *,
    shape: Sequence[int] | None = None,
    file: TextIO | None = None,
    show: bool | None = None,
) -> ShardingView:
    """Shows which rank holds which block of an array, or how the leaves of a tree are placed.

    Prints in a script (on the first rank); in a notebook the returned view displays itself.

    Args:
        value: an array, or a tree of them: placed values; or plain ones or `px.eval_shape`'s, for which `specs` and
            `mesh` say where they would go; or a lone `P`, with `mesh` and `shape`.
        specs: a spec tree for values that are not placed, possibly a prefix.
        mesh: their mesh, by default that of `with mesh:`; an `AbstractMesh` will do.
        shape: the shape that a lone `P` splits.
        file: where to print, by default standard output.
        show: whether to print; by default in a script or where `file` is given, but not in a notebook.

    Returns:
        the view: `text()`, `html()`, `str(view)`.

    Raises:
        SpecError: a spec that does not fit.
        MeshError: a spec, and no mesh.
        InputError: a lone `P` without a shape.

    >>> from ptrainx.mesh import P
    >>> view = visualize_sharding(P("data"), mesh=AbstractMesh(data=2), shape=(4,))
    [4] P('data') on AbstractMesh(data=2)
    ┌────────┬────────┐
    │  0:2   │  2:4   │
    ├────────┼────────┤
    │ rank 0 │ rank 1 │
    └────────┴────────┘
    each rank holds [2]; 1 copy
    """
    view = ShardingView(tuple(_layouts(value, specs, mesh if mesh is not None else ambient_mesh(), shape)))
    first = all(getattr(layout.mesh, "rank", 0) == 0 for layout in view.layouts)
    if show or (show is None and (file is not None or (first and not _in_notebook()))):
        out = file or sys.stdout
        print(view.text(color=out.isatty()), file=out)
    return view


def _in_notebook() -> bool:
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _layouts(value: Any, specs: SpecTree, mesh: AbstractMesh | None, shape: Sequence[int] | None) -> list[ArrayLayout]:
    if isinstance(value, PartitionSpec):
        if shape is None:
            raise InputError(
                "a spec alone has no shape", fix="write visualize_sharding(P('data'), mesh=..., shape=(8,))"
            )
        return [_planned("", tuple(shape), None, value, mesh)]
    pairs, _ = px_tree.flatten_with_path(value)
    chosen = spread(specs, value)
    return [_layout(px_tree.path_str(path), leaf, spec, mesh) for (path, leaf), spec in zip(pairs, chosen)]


def _layout(name: str, leaf: Any, spec: PartitionSpec | None, mesh: AbstractMesh | None) -> ArrayLayout:
    if isinstance(leaf, DTensor):
        own = Mesh.from_device_mesh(leaf.device_mesh)
        return ArrayLayout(name, tuple(leaf.shape), leaf.dtype, spec_of(leaf), own)
    aval = leaf if isinstance(leaf, ShapeDtypeStruct) else as_tensor(leaf, name or "value")
    if spec is None:
        return ArrayLayout(name, tuple(aval.shape), aval.dtype, None, None)
    return _planned(name, tuple(aval.shape), aval.dtype, spec, mesh)


def _planned(name: str, shape: tuple, dtype: Any, spec: PartitionSpec, mesh: AbstractMesh | None) -> ArrayLayout:
    if mesh is None:
        raise MeshError("a spec says where a value goes only together with a mesh", fix="pass mesh=")
    check_spec(spec, mesh, shape, name or "value")
    return ArrayLayout(name, shape, dtype, spec, mesh)


@dataclasses.dataclass(frozen=True, repr=False)
class ShardingView:
    """A picture of placements. Shows itself in a notebook; `str(view)` is the text form.

    Attributes:
        layouts: one array, drawn as a grid; or the leaves of a tree, listed in a table.
    """

    layouts: tuple[ArrayLayout, ...]

    @property
    def _is_array(self) -> bool:
        return len(self.layouts) == 1 and not self.layouts[0].name

    def text(self, *, color: bool = False, width: int = 120) -> str:
        """The picture in box-drawing characters, with ANSI colors if asked for; legible without them."""
        out = io.StringIO()
        system = "truecolor" if color else None
        console = Console(  # in a notebook, rich would display the picture instead of writing it
            file=out,
            width=width,
            force_terminal=color,
            force_jupyter=False,
            color_system=system,  # type: ignore[arg-type]
            legacy_windows=False,
        )
        console.print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def html(self) -> str:
        """The picture as one HTML element, with nothing outside it needed."""
        body = _array_html(self.layouts[0]) if self._is_array else _tree_html(self.layouts)
        return f'<div style="font-family: system-ui, sans-serif; font-size: 13px; line-height: 1.4">{body}</div>'

    def _repr_html_(self) -> str:
        return self.html()

    def __rich__(self) -> Any:
        return _array_rich(self.layouts[0]) if self._is_array else _tree_rich(self.layouts)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        what = self.layouts[0].title if self._is_array else f"{len(self.layouts)} leaves"
        return f"<ShardingView of {what}>"


def _elided(ranges: list[Any]) -> list[Any]:
    """At most `MOST_LINES` of the ranges, None where some are left out."""
    return ranges if len(ranges) <= MOST_LINES else [*ranges[: MOST_LINES - 2], None, ranges[-1]]


def _range_text(bounds: tuple[int, int] | None) -> str:
    return "..." if bounds is None else f"{bounds[0]}:{bounds[1]}"


def _cell(layout: ArrayLayout, ranks: list[int] | None) -> str:
    if layout.spec is None:
        return "each process"
    return "" if ranks is None else f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"


def _color(row: int, column: int) -> str:
    return COLORS[(5 * row + column) % len(COLORS)]


def _box(text: str, style: Style | str = "none", justify: Any = "center") -> Padding:
    """Text that fills its cell, background included."""
    return Padding(Text(text, justify=justify, overflow="fold"), (0, 1), style=style)


def _array_rich(layout: ArrayLayout) -> Any:
    rows, columns, cells = layout.grid()
    rows, columns = _elided(rows), _elided(columns)
    table = Table(box=SQUARE, show_lines=True, header_style="none", show_header=layout.shape != (), padding=0)
    heads = [_range_text(row) for row in rows] if len(layout.shape) > 1 else []
    if heads:
        table.add_column("")
    for column in columns:
        table.add_column(_box(_range_text(column)))
    for i, row in enumerate(rows):
        line = [_box(heads[i], justify="right")] if heads else []
        for j, column in enumerate(columns):
            if row is None or column is None:
                line.append(_box("..."))
            else:
                style = Style(color="black", bgcolor=_color(i, j))
                line.append(_box(_cell(layout, cells.get((row, column))), style))
        table.add_row(*line)
    return Group(Text(layout.title), table, *(Text(note) for note in layout.notes()))


def _array_html(layout: ArrayLayout) -> str:
    rows, columns, cells = layout.grid()
    rows, columns = _elided(rows), _elided(columns)
    height = 200 if len(layout.shape) > 1 else 48
    lines = []
    if layout.shape != ():
        corner = "<td></td>" if len(layout.shape) > 1 else ""
        heads = "".join(f'<td style="{HEAD}">{_range_text(column)}</td>' for column in columns)
        lines.append(f"<tr>{corner}{heads}</tr>")
    for i, row in enumerate(rows):
        head = f'<td style="{HEAD} text-align: right">{_range_text(row)}</td>' if len(layout.shape) > 1 else ""
        line = []
        for j, column in enumerate(columns):
            if row is None or column is None:
                line.append(f'<td style="{HEAD}">...</td>')
                continue
            fill = f"background: {_color(i, j)}; color: #111"
            size = f"min-width: {max(64, 360 // len(columns))}px; height: {max(34, height // len(rows))}px"
            text = html.escape(_cell(layout, cells.get((row, column))))
            line.append(f'<td style="{CELL} {fill}; {size}">{text}</td>')
        lines.append(f"<tr>{head}{''.join(line)}</tr>")
    notes = "".join(f"<div>{html.escape(note)}</div>" for note in layout.notes())
    table = f'<table style="border-collapse: collapse; margin: 6px 0; width: auto">{"".join(lines)}</table>'
    return f"<div><b>{html.escape(layout.title)}</b></div>{table}{notes}"


HEAD = "padding: 2px 8px; text-align: center; opacity: 0.75; border: none; background: none;"
CELL = "padding: 4px 8px; text-align: center; border: 1px solid #444;"


def _leaf_line(layout: ArrayLayout) -> tuple[str, str, str, str, str]:
    placement = "plain" if layout.spec is None else repr(layout.spec)
    copies = "" if layout.spec is None else "sum owed" if layout.spec.unreduced else str(layout.copies)
    return layout.name or "value", layout.kind, placement, bytes_text(layout.bytes_a_rank or 0), copies


def _tree_lines(layouts: Sequence[ArrayLayout]) -> tuple[list[str], list[tuple[str, ...]], list[tuple[str, ...]]]:
    """(titles, head and leaves, total) of the table of a tree."""
    meshes = dict.fromkeys(repr(layout.mesh) for layout in layouts if layout.mesh is not None)
    here = sum(layout.bytes_a_rank or 0 for layout in layouts)
    total = sum(layout.total_bytes or 0 for layout in layouts)
    lines: list[tuple[str, ...]] = [_leaf_line(layout) for layout in layouts[:MOST_LEAVES]]
    if len(layouts) > MOST_LEAVES:
        lines.append((f"... and {len(layouts) - MOST_LEAVES} more", "", "", "", ""))
    leaves = "1 leaf" if len(layouts) == 1 else f"{len(layouts)} leaves"
    return list(meshes), lines, [(leaves, bytes_text(total), "", bytes_text(here), "")]


LEAF_HEAD = ("leaf", "value", "placement", "bytes a rank", "copies")


def _tree_rich(layouts: Sequence[ArrayLayout]) -> Any:
    meshes, lines, total = _tree_lines(layouts)
    table = Table(box=SQUARE, show_footer=False, header_style="bold")
    for i, name in enumerate(LEAF_HEAD):
        table.add_column(name, justify="right" if i > 2 else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(part) for part in line))
    table.add_section()
    table.add_row(*(Text(part) for part in total[0]))
    return Group(*(Text(f"on {mesh}") for mesh in meshes), table)


def _tree_html(layouts: Sequence[ArrayLayout]) -> str:
    meshes, lines, total = _tree_lines(layouts)

    def row(parts: Sequence[str], tag: str = "td", style: str = "") -> str:
        aligned = ("left", "left", "left", "right", "right")
        cells = (
            f'<{tag} style="padding: 2px 10px; text-align: {a}; {style}">{html.escape(part)}</{tag}>'
            for part, a in zip(parts, aligned)
        )
        return f"<tr>{''.join(cells)}</tr>"

    titles = "".join(f"<div><b>on {html.escape(mesh)}</b></div>" for mesh in meshes)
    head = row(LEAF_HEAD, "th", "border-bottom: 1px solid #888")
    body = "".join(row(line) for line in lines) + row(total[0], style="border-top: 1px solid #888")
    return f'{titles}<table style="border-collapse: collapse; margin: 6px 0">{head}{body}</table>'
