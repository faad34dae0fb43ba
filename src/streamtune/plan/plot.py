"""The picture of a benchmark: memory and time over length, one line for each mode and layout of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamtune.plan.bench import BenchReport, BenchRow, Layout
from streamtune.plan.modes import WAYS, Mode

__all__ = ["COLOURS", "INK", "NAMES", "draw_bench", "dress", "line", "save"]

COLOURS: dict[Mode, str] = {
    "plain": "#8a909c",
    "checkpoint": "#e4572e",
    "checkpoint-offload": "#f0a202",
    "deepspeed-tiled": "#8d5ab5",
    "liger-loss": "#3a9d5d",
    "stream": "#2f6fde",
    "stream-keep-attention": "#12305f",
}
NAMES: dict[Mode, str] = {mode: way.label for mode, way in WAYS.items()}
MARKS: dict[Layout, dict[str, Any]] = {
    "row": {"marker": "o", "linestyle": "-"},
    "packed": {"marker": "s", "linestyle": "--", "markersize": 10, "markerfacecolor": "none", "markeredgewidth": 2},
    "separate": {"marker": "x", "linestyle": ":", "markersize": 8, "markeredgewidth": 2},
}
"""Packed rows cost about what the same rows cost apart: both marks are to be seen where they lie on each other."""
INK = "#1f2430"


def draw_bench(report: BenchReport, path: Path, *, title: str) -> None:
    """Draw activation memory and step time against length.

    Args:
        report: The measurements.
        path: The PNG; its folder exists.
        title: What was measured.
    """
    # Slow to import, and only needed here. Figures made without pyplot need no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    for mode, layout in dict.fromkeys((row.mode, row.layout) for row in report.rows):
        rows = [row for row in report.rows if (row.mode, row.layout) == (mode, layout)]
        style = {"color": COLOURS[mode], "linewidth": 2.2, "label": NAMES[mode], **MARKS[layout]}
        if report.packed_rows:
            tokens = {"row": "one row", "packed": "packed rows", "separate": "rows apart"}[layout]
            style["label"] += f", {tokens if layout == 'row' else f'{report.packed_rows} {tokens}'}"
        line(memory, [(row.length, row.activation_bytes and row.activation_bytes / 2**20) for row in rows], style)
        line(seconds, [(row.length, _step_seconds(row)) for row in rows], style)
    dress(memory, "Activation memory of a step (MiB)")
    dress(seconds, "Forward and backward of a step (s)")
    memory.legend(frameon=False, labelcolor=INK, loc="best")
    save(figure, path, title)


def save(figure: Any, path: Path, title: str) -> None:
    """Put the title on a figure and write it as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    FigureCanvasAgg(figure).print_png(str(path))


def _step_seconds(row: BenchRow) -> float | None:
    return None if row.forward_s is None or row.backward_s is None else row.forward_s + row.backward_s


def line(axes: Any, points: list[tuple[int, float | None]], style: dict[str, Any]) -> None:
    """Draw what is known of a line."""
    known = [(x, y) for x, y in points if y]
    if known:
        axes.plot(*zip(*known, strict=True), **style)


def dress(axes: Any, title: str) -> None:
    """Name the axes of something over length, both logarithmic, with a labelled line above and below it."""
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel("tokens", color=INK)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({int(x) for line in axes.get_lines() for x in line.get_xdata()})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
    axes.minorticks_off()
    ticks = [tick for power in range(-3, 7) for tick in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)]
    lowest, highest = axes.get_ylim()
    low = max((tick for tick in ticks if tick <= lowest), default=lowest)  # out to a labelled line on either side
    high = min((tick for tick in ticks if tick >= highest), default=highest)
    axes.set_ylim(low, high)
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
