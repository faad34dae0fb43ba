"""The picture of a benchmark: memory and time over length, one line for each mode and layout of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamtune.bench.bench import BenchReport, BenchRow, Layout
from streamtune.palette import COLOURS, INK, dress, line, save
from streamtune.simulate.workload import LABELS

__all__ = ["draw_bench"]

MARKS: dict[Layout, dict[str, Any]] = {
    "row": {"marker": "o", "linestyle": "-"},
    "packed": {"marker": "s", "linestyle": "--", "markersize": 10, "markerfacecolor": "none", "markeredgewidth": 2},
    "separate": {"marker": "x", "linestyle": ":", "markersize": 8, "markeredgewidth": 2},
}
"""Packed rows cost about what the same rows cost apart: both marks are to be seen where they lie on each other."""


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
        style = {"color": COLOURS[mode], "linewidth": 2.2, "label": LABELS[mode], **MARKS[layout]}
        if report.packed_rows:
            tokens = {"row": "one row", "packed": "packed rows", "separate": "rows apart"}[layout]
            style["label"] += f", {tokens if layout == 'row' else f'{report.packed_rows} {tokens}'}"
        line(memory, [(row.length, row.activation_bytes and row.activation_bytes / 2**20) for row in rows], style)
        line(seconds, [(row.length, _step_seconds(row)) for row in rows], style)
    dress(memory, "Activation memory of a step (MiB)")
    dress(seconds, "Forward and backward of a step (s)")
    memory.legend(frameon=False, labelcolor=INK, loc="best")
    save(figure, path, title)


def _step_seconds(row: BenchRow) -> float | None:
    return None if row.forward_s is None or row.backward_s is None else row.forward_s + row.backward_s
