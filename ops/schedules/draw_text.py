"""A timeline for the terminal: a line a rank, time from left to right.

In: when every action runs. Out: text.
"""

from __future__ import annotations

from collections.abc import Sequence

from ptrainx.ops.schedules.clock import Span, Timeline

__all__ = ["chunk_letter", "draw_text", "legend", "summary"]

NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights"}
MOST_COLUMNS = 2000


def draw_text(timeline: Timeline, rank_of_stage: Sequence[int], heading: str) -> str:
    """A line a rank: `F0` where the forward of microbatch 0 starts, `F0b` on a rank's second stage; spaces are idle."""
    spans = [span for had in timeline.spans for span in had]
    labels = {span.action: span.action.kind + _number(span, rank_of_stage) for span in spans}
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    columns = max(map(len, labels.values()), default=1) + 1
    scale = min(columns / shortest, MOST_COLUMNS / max(timeline.makespan, shortest))
    names = [f"rank {rank}" for rank in range(len(timeline.spans))]
    width = round(timeline.makespan * scale)
    lines = []
    for name, had, bubble in zip(names, timeline.spans, timeline.bubbles):
        line = [" "] * width
        for span in had:
            start, end = round(span.start * scale), round(span.end * scale)
            line[start:end] = _cell(labels[span.action], end - start)
        lines.append(f"{name:<{len(names[-1])}} |{''.join(line)}| idle {bubble:.1%}")
    return "\n".join([heading, *lines, *legend(timeline, rank_of_stage), *summary(timeline)])


def chunk_letter(stage: int, rank_of_stage: Sequence[int]) -> str:
    """Which of its rank's stages a stage is: a, b, ...; nothing where ranks have one."""
    own = [other for other, rank in enumerate(rank_of_stage) if rank == rank_of_stage[stage]]
    return "" if len(own) == 1 else chr(ord("a") + own.index(stage) % 26)


def legend(timeline: Timeline, rank_of_stage: Sequence[int]) -> list[str]:
    """What the letters stand for."""
    present = {span.action.kind for had in timeline.spans for span in had}
    kinds = ", ".join(f"{kind} {name}" for kind, name in NAMES.items() if kind in present)
    chunks = len(rank_of_stage) // len(timeline.spans)
    stages = [f"a to {chr(ord('a') + chunks - 1)}: a rank's stages, in order"] if chunks > 1 else []
    return ["; ".join([kinds, "the number is the microbatch", *stages])]


def summary(timeline: Timeline) -> list[str]:
    """Makespan, bubble and what is stored."""
    stored = " ".join(map(str, timeline.peak_activations))
    lines = [f"takes {timeline.makespan:g}, bubble {timeline.bubble:.1%}", f"activations stored, by rank: {stored}"]
    if any(timeline.peak_pending):
        lines.append(f"weight gradients that wait, by rank: {' '.join(map(str, timeline.peak_pending))}")
    return lines


def _cell(label: str, columns: int) -> str:
    """A label in so many columns, with a gap after it; where it does not fit, its first letter throughout."""
    if columns < len(label):
        return label[0] * columns
    return label if columns == len(label) else f"{label:-<{columns - 1}} "


def _number(span: Span, rank_of_stage: Sequence[int]) -> str:
    return f"{span.action.microbatch}{chunk_letter(span.action.stage, rank_of_stage)}"
