"""`visualize_sharding`: the picture says what the ranks really hold, as text and as HTML."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
import rich.console
import torch

from ptrainx.core.avals import ShapeDtypeStruct
from ptrainx.core.errors import InputError, MeshError, SpecError
from ptrainx.mesh import AbstractMesh, P, ShardingView, device_put, make_mesh, shutdown, visualize_sharding
from ptrainx.mesh.layout import ArrayLayout, bytes_text, ranks_text
from ptrainx.mesh.simulated import local_tensors

X = torch.arange(64).reshape(8, 8)
SPECS = [P(), P("data"), P("model"), P(None, "model"), P("data", "model"), P("model", "data"), P(("data", "model"))]


def mesh_2x4():
    return make_mesh(data=2, model=4, simulate=True)


def view_of(*args, **kwargs) -> ShardingView:
    return visualize_sharding(*args, show=False, **kwargs)


@pytest.mark.parametrize("spec", [*SPECS, P("model", unreduced="data")], ids=str)
@pytest.mark.parametrize("rows", [8, 5])
def test_the_grid_is_what_the_ranks_hold(spec, rows):
    """Held against the local tensors themselves, uneven ones (5 rows) among them."""
    value = device_put(X, spec, mesh_2x4())[:rows]
    (layout,) = view_of(value).layouts
    for rank, part in local_tensors(value).items():
        assert tuple(stop - start for start, stop in layout.block(rank)) == part.shape
        if not layout.spec.unreduced:
            (a, b), (c, d) = layout.block(rank)
            assert part.equal(X[a:b, c:d])
    grid_rows, columns, cells = layout.grid()
    for (row, column), ranks in cells.items():
        assert row in grid_rows
        assert column in columns
        assert all(layout.block(rank) == (row, column) for rank in ranks)
    shown = sorted(rank for ranks in cells.values() for rank in ranks)
    assert shown == [rank for rank, part in local_tensors(value).items() if part.numel()]


PICTURES = [
    (
        lambda: device_put(X, P("data", "model"), mesh_2x4()),
        """
        i64[8,8] P('data', 'model') on Mesh(data=2, model=4, simulated)
        ┌─────┬────────┬────────┬────────┬────────┐
        │     │  0:2   │  2:4   │  4:6   │  6:8   │
        ├─────┼────────┼────────┼────────┼────────┤
        │ 0:4 │ rank 0 │ rank 1 │ rank 2 │ rank 3 │
        ├─────┼────────┼────────┼────────┼────────┤
        │ 4:8 │ rank 4 │ rank 5 │ rank 6 │ rank 7 │
        └─────┴────────┴────────┴────────┴────────┘
        each rank holds [4,2], 64 B of 512 B; 1 copy
        """,
    ),
    (
        lambda: device_put(X[0], P("model"), mesh_2x4()),
        """
        i64[8] P('model') on Mesh(data=2, model=4, simulated)
        ┌────────────┬────────────┬────────────┬────────────┐
        │    0:2     │    2:4     │    4:6     │    6:8     │
        ├────────────┼────────────┼────────────┼────────────┤
        │ ranks 0, 4 │ ranks 1, 5 │ ranks 2, 6 │ ranks 3, 7 │
        └────────────┴────────────┴────────────┴────────────┘
        each rank holds [2], 16 B of 64 B; 2 copies
        """,
    ),
    (
        lambda: device_put(X, P(unreduced="model"), mesh_2x4()),
        """
        i64[8,8] P(None, None, unreduced=('model',)) on Mesh(data=2, model=4, simulated)
        ┌─────┬───────────┐
        │     │    0:8    │
        ├─────┼───────────┤
        │ 0:8 │ ranks 0-7 │
        └─────┴───────────┘
        each rank holds [8,8], 512 B of 512 B
        a sum over model is owed: ranks along it hold addends, not copies
        """,
    ),
    (
        lambda: torch.tensor(1.0),
        """
        f32[] a plain value
        ┌──────────────┐
        │ each process │
        └──────────────┘
        not placed: each process has the whole of it
        """,
    ),
    (
        lambda: {
            "step": 3,
            "params": {"w": device_put(X.float(), P("data"), mesh_2x4()), "b": device_put(X[0], None, mesh_2x4())},
            "grads": [device_put(X.float(), P(unreduced="data"), mesh_2x4())],
        },
        """
        on Mesh(data=2, model=4, simulated)
        ┌──────────┬──────────┬────────────────────────────────────┬──────────────┬──────────┐
        │ leaf     │ value    │ placement                          │ bytes a rank │   copies │
        ├──────────┼──────────┼────────────────────────────────────┼──────────────┼──────────┤
        │ grads/0  │ f32[8,8] │ P(None, None, unreduced=('data',)) │        256 B │ sum owed │
        │ params/b │ i64[8]   │ P(None)                            │         64 B │        8 │
        │ params/w │ f32[8,8] │ P('data', None)                    │        128 B │        4 │
        │ step     │ i64[]    │ plain                              │          8 B │          │
        ├──────────┼──────────┼────────────────────────────────────┼──────────────┼──────────┤
        │ 4 leaves │ 584 B    │                                    │        456 B │          │
        └──────────┴──────────┴────────────────────────────────────┴──────────────┴──────────┘
        """,
    ),
]


@pytest.mark.parametrize(("make", "picture"), PICTURES, ids=[p[1].strip().splitlines()[0] for p in PICTURES])
def test_pictures(make, picture):
    view = view_of(make())
    assert view.text().splitlines() == [line.strip() for line in picture.strip().splitlines()]
    assert str(view) == view.text()


def test_a_spec_alone_on_an_abstract_mesh():
    view = view_of(P("data", None, "model"), mesh=AbstractMesh(data=2, model=2), shape=(4, 4, 8))
    text = view.text()
    assert text.startswith("[4,4,8] P('data', None, 'model') on AbstractMesh(data=2, model=2)\n")
    assert "│ 0:2 │ ranks 0, 1 │" in text
    assert text.endswith(
        "each rank holds [2,4,4]; 1 copy\ndim 2 is split over model too: ranks of one cell hold different parts of it"
    )


def test_a_plan_of_a_tree_from_shapes():
    shapes = {"w": ShapeDtypeStruct((4096, 4096), torch.bfloat16), "b": ShapeDtypeStruct((4096,), torch.float32)}
    text = view_of(shapes, {"w": P("data", "model"), "b": P()}, AbstractMesh(data=64, model=16)).text()
    assert re.search(r"w +│ bf16\[4096,4096\] │ P\('data', 'model'\) │ +32 KiB │ +1 │", text)
    assert re.search(r"b +│ f32\[4096\] +│ P\(\) +│ +16 KiB │ +1024 │", text)
    assert re.search(r"2 leaves │ 32 MiB +│ +│ +48 KiB │", text)


def test_the_mesh_of_with_is_the_default():
    with AbstractMesh(data=4):
        assert view_of(P("data"), shape=(8,)).layouts[0].mesh == AbstractMesh(data=4)


def test_a_thousand_devices_stay_readable():
    view = view_of(P("data", "model"), mesh=AbstractMesh(data=64, model=16), shape=(4096, 4096))
    lines = view.text().splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) <= 120
    assert "rank 1023" in view.text()
    assert "..." in view.text()
    many = view_of({str(i): X for i in range(500)})
    assert "... and 300 more" in many.text()
    assert "500 leaves" in many.text()
    assert len(many.html()) < 100_000


def test_where_it_prints(capsys):
    value = device_put(X, P("data"), mesh_2x4())
    view = visualize_sharding(value)
    assert capsys.readouterr().out == str(view) + "\n"
    visualize_sharding(value, show=False)
    assert capsys.readouterr().out == ""
    out = io.StringIO()
    visualize_sharding(value, file=out)
    assert out.getvalue() == str(view) + "\n"
    assert capsys.readouterr().out == ""
    assert repr(view) == "<ShardingView of i64[8,8] P('data', None) on Mesh(data=2, model=4, simulated)>"


def test_a_notebook_shows_the_view_itself(monkeypatch, capsys):
    class Shell:
        kernel = object()

    class IPython:
        get_ipython = staticmethod(lambda: Shell())

    monkeypatch.setitem(__import__("sys").modules, "IPython", IPython)
    view = visualize_sharding(X)
    assert capsys.readouterr().out == ""
    assert view._repr_html_() == view.html()
    visualize_sharding(X, show=True)
    assert "each process" in capsys.readouterr().out


def test_color_is_added_and_carries_nothing_alone():
    view = view_of(device_put(X, P("data"), mesh_2x4()))
    colored = view.text(color=True)
    assert "\x1b[" in colored
    assert "\x1b[" not in view.text()
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == view.text()
    console = rich.console.Console(file=io.StringIO(), width=100)
    console.print(view)
    assert "ranks 0-3" in console.file.getvalue()


class Page(HTMLParser):
    """Text and tags of a page; every tag has to be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize(("make", "picture"), PICTURES, ids=[p[1].strip().splitlines()[0] for p in PICTURES])
def test_html_holds_the_same_words(make, picture):
    view = view_of(make())
    page = Page(view.html())
    assert page.open == []
    words = {cell.strip() for line in picture.strip().splitlines() for cell in line.split("│") if "─" not in line}
    assert words - {""} <= {text.strip() for text in page.texts}
    assert not {"script", "link", "img", "style"} & {tag for tag, _ in page.tags}
    assert not any("src" in attrs or "href" in attrs for _, attrs in page.tags)


def test_html_is_escaped():
    evil = "<script>alert('1')</script>&"
    text = view_of({evil: X, "x": X}).html()
    assert "<script" not in text
    assert evil in "".join(Page(text).texts)


def test_cells_that_touch_differ_in_color():
    view = view_of(P("data", "model"), mesh=AbstractMesh(data=8, model=8), shape=(8, 8))
    colors = re.findall(r"background: (#\w+)", view.html())
    grid = [colors[8 * i : 8 * i + 8] for i in range(8)]
    assert len(colors) == 64
    for i in range(8):
        for j in range(8):
            assert i == 0 or grid[i][j] != grid[i - 1][j]
            assert j == 0 or grid[i][j] != grid[i][j - 1]


def test_a_value_of_a_real_mesh():
    value = device_put(X, P("data"), make_mesh(data=1))
    assert "│ 0:8 │ rank 0 │" in view_of(value).text()
    shutdown()


REFUSED = [
    (lambda: view_of(P("data"), mesh=AbstractMesh(data=2)), InputError, r"a spec alone has no shape(.|\n)*shape="),
    (lambda: view_of(P("data"), shape=(4,)), MeshError, r"only together with a mesh"),
    (lambda: view_of({"w": X}, P("data")), MeshError, r"only together with a mesh"),
    (
        lambda: view_of({"w": X[:7]}, P(("data", "model")), AbstractMesh(data=2, model=2)),
        SpecError,
        r"w: dim 0 of size 7 is not divisible",
    ),
    (lambda: view_of(P("x"), mesh=AbstractMesh(data=2), shape=(4,)), SpecError, r"names axis 'x'"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[r[2] for r in REFUSED])
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("tree", [None, {}, []])
def test_an_empty_tree(tree):
    assert "0 leaves" in view_of(tree).text()


RANKS = [([0], "0"), ([0, 1], "0, 1"), ([0, 1, 2], "0-2"), ([0, 2, 4], "0, 2, 4"), ([0, 1, 2, 5, 6, 7], "0-2, 5-7")]


@pytest.mark.parametrize(("ranks", "text"), RANKS, ids=[t for _, t in RANKS])
def test_ranks_text(ranks, text):
    assert ranks_text(ranks) == text


def test_many_scattered_ranks_are_cut_short():
    assert ranks_text(range(0, 1000, 5)) == "0, 5, 10, 15, 20, 25, ..., 995"


SIZES = [(0, "0 B"), (999, "999 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 * 2**40, "3 TiB")]


@pytest.mark.parametrize(("n", "text"), SIZES, ids=[t for _, t in SIZES])
def test_bytes_text(n, text):
    assert bytes_text(n) == text


def test_an_empty_array():
    assert "rank" in ShardingView((ArrayLayout("", (0, 4), torch.float32, P("data"), AbstractMesh(data=2)),)).text()
