"""A timeline as an SVG document: a row a rank, a box an action.

In: when every action runs. Out: SVG, which stands alone.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from ptrainx.ops.schedules.clock import Span, Timeline
from ptrainx.ops.schedules.draw_text import NAMES, chunk_letter, summary

__all__ = ["draw_svg"]

# The first stage of a rank, and its later ones, lighter; all light enough for black text.
COLORS = {
    "F": ("#7fb2e5", "#b9d6f2"),
    "B": ("#f2a65a", "#f9d3ab"),
    "I": ("#6fc28b", "#b5e0c3"),
    "W": ("#c79be0", "#e2cdf0"),
}
WIDTH, ROW, LEFT, RIGHT, TOP = 900, 30, 56, 190, 34  # pixels: of the drawing, of a row, beside and above the rows


def draw_svg(timeline: Timeline, rank_of_stage: Sequence[int], heading: str) -> str:
    """The document. A box tells its action, start and end when pointed at."""
    rows = len(timeline.spans)
    bottom = TOP + rows * ROW
    height = bottom + 30 + 17 * (1 + len(summary(timeline)))
    whole = LEFT + WIDTH + RIGHT
    scale = WIDTH / timeline.makespan if timeline.makespan else 0.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{height}" viewBox="0 0 {whole} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{whole}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 20, heading, "font-size:14px;font-weight:bold"),
    ]
    for rank, (spans, bubble, stored) in enumerate(zip(timeline.spans, timeline.bubbles, timeline.peak_activations)):
        top = TOP + rank * ROW
        parts.append(_text(8, top + ROW / 2 + 4, f"rank {rank}"))
        parts.append(f'<rect x="{LEFT}" y="{top + 2}" width="{WIDTH}" height="{ROW - 4}" fill="#eeeeee"/>')
        parts.extend(_box(span, rank_of_stage, top, scale) for span in spans)
        parts.append(_text(LEFT + WIDTH + 8, top + ROW / 2 + 4, f"idle {bubble:.1%}, stores {stored}"))
    parts.extend(_axis(timeline.makespan, bottom, scale))
    parts.extend(_key(timeline, rank_of_stage, bottom + 36))
    for line, text in enumerate(summary(timeline)):
        parts.append(_text(LEFT, bottom + 60 + 17 * line, text))
    return "\n".join([*parts, "</svg>", ""])


def _box(span: Span, rank_of_stage: Sequence[int], top: float, scale: float) -> str:
    action, start, end = span
    letter = chunk_letter(action.stage, rank_of_stage)
    color = COLORS[action.kind][letter not in ("", "a")]
    x, width, label = LEFT + start * scale, (end - start) * scale, f"{action.microbatch}{letter}"
    size = min(12.0, 1.5 * width / max(len(label), 1))
    text = (
        f'<text x="{x + width / 2:.2f}" y="{top + ROW / 2 + size / 3:.2f}" text-anchor="middle" '
        f'font-size="{size:.1f}">{label}</text>'
        if size >= 5
        else ""
    )
    return (
        f"<g><title>{action}: {start:g} to {end:g}</title>"
        f'<rect x="{x:.2f}" y="{top + 2}" width="{width:.2f}" height="{ROW - 4}" fill="{color}" stroke="#ffffff" '
        f'stroke-width="{min(1.0, width / 8):.2f}"/>{text}</g>'
    )


def _axis(makespan: float, y: float, scale: float) -> list[str]:
    step = 10.0 ** math.floor(math.log10(makespan)) if makespan else 1.0
    step *= next(part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if makespan <= 10 * part * step)
    ticks = [i * step for i in range(round(makespan // step) + 1)]
    return [_text(LEFT + at * scale, y + 14, f"{at:.4g}", "fill:#666666;text-anchor:middle") for at in ticks]


def _key(timeline: Timeline, rank_of_stage: Sequence[int], y: float) -> list[str]:
    present = {span.action.kind for had in timeline.spans for span in had}
    parts, x = [], float(LEFT)
    for kind, name in NAMES.items():
        if kind in present:
            parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLORS[kind][0]}"/>')
            parts.append(_text(x + 17, y, f"{kind} {name}"))
            x += 45 + 6.5 * len(name)
    chunks = len(rank_of_stage) // len(timeline.spans)
    if chunks > 1:
        parts.append(_text(x, y, f"a to {chr(ord('a') + chunks - 1)}: a rank's stages, in order; lighter from b on"))
    return parts


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}">{html.escape(text)}</text>'
