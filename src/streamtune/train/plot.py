"""``loss.png``: the loss over the steps, as a picture one can show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_loss", "smooth"]

INK, MUTED, TRAIN, HELD_OUT = "#1f2430", "#8a909c", "#2f6fde", "#e4572e"


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Exponential moving average over about ``window`` values, without a bias towards the start."""
    decay = 1.0 - 1.0 / max(window, 1.0)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1.0
        smoothed.append(total / weight)
    return smoothed


def draw_loss(records: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw the training loss, its smoothed course and the held-out loss.

    Args:
        records: Lines of ``metrics.jsonl``.
        path: The PNG; replaced at once, so a viewer never sees half a picture.
        title: Name of the run.
    """
    # Slow to import, and only needed here. Figures made without pyplot need no display and leave nothing behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    train = [(record["step"], record["loss"]) for record in records if "loss" in record]
    held_out = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
    if not train:
        return
    steps, losses = [step for step, _ in train], [loss for _, loss in train]
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color=TRAIN, alpha=0.25, linewidth=1)
    course = smooth(losses, window=len(losses) / 20)
    axes.plot(steps, course, color=TRAIN, linewidth=2.2, label=f"training (smoothed)  {course[-1]:.3f}")
    if held_out:
        axes.plot(
            [step for step, _ in held_out],
            [loss for _, loss in held_out],
            color=HELD_OUT,
            marker="o",
            markersize=6,
            markeredgecolor="white",
            linewidth=1.4,
            label=f"held out  {held_out[-1][1]:.3f}",
        )
    axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=12)
    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel("loss per trained token (nats)", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)
    axes.margins(x=0.02)
    axes.grid(axis="y", color=MUTED, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK)
    axes.legend(frameon=False, labelcolor=INK)
    staged = path.with_name(f".tmp-{path.name}")
    FigureCanvasAgg(figure).print_png(staged)
    staged.replace(path)
