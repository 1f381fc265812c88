"""`plot_loss`: a run's loss as a picture, from its `metrics.jsonl`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptrainx.core.errors import BackendError, DataError
from ptrainx.observe.metrics import read_metrics

__all__ = ["plot_loss"]

# Losses near the start are so large that they would press the rest of the curve flat.
_STEEP_PART = 0.03


def plot_loss(
    metrics: str | os.PathLike, out: str | os.PathLike | None = None, *, unit: str = "", title: str | None = None
) -> Path:
    """Draws training loss (every step, and smoothed) and validation loss against the step.

    Args:
        metrics: a file that `MetricsWriter` wrote; records with `step` and `loss`, some with `val_loss`.
        out: the picture, with a suffix that matplotlib knows; by default `loss.png` beside the metrics.
        unit: of the loss, such as "nats a byte".
        title: by default the name of the metrics' folder.

    Returns:
        the picture's path.

    Raises:
        BackendError: matplotlib is not installed.
        DataError: the file is missing or malformed, or no record has a loss.
    """
    figure_class, canvas_class = _matplotlib()
    records = [r for r in read_metrics(metrics) if "step" in r]
    trained = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    scored = [(r["step"], r["val_loss"]) for r in records if r.get("val_loss") is not None]
    if not trained and not scored:
        raise DataError(f"no record of {metrics} has a loss", fix='write records with "step" and "loss"')
    figure = figure_class(figsize=(7, 4.2), layout="constrained")
    canvas_class(figure)
    axes = figure.add_subplot()
    if trained:
        steps, losses = zip(*trained)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
        axes.plot(steps, smoothed(losses), color="tab:blue", linewidth=1.8, label="training, smoothed")
        axes.set_ylim(_limits([*losses, *(value for _, value in scored)]))
    if scored:
        steps, losses = zip(*scored)
        axes.plot(steps, losses, "o-", color="tab:orange", label=f"held out (last: {losses[-1]:.3f})", zorder=3)
    axes.set(
        xlabel="step", ylabel=f"loss, {unit}" if unit else "loss", title=title or Path(metrics).resolve().parent.name
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path = Path(metrics).with_name("loss.png") if out is None else Path(out)
    figure.savefig(path, dpi=150)
    return path


def smoothed(values: Sequence[float], reach: int | None = None) -> list[float]:
    """A centred moving average, which does not lag behind the series; at the ends, over what there is.

    Args:
        values: a series.
        reach: how many values on either side count; by default a fiftieth of the series.

    >>> smoothed([1.0, 2.0, 6.0, 1.0], reach=1)
    [1.5, 3.0, 3.0, 3.5]
    """
    reach = len(values) // 50 if reach is None else reach
    sums = [0.0, *itertools.accumulate(values)]
    spans = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in spans]


def _limits(losses: Sequence[float]) -> tuple[float, float] | None:
    """Where the axis begins and ends: around all but the steep first part; None to leave it to matplotlib."""
    if len(losses) < 30:
        return None
    calm = losses[int(len(losses) * _STEEP_PART) :]
    margin = 0.05 * (max(calm) - min(calm) or 1.0)
    return min(calm) - margin, max(calm) + margin


def _matplotlib() -> tuple[Any, Any]:
    """Its figure and its canvas for files, which need no display and leave a notebook's own settings alone."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "plot_loss needs matplotlib, which is not installed", fix="pip install 'ptrainx[plot]'"
        ) from error
    return Figure, FigureCanvasAgg
