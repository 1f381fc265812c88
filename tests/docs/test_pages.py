"""The pages are true: their code runs and prints what they say, their links lead somewhere."""

from __future__ import annotations

import contextlib
import io

import pytest

from tests.docs.examples import README_PRELUDE, python_blocks, run_page
from tests.docs.pages import PAGES, ROOT, anchors, blocks, links, matches, name_of

WITH_CODE = [page for page in PAGES if python_blocks(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_runs_and_prints_what_the_page_says(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = python_blocks(page)
    for block, printed in zip(code, run_page(page), strict=True):
        if block.output is not None:
            assert matches(block.output.text, printed), f"{block.text}\nprints\n{printed}\nnot\n{block.output.text}"
        else:
            assert not printed, f"{block.text}\nprints\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_closed_and_of_a_known_language(page):
    assert page.read_text().count("```") % 2 == 0
    assert all(block.language in ("", "python", "text", "sh", "json", "toml", "html") for block in blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} in {name_of(page)}"
        assert not anchor or anchor in anchors(target), f"{link} in {name_of(page)}"


def test_every_page_can_be_reached_from_the_readme():
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            targets = [link.partition("#")[0] for link in links(page) if "://" not in link]
            ahead += [(page.parent / target).resolve() for target in targets if target]
    assert set(PAGES) <= reached


def run_readme_program():
    """The program of one rank, under its launcher's variables."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(README_PRELUDE + python_blocks(ROOT / "README.md")[0].text, {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.processes
def test_readme_program_runs_in_four_processes(pool):
    lines = "".join(pool.run(run_readme_program, 4, timeout=300)).splitlines()
    assert len(lines) == 4
    assert all(line.startswith("loss ") for line in lines)
    assert len(set(lines)) == 1
