"""Colours of the curves in benchmark plots, and helpers for plots over sequence length."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from io import BytesIO
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Drawn = TypeVar("Drawn")

COLOURS: dict[str, str] = {
    "plain": "#8a909c",
    "checkpoint": "#e4572e",
    "checkpoint-offload": "#f0a202",
    "deepspeed-tiled": "#8d5ab5",
    "liger-loss": "#3a9d5d",
    "liger-loss-offload": "#9bc53d",
    "liger": "#1f6b3b",
    "trl": "#c2678d",
    "unsloth": "#8a6d3b",
    "stream": "#2f6fde",
    "stream-keep-attention": "#12305f",
}


INK = "#1f2430"


def with_default_style(draw: Callable[Given, Drawn]) -> Callable[Given, Drawn]:
    """Decorate a drawing function to use matplotlib's default settings; other settings are restored after each call.

    matplotlib reads a ``matplotlibrc`` in the working directory, which may be untrusted: ``text.usetex`` would run
    LaTeX.
    """

    @wraps(draw)
    def draw_with_defaults(*args: Given.args, **options: Given.kwargs) -> Drawn:
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            return draw(*args, **options)

    return draw_with_defaults


def to_png(figure: Any, title: str) -> bytes:
    """Add a title to a matplotlib figure, and return the figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    FigureCanvasAgg(figure).print_png(picture := BytesIO())
    return picture.getvalue()


def draw_line(axes: Any, points: list[tuple[int, float | None]], style: dict[str, Any]) -> None:
    """Plot a line through the points (length, value); points without a value are left out."""
    if measured := [(x, y) for x, y in points if y]:
        axes.plot(*zip(*measured, strict=True), **style)


def style_axes(axes: Any, title: str) -> None:
    """Set title, logarithmic axes and ticks of a plot over sequence length."""
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
