"""``loss.png``: the loss over the steps, and what else an objective measures, as a picture one can show."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from streamtune.secrets import plain
from streamtune.train.records import read_records
from streamtune.train.rundir import RunDirectory
from streamtune.train.staging import replace_file

__all__ = ["LossPlot", "draw_loss", "smooth"]

INK, MUTED, TRAIN, HELD_OUT = "#1f2430", "#8a909c", "#2f6fde", "#e4572e"
OTHER_TRAIN, OTHER_HELD_OUT = "#7a5cc9", "#c98a1b"

Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class _Panel:
    """One set of axes, drawn where a run has the first of its metrics."""

    label: str
    """Of the vertical axis."""
    metrics: tuple[str, ...]
    """One curve each, or two where some of it is held out; two metrics at most."""
    names: tuple[str, ...] = ("",)
    """Prefix of each one's labels in the legend."""
    limits: tuple[float, float] | None = None


PANELS = (
    _Panel("accuracy", ("rewards/accuracies",), limits=(-0.03, 1.03)),
    _Panel("reward", ("rewards/chosen", "rewards/rejected"), ("chosen, ", "rejected, ")),
    _Panel("mean reward", ("reward",)),
    _Panel("tokens per completion", ("completions/mean_length",)),
)
"""Panels below the loss, from the metrics of an objective."""


@dataclass
class LossPlot:
    """Keeps the picture of a run up to date, without taking more than a fiftieth of its time."""

    run: RunDirectory
    _next: float = field(default=0.0, init=False)

    def draw(self, *, last: bool = False) -> None:
        """Draw it anew, unless that was done a short while ago and this is not the ``last`` time."""
        began = time.monotonic()
        if began < self._next and not last:
            return
        with suppress(OSError):  # a picture is not worth a run; what it shows is in metrics.jsonl
            draw_loss(read_records(self.run.metrics), self.run.loss_plot, title=self.run.path.name)
        now = time.monotonic()
        self._next = now + 50 * (now - began)


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Return the exponential moving average over about ``window`` values, without a bias towards the start."""
    decay = 1.0 - 1.0 / max(window, 1.0)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1.0
        smoothed.append(total / weight)
    return smoothed


def draw_loss(records: Records, path: Path, *, title: str) -> None:
    """Draw the training loss, its smoothed course and the held-out loss; below them the metrics of :data:`PANELS`.

    Args:
        records: Lines of ``metrics.jsonl``.
        path: The PNG; replaced at once, so a viewer never sees half a picture.
        title: Name of the run.
    """
    # Slow to import, and only needed here. Figures made without pyplot need no display and leave nothing behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not any("loss" in record for record in records):
        return
    panels = [panel for panel in PANELS if any(panel.metrics[0] in record for record in records)]
    loss = _Panel("loss" if panels else "loss per trained token (nats)", ("loss",))
    ratios = [1.6] + [1.0] * len(panels)
    figure = Figure(figsize=(9, 5 + 2.6 * len(panels)), dpi=150, layout="constrained")
    grid = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, panel in zip(grid, [loss, *panels], strict=True):
        _draw_panel(axes, panel, records)
    # A name is no formula: `$` is shown as it is.
    grid[0].set_title(plain(title), loc="left", parse_math=False, color=INK, fontsize=13, fontweight="bold", pad=12)
    grid[-1].set_xlabel("optimizer step", color=INK)
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[-1].set_xlim(left=0)
    picture = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in letters that the font lacks
        FigureCanvasAgg(figure).print_png(picture)
    replace_file(path, picture.getvalue(), durably=False)


def _draw_panel(axes: Any, panel: _Panel, records: Records) -> None:
    """Draw each metric of a panel over the steps: as measured, smoothed, and held out."""
    colours = ((TRAIN, HELD_OUT), (OTHER_TRAIN, OTHER_HELD_OUT))
    for metric, name, (colour, other) in zip(panel.metrics, panel.names, colours, strict=False):
        steps, values = _course(records, metric)
        if not steps:
            continue
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        smoothed = smooth(values, window=len(values) / 20)
        axes.plot(steps, smoothed, color=colour, linewidth=2.2, label=f"{name}training (smoothed)  {smoothed[-1]:.3f}")
        steps, values = _course(records, f"eval_{metric}")
        if steps:
            shape = {"marker": "o", "markersize": 6, "markeredgecolor": "white", "linewidth": 1.4}
            axes.plot(steps, values, color=other, label=f"{name}held out  {values[-1]:.3f}", **shape)
    axes.set_ylabel(panel.label, color=INK)
    axes.margins(x=0.02)
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.grid(axis="y", color=MUTED, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK)
    # Four curves leave no corner free.
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 2} if len(panel.metrics) > 1 else {}
    axes.legend(frameon=False, labelcolor=INK, **above)


def _course(records: Records, metric: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric."""
    found = [(record["step"], record[metric]) for record in records if metric in record]
    return [step for step, _ in found], [value for _, value in found]
