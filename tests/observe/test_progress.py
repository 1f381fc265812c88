"""Progress: a bar on a terminal, single lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ptrainx import initialize
from ptrainx.observe import Progress


def shown(*, terminal: bool, updates, total=3, every=0.0, width=100):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, _environ={"TERM": "xterm"})
    with Progress(total, every=every, console=console) as progress:
        for update in updates:
            if isinstance(update, str):
                progress.print(update)
            else:
                progress.update(*update)
    return file.getvalue()


UPDATES = [
    (1, {"loss": 5.5, "tokens_per_s": 1000.0, "rss_mib": 300.4}),
    (2, {"loss": 4.25, "tokens_per_s": 2000.0, "rss_mib": 310.0}),
    (3, {"loss": 4.0, "tokens_per_s": 2000.0, "rss_mib": 310.0}),
]


def test_without_a_terminal_each_line_stands_alone():
    text = shown(terminal=False, updates=UPDATES)
    assert "\x1b" not in text
    assert "\r" not in text
    # the rate is smoothed, a tenth of the way a step
    assert text.splitlines() == [
        "train  step 1/3  loss 5.5000  1,000 tokens/s  300 MiB",
        "train  step 2/3  loss 4.2500  1,100 tokens/s  310 MiB",
        "train  step 3/3  loss 4.0000  1,190 tokens/s  310 MiB",
    ]


def test_without_a_terminal_lines_are_seconds_apart_but_the_first_and_the_last_are_there():
    lines = shown(terminal=False, updates=UPDATES, every=1000.0).splitlines()
    assert [re.search(r"step (\d)", line)[1] for line in lines] == ["1", "3"]


@pytest.mark.parametrize("width", [100, 70])
def test_a_terminal_gets_a_bar_with_the_last_values(width):
    text = shown(terminal=True, updates=UPDATES, width=width)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.strip().split("\r")[-1])
    assert "3/3" in plain
    assert "loss 4.0000" in plain
    assert "tokens/s" in plain
    assert "310 MiB" in plain


def test_a_value_that_is_missing_keeps_its_last_one():
    assert (
        shown(terminal=False, updates=[(1, {"loss": 2.0}), (3, {})]).splitlines()[-1] == "train  step 3/3  loss 2.0000"
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_brackets_in_a_message_are_no_markup(terminal):
    assert "[bold] 3" in shown(terminal=terminal, updates=["[bold] 3"])


def show_on_every_rank():
    initialize()
    return shown(terminal=False, updates=UPDATES)


@pytest.mark.processes
def test_other_ranks_are_silent(pool):
    first, second = pool.run(show_on_every_rank, 2)
    assert "step 3/3" in first
    assert second == ""
