"""Draw SVG charts of metrics over training steps and of memory use, readable in print and without colour."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
PARTS = 220
"""Number of intervals into which a long curve is split; at most four points of each interval are drawn."""
STYLES = 6
"""Number of line styles, CSS classes ``s0`` to ``s5``; they differ in dashes and colour."""
GIB = 1024**3

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A labelled curve of a line chart."""

    name: str
    points: Points
    """(step, value) pairs, sorted by step."""
    style: int
    """Index of the line style, modulo :data:`STYLES`."""
    marked: bool = False
    """True to draw a marker at each point."""


def downsample(points: Points, intervals: int = PARTS) -> list[tuple[float, float]]:
    """Return the first, lowest, highest and last point of each of ``intervals`` intervals of a curve.

    A curve of at most ``4 * intervals`` points is returned unchanged.
    """
    if len(points) <= 4 * intervals:
        return list(points)
    kept: list[tuple[float, float]] = []
    for part in range(intervals):
        some = range(len(points) * part // intervals, len(points) * (part + 1) // intervals)
        low = min(some, key=lambda index: points[index][1])
        high = max(some, key=lambda index: points[index][1])
        kept += [points[index] for index in sorted({some[0], low, high, some[-1]})]
    return kept


def line_chart(title: str, curves: Sequence[Curve], *, unit: str = "", from_zero: bool = False) -> str:
    """Return an HTML ``<figure>`` with a line chart over training steps; an empty string if no curve has a point.

    Args:
        unit: Unit of the values, shown beside the title.
        from_zero: True to start the vertical axis at 0.
    """
    curves = [
        Curve(curve.name, downsample(curve.points), curve.style, curve.marked) for curve in curves if curve.points
    ]
    if not curves:
        return ""
    steps = [x for curve in curves for x, _ in curve.points]
    values = [y for curve in curves for _, y in curve.points]
    x_ticks = axis_ticks(min(steps), max(steps), 6, whole_numbers=True)
    y_ticks = axis_ticks(min(0.0, *values) if from_zero else min(values), max(values), 5)
    x_low, x_high = min(steps), max(max(steps), min(steps) + 1)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def at_x(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in x_ticks:
        if x_low <= tick <= x_high:
            x = at_x(tick)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{show_number(tick)}</text>'
            )
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>')
    for curve in curves:
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in curve.points)
        style = f"s{curve.style % STYLES}"
        if len(curve.points) > 1:
            parts.append(f'<polyline class="curve {style}" points="{path}"/>')
        if curve.marked or len(curve.points) == 1:
            parts += [
                f'<circle class="mark {style}" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3.2"/>' for x, y in curve.points
            ]
    data = {
        "box": [LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM, x_low, x_high, y_low, y_high],
        "curves": [
            {"name": curve.name, "points": [[round_to_six_digits(x), round_to_six_digits(y)] for x, y in curve.points]}
            for curve in curves
        ],
    }
    ranges = (f"{c.name} from {show_number(c.points[0][1])} to {show_number(c.points[-1][1])}" for c in curves)
    label = escape(f"{title}: {', '.join(ranges)}")
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 26 10"><line class="curve s{c.style % STYLES}" x1="1" x2="25" y1="5" '
        f'y2="5"/></svg>{escape(c.name)} <b>{show_number(c.points[-1][1])}</b></li>'
        for c in curves
    )
    units = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f"<figure data-chart='{escape(json.dumps(data, separators=(',', ':')))}'>"
        f"<figcaption>{escape(title)}{units}</figcaption>{drawing}<ul class=legend>{legend}</ul></figure>"
    )


def memory_chart(
    predicted_terms: Mapping[str, float],
    peak_bytes: float | None,
    available_bytes: float | None,
    *,
    is_whole_process: bool = False,
) -> str:
    """Return an HTML ``<figure>`` with two bars: predicted memory, split by category, and the measured peak.

    Args:
        predicted_terms: Predicted bytes at the peak of a step, by category such as ``weights``.
        peak_bytes: Highest measured peak in bytes; None without a measurement.
        available_bytes: Memory of the device in bytes; None if unknown.
        is_whole_process: True if the measured peak is the memory of the whole process, libraries included (on a CPU).
    """
    shown = sorted(((name, size) for name, size in predicted_terms.items() if size > 0), key=lambda item: -item[1])
    predicted = sum(size for _, size in shown)
    longest = max(predicted, peak_bytes or 0.0)
    if longest <= 0:
        return ""
    scale = (WIDTH - 8) / longest
    parts, x = [], 4.0
    for index, (name, size) in enumerate(shown):
        wide = size * scale
        text = escape(f"{name}: {show_gib(size)}")
        parts.append(
            f'<rect class="block b{index % STYLES}" x="{x:.1f}" y="22" width="{max(wide, 0.5):.1f}" height="30">'
            f"<title>{text}</title></rect>"
        )
        if wide > 7.2 * len(name) + 8:
            parts.append(
                f'<text class="inside" x="{x + wide / 2:.1f}" y="41" text-anchor="middle">{escape(name)}</text>'
            )
        x += wide
    parts.append(f'<text class="tick" x="4" y="15">predicted, {show_gib(predicted)}</text>')
    if peak_bytes:
        what = "measured peak of the process, libraries included" if is_whole_process else "measured peak"
        parts.append(f'<text class="tick" x="4" y="74">{what}, {show_gib(peak_bytes)}</text>')
        parts.append(f'<rect class="block measured" x="4" y="80" width="{peak_bytes * scale:.1f}" height="18"/>')
    of = f" <small>of {show_gib(available_bytes)} device memory</small>" if available_bytes else ""
    rows = "".join(f"<tr><td>{escape(name)}</td><td class=n>{show_gib(size)}</td></tr>" for name, size in shown)
    return (
        f"<figure><figcaption>Memory at the peak of a step{of}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {106 if peak_bytes else 60}" role="img" '
        f'aria-label="predicted {show_gib(predicted)}">'
        f"{''.join(parts)}</svg><table>{rows}</table></figure>"
    )


def axis_ticks(low: float, high: float, count: int, *, whole_numbers: bool = False) -> list[float]:
    """Return about ``count`` round numbers, as axis ticks that cover the range from ``low`` to ``high``."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # equal up to rounding, which ticks could not tell apart
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if whole_numbers:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return the labels of an axis, with as many digits as tell its ticks apart."""
    labels = [show_number(tick) for tick in ticks]
    if len(set(labels)) == len(labels):
        return labels
    digits = 1 - math.floor(math.log10(ticks[1] - ticks[0]))
    return [f"{tick:,.{max(0, digits)}f}" for tick in ticks]


def show_number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def round_to_six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def show_gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"
