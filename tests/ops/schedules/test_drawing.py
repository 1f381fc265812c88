"""Pictures: text to the letter, and SVG whose boxes are where the actions are."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

import ptrainx as px
from ptrainx.schedules import ZBV, DualPipeV, GPipe, Interleaved1F1B, OneFOneB, ZeroBubble

SVG = "{http://www.w3.org/2000/svg}"


def test_text():
    assert OneFOneB().visualize(2, 3) == "\n".join([
        "1F1B: 2 ranks, 3 microbatches",
        "rank 0 |F0 F1       B0--- F2 B1---    B2--- | idle 25.0%",
        "rank 1 |   F0 B0--- F1 B1--- F2 B2---       | idle 25.0%",
        "F forward, B backward; the number is the microbatch",
        "takes 12, bubble 25.0%",
        "activations stored, by rank: 2 1",
    ])  # fmt: skip


def test_text_of_a_split_backward():
    assert ZeroBubble().visualize(2, 2) == "\n".join([
        "zero bubble ZB-H1: 2 ranks, 2 microbatches",
        "rank 0 |F0 F1    I0 W0 I1 W1 | idle 14.3%",
        "rank 1 |   F0 I0 F1 I1 W0 W1 | idle 14.3%",
        "F forward, I gradient of the input, W gradient of the weights; the number is the microbatch",
        "takes 7, bubble 14.3%",
        "activations stored, by rank: 2 2",
        "weight gradients that wait, by rank: 1 2",
    ])  # fmt: skip


def test_text_of_several_stages_on_a_rank():
    assert Interleaved1F1B().visualize(2, 2, forward_only=True).splitlines()[1:4] == [
        "rank 0 |F0a F1a F0b F1b     | idle 20.0%",
        "rank 1 |    F0a F1a F0b F1b | idle 20.0%",
        "F forward; the number is the microbatch; a to b: a rank's stages, in order",
    ]


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), Interleaved1F1B(3), ZeroBubble(), ZBV(), DualPipeV()])
def test_every_action_is_in_the_text_once_in_the_order_of_its_rank(schedule):
    table = schedule.table(3, 12)
    rows = schedule.visualize(3, 12, forward=1.3, backward=2.2, input=0.7, send=0.2).splitlines()[1:4]
    for row, todo in zip(rows, table.actions):
        drawn = [(kind, int(number)) for kind, number in re.findall(r"([FBIW])(\d+)", row)]
        assert drawn == [(action.kind, action.microbatch) for action in todo]
    assert len({row.rindex("|") for row in rows}) == 1


@pytest.mark.parametrize("schedule", [OneFOneB(), ZBV()])
def test_boxes_of_the_svg_are_where_the_actions_are(schedule):
    durations = {"forward": 1.5, "backward": 3.0, "send": 0.25}
    timeline = schedule.table(2, 4).timeline(**durations)
    root = ElementTree.fromstring(schedule.visualize(2, 4, "svg", **durations))
    boxes = {}
    for group in root.iter(f"{SVG}g"):
        title, box = group.find(f"{SVG}title").text, group.find(f"{SVG}rect")
        boxes[title.partition(":")[0]] = {key: float(box.get(key)) for key in ("x", "y", "width", "height")}
    spans = [(rank, span) for rank, row in enumerate(timeline.spans) for span in row]
    assert set(boxes) == {str(span.action) for _, span in spans}
    left = min(box["x"] for box in boxes.values())
    scale = (max(box["x"] + box["width"] for box in boxes.values()) - left) / timeline.makespan
    for rank, (action, start, end) in spans:
        box = boxes[str(action)]
        assert box["x"] - left == pytest.approx(start * scale, abs=0.02)
        assert box["width"] == pytest.approx((end - start) * scale, abs=0.02)
        assert box["y"] == boxes[str(timeline.spans[0][0].action)]["y"] + rank * 30
    said = [text.text for text in root.iter(f"{SVG}text")]
    assert f"takes {timeline.makespan:g}, bubble {timeline.bubble:.1%}" in said
    assert f"{schedule.name}: 2 ranks, 4 microbatches" in said


def test_titles_are_escaped():
    root = ElementTree.fromstring(GPipe().table(1, 1).visualize("svg", title="<a> & b"))
    assert "<a> & b: 1 ranks, 1 microbatches" in [text.text for text in root.iter(f"{SVG}text")]


def test_text_of_many_microbatches_has_no_numbers_and_still_shows_what_is_idle():
    rows = OneFOneB().visualize(2, 2000).splitlines()[1:3]
    first, second = (row.partition("|")[2].rpartition("|")[0] for row in rows)
    assert len(first) == len(second) == 2000
    assert set(first) <= set("FB ")
    assert (first + second).count(" ") <= 8
    assert 600 < second.count("F") < 734


@pytest.mark.parametrize("format", ["text", "svg"])
@pytest.mark.parametrize("durations", [{"forward": 0.0, "backward": 0.0}, {"forward": 1e-6, "backward": 5e3}])
def test_durations_of_any_size(format, durations):
    assert len(OneFOneB().visualize(2, 2, format, **durations)) < 20_000


def test_formats_that_are_none():
    with pytest.raises(px.errors.InputError, match="unknown format"):
        GPipe().visualize(2, 2, "png")
