"""The plot of a probe: the largest that fits in each mode, and every trial with the bytes it took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamtune.palette import COLOURS, INK, save
from streamtune.probe.probe import ProbeReport, Trial
from streamtune.simulate.workload import LABELS

__all__ = ["draw_probe"]

GIB, MIB = 1 << 30, 1 << 20


def draw_probe(report: ProbeReport, path: Path, *, title: str) -> None:
    """Draw a bar for each mode, and device bytes over length with the budget.

    Args:
        report: The results of the probe.
        path: The PNG; its folder exists.
        title: The title of the plot.
    """
    # Slow to import, and only needed here. Figures made without pyplot need no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    bars, bytes_ = figure.subplots(1, 2)
    _draw_bars(bars, report)
    _draw_trials(bytes_, report)
    save(figure, path, title)


def _draw_bars(axes: Any, report: ProbeReport) -> None:
    """Draw the largest that fits in each mode, the shortest bar on top."""
    limits = sorted(report.limits.values(), key=lambda limit: limit.fits, reverse=True)
    names = [LABELS[limit.mode] for limit in limits]
    axes.barh(names, [limit.fits for limit in limits], color=[COLOURS[limit.mode] for limit in limits], height=0.55)
    for row, limit in enumerate(limits):
        text = f"{limit.fits:,}" if limit.complete else f"{limit.fits:,} so far"
        axes.annotate(f" {text}", (limit.fits, row), va="center", color=INK, fontsize=11, fontweight="bold")
    axes.set_xlim(0, 1.25 * max((limit.fits for limit in limits), default=1) or 1)
    axes.set_title(f"Largest that fits ({_unit(report)})", loc="left", color=INK, fontsize=11)
    _undress(axes)


def _draw_trials(axes: Any, report: ProbeReport) -> None:
    """Draw a dot for each trial that fits, a cross for each that does not, and the budget as a line."""
    budget = report.device_bytes
    largest = max([budget or 0, *(t.outcome.peak_bytes or 0 for t in report.trials)])
    unit, name = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    for mode in report.limits:
        trials = [trial for trial in report.trials if trial.shape.mode == mode]
        fitted = sorted(
            (_number(report, t), t.outcome.peak_bytes / unit) for t in trials if t.outcome.fits and t.outcome.peak_bytes
        )
        if fitted:
            axes.plot(*zip(*fitted, strict=True), color=COLOURS[mode], marker="o", linewidth=2.2, label=LABELS[mode])
        # One that was broken off had come to the budget and would have gone on: it is drawn there.
        failed = [
            (_number(report, t), min(t.outcome.peak_bytes or largest, budget or largest) / unit)
            for t in trials
            if not t.outcome.fits
        ]
        if failed:
            axes.plot(
                *zip(*failed, strict=True),
                color=COLOURS[mode],
                marker="x",
                markersize=8,
                markeredgewidth=2,
                linestyle="none",
            )
    if budget:
        axes.axhline(budget / unit, color=INK, linewidth=1.2, linestyle="--")
        axes.annotate(
            "budget",
            (0.01, budget / unit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color=INK,
        )
    axes.set_title(f"Peak on the device ({name}); x did not fit", loc="left", color=INK, fontsize=11)
    axes.set_xlabel(_unit(report), color=INK)
    axes.set_ylim(0, 1.12 * largest / unit if largest else 1)
    axes.set_xlim(left=0)
    _undress(axes)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, labelcolor=INK, loc="lower right")


def _number(report: ProbeReport, trial: Trial) -> int:
    return trial.shape.length if report.task.scaled == "length" else trial.shape.batch_size


def _unit(report: ProbeReport) -> str:
    task = report.task
    if task.scaled == "batch":
        return f"{task.unit}s of {task.fixed:,} tokens"
    if task.objective == "sft":
        return "tokens" if task.fixed == 1 else f"tokens of a row, {task.fixed:,} rows"
    return f"tokens, {task.fixed:,} {task.unit}{'s' if task.fixed > 1 else ''}"


def _undress(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.grid(alpha=0.25, axis="x")
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
