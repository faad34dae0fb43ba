"""Draw the plots of ``streamtune bench``: memory and step time by sequence length, and a plot of each named table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from streamtune.base.palette import COLOURS, INK, draw_line, style_axes, to_png, with_default_style
from streamtune.plan.simulate.workload import LABELS
from streamtune.programs.bench.bench import BenchReport, BenchRow
from streamtune.programs.bench.subject import Layout
from streamtune.programs.bench.table_rows import TableReport, TableRow

TERMS = {
    "weights": "#c3c8d1",
    "gradients": "#8a909c",
    "optimizer": "#5d6470",
    "layer inputs": "#e4572e",
    "keys and values": "#f0a202",
    "attention outputs": "#3a9d5d",
    "activations": "#2f6fde",
    "head": "#8d5ab5",
}
"""Colours of the parts of peak memory, in stacking order."""

OFFLOAD_COLOURS = {"on host": "#7fb4ff", "on disk": "#b9a3e3"}


LAYOUT_STYLES: dict[Layout, dict[str, Any]] = {
    "row": {"marker": "o", "linestyle": "-"},
    "packed": {"marker": "s", "linestyle": "--", "markersize": 10, "markerfacecolor": "none", "markeredgewidth": 2},
    "separate": {"marker": "x", "linestyle": ":", "markersize": 8, "markeredgewidth": 2},
}
"""Marker and line style of each layout; packed and separate rows take about the same time, so both must be visible."""


@with_default_style
def draw_bench(report: BenchReport, *, title: str) -> bytes:
    """Return a PNG with activation memory and step time by sequence length."""
    from matplotlib.figure import Figure  # slow to import; without pyplot it needs no display

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    for mode, layout in dict.fromkeys((row.mode, row.layout) for row in report.rows):
        rows = [row for row in report.rows if (row.mode, row.layout) == (mode, layout)]
        style = {"color": COLOURS[mode], "linewidth": 2.2, "label": LABELS[mode], **LAYOUT_STYLES[layout]}
        if report.packed_rows:
            tokens = {"row": "one row", "packed": "packed rows", "separate": "rows apart"}[layout]
            style["label"] += f", {tokens if layout == 'row' else f'{report.packed_rows} {tokens}'}"
        draw_line(memory, [(row.length, row.activation_bytes and row.activation_bytes / 2**20) for row in rows], style)
        draw_line(seconds, [(row.length, _step_seconds(row)) for row in rows], style)
    style_axes(memory, "Activation memory of a step (MiB)")
    style_axes(seconds, "Forward and backward of a step (s)")
    memory.legend(frameon=False, labelcolor=INK, loc="best")
    return to_png(figure, title)


def _step_seconds(row: BenchRow) -> float | None:
    return None if row.forward_s is None or row.backward_s is None else row.forward_s + row.backward_s


def draw_time(report: TableReport, figure: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    seconds, ratio = figure.subplots(1, 2)
    for rows, style in _mode_curves(report):
        draw_line(seconds, [(row.length, row.step_s) for row in rows], style)
        draw_line(ratio, [(row.length, row.to_checkpoint) for row in rows], style)
    style_axes(seconds, "Forward and backward (s)")
    style_axes(ratio, "Time relative to gradient checkpointing")
    known = [row.to_checkpoint for row in report.rows if row.to_checkpoint is not None]
    ratio.set_yscale("linear")
    ratio.yaxis.set_major_locator(MaxNLocator(8))
    ratio.yaxis.set_major_formatter("{x:g}x")
    ratio.set_ylim(0.95 * min(known, default=1), 1.05 * max(known, default=1))
    seconds.legend(frameon=False, labelcolor=INK, fontsize=8)


def draw_memory(report: TableReport, figure: Any) -> None:
    over, parts = figure.subplots(1, 2)
    name, unit = report.unit
    for rows, style in _mode_curves(report):
        draw_line(over, [(row.length, row.peak_bytes and row.peak_bytes / unit) for row in rows], style)
    style_axes(over, f"Peak device memory of a step ({name})")
    over.legend(frameon=False, labelcolor=INK, fontsize=8)
    longest = max((row.length for row in report.rows), default=0)
    _draw_stacked_bars(parts, [row for row in report.rows if row.length == longest], unit)
    parts.set_title(f"Peak memory by part, at {longest:,} tokens ({name})", loc="left", color=INK, fontsize=11)
    parts.legend(frameon=False, labelcolor=INK, fontsize=8, loc="lower right")


def draw_ablation(report: TableReport, figure: Any) -> None:
    """Draw the step time of each schedule relative to gradient checkpointing, and the parts of its peak memory."""
    rows = report.rows
    figure.set_size_inches(11, 1.6 + 0.27 * (len(rows) + len({row.section for row in rows})))
    time, places = _draw_memory_beside_times(report, rows, figure)
    for place, row in zip(places, rows, strict=True):
        _write_ratio(time, place, row)
    for row in rows:
        if row.to_checkpoint is not None and (row.mode == "checkpoint" or row.to_default == 1):
            time.axvline(row.to_checkpoint, color=COLOURS[row.mode], linewidth=1, alpha=0.6, zorder=0)
    time.margins(x=0.15)
    lengths = ", ".join(f"{length:,}" for length in sorted({row.length for row in rows}))
    time.set_title(f"Time of a step of {lengths} tokens", loc="left", color=INK, fontsize=11)
    time.set_xlabel("gradient checkpointing = 1", color=INK, fontsize=9)


def _write_ratio(axes: Any, position: float, row: TableRow) -> None:
    ratio, colour = row.to_checkpoint, COLOURS[row.mode]
    style = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": INK}
    if ratio is None:
        axes.annotate(row.error.partition("\n")[0][:60], (1, position), (5, 0), **style)
        return
    axes.plot([1, ratio], [position, position], color="#d5d9e0", linewidth=2, zorder=1)
    axes.plot(ratio, position, "o", color=colour, zorder=2)
    left = ratio < 1
    axes.annotate(f"{ratio:.2f}", (ratio, position), (-7 if left else 7, 0), ha="right" if left else "left", **style)


def draw_longest(report: TableReport, figure: Any) -> None:
    rows = [row for row in report.rows if row.max_length]
    axes = figure.subplots()
    bars = axes.barh(range(len(rows)), [row.max_length for row in rows], color=[COLOURS[row.mode] for row in rows])
    axes.bar_label(bars, [f"{row.max_length:,}" for row in rows], padding=4, color=INK)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(f"Longest row that fits {report.asked['budget']}, in tokens", loc="left", color=INK, fontsize=11)
    _hide_frame(axes)


def draw_sharing(report: TableReport, figure: Any) -> None:
    """Draw step time and the parts of peak memory for each layout and prompt length.

    Times are relative to the layout ``batch``: all rows in one batch.
    """
    rows = [
        replace(
            row,
            section=f"prompt of {row.length:,} tokens",
            label=f"checkpointed, {row.label}" if row.mode == "checkpoint" else row.label,
        )
        for row in report.rows
    ]
    figure.set_size_inches(11, 1.8 + 0.4 * (len(rows) + len({row.section for row in rows})))
    time, places = _draw_memory_beside_times(report, rows, figure)
    for place, row in zip(places, rows, strict=True):
        if row.to_default is not None:
            time.barh(place, row.to_default, color=COLOURS[row.mode], height=0.6)
            time.annotate(
                f"{row.to_default:.2f}",
                (row.to_default, place),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=INK,
            )
    time.margins(x=0.12)
    time.set_title("Time of a step", loc="left", color=INK, fontsize=11)
    time.set_xlabel("all rows in one batch = 1", color=INK, fontsize=9)


def _draw_memory_beside_times(report: TableReport, rows: Sequence[TableRow], figure: Any) -> tuple[Any, list[float]]:
    """Draw each row's memory on the right axes; return the left axes, for times, and the rows' y positions."""
    time, memory = figure.subplots(1, 2, sharey=True)
    places = _draw_stacked_bars(memory, rows, report.unit[1], time)
    memory.set_title("Memory at its peak", loc="left", color=INK, fontsize=11)
    memory.set_xlabel(report.unit[0], color=INK, fontsize=9)
    shown = memory.get_legend_handles_labels()
    figure.legend(*shown, loc="outside lower right", ncols=4, frameon=False, labelcolor=INK, fontsize=8)
    _hide_frame(time)
    return time, places


def _mode_curves(report: TableReport) -> list[tuple[list[TableRow], dict[str, Any]]]:
    found = []
    for mode, label in dict.fromkeys((row.mode, row.label) for row in report.rows):
        style = {"color": COLOURS[mode], "marker": "o", "linewidth": 2.2, "label": label}
        found.append(([row for row in report.rows if row.mode == mode], style))
    return found


def _draw_stacked_bars(axes: Any, rows: Sequence[TableRow], unit: int, labelled: Any = None) -> list[float]:
    """Draw a stacked bar of bytes for each row, under section headings; return the y position of each row.

    Args:
        unit: Number of bytes in one unit of the x axis.
        labelled: Axes whose y axis shows the row names; None: ``axes``.
    """
    places: list[float] = []
    labels: dict[float, str] = {}
    place, section = -1.0, ""
    for row in rows:
        place += 1
        if row.section != section:
            section = row.section
            labels[place] = section
            place += 1
        places.append(place)
        labels[place] = row.label if row.section else textwrap.fill(row.label, 24)
    parts = [{**row.terms, "on host": row.host_bytes or 0, "on disk": row.disk_bytes or 0} for row in rows]
    left = [0.0] * len(rows)
    others = {name: "#2b303b" for part in parts for name in part if name not in TERMS | OFFLOAD_COLOURS}
    for name, colour in (TERMS | others | OFFLOAD_COLOURS).items():
        widths = [part.get(name, 0) / unit for part in parts]
        if any(widths):
            axes.barh(places, widths, left=left, color=colour, label=name, height=0.72)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    named = labelled or axes
    named.set_yticks(list(labels), list(labels.values()), fontsize=9)
    for tick in named.yaxis.get_major_ticks():
        if tick.get_loc() not in places:
            tick.label1.set_fontweight("bold")
    axes.set_ylim(place + 0.8, -0.8)
    _hide_frame(axes)
    return places


def _hide_frame(axes: Any) -> None:
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
