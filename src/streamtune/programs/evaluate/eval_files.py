"""Write ``eval.json``, a plot of the loss by position, and a heat map of the needle-in-a-haystack test.

``eval.json`` lists the files that were written with it. The next evaluation replaces these files and no others.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from streamtune.base.palette import COLOURS, INK, with_default_style
from streamtune.base.privacy import safe_text
from streamtune.errors import ArgumentError, RunError
from streamtune.train.staging import replace_file, write_text_durably

DOCUMENT, POSITIONS, NEEDLES = "eval.json", "position.png", "needle.png"
NAMES = (DOCUMENT, POSITIONS, NEEDLES)
FIX = "give another --output DIR"


def check_output_folder(folder: Path) -> None:
    """Create the output folder, and check that results can be written to it.

    Raises:
        ArgumentError: The folder is not writable, or a file of :data:`NAMES` exists that no evaluation wrote.
    """
    replaceable = _earlier_file_names(folder)
    for name in NAMES:
        path = folder / name
        if (path.exists() or path.is_symlink()) and name not in replaceable:
            raise ArgumentError(
                f"{path} exists and was not written by `streamtune eval`; it is not overwritten",
                where="--output",
                fix=FIX,
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / ".probe", b"", durably=False)
        (folder / ".probe").unlink()
    except OSError as error:
        raise ArgumentError(
            f"cannot write to {folder}: {error.strerror or error}", where="--output", fix=FIX
        ) from error


def _earlier_file_names(folder: Path) -> set[str]:
    """Return the names of the files in the folder that its ``eval.json`` lists."""
    path = folder / DOCUMENT
    if path.is_symlink():
        return set()
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name for name in NAMES if name in files and not (folder / name).is_symlink()}
    return set()


def write_results(folder: Path, results: dict[str, Any], *, title: str) -> list[Path]:
    """Write ``eval.json`` and its plots, delete outdated plots, and return the written paths.

    Args:
        folder: Folder that :func:`check_output_folder` has checked.
        results: Contents of ``eval.json``; the entry ``files`` is set.
        title: Name of the model, shown as the title of each plot.

    Raises:
        RunError: A file cannot be written.
    """
    pictures = {POSITIONS: plot_loss_by_position(results["splits"], title=title)}
    if results.get("needle") is not None:
        pictures[NEEDLES] = plot_needle_test(results["needle"], title=title)
    drawn = {name: picture for name, picture in pictures.items() if picture is not None}
    stale = _earlier_file_names(folder) - {DOCUMENT, *drawn}
    results["files"] = [DOCUMENT, *drawn]
    try:
        for name, picture in drawn.items():
            replace_file(folder / name, picture, durably=False)
        write_text_durably(folder / DOCUMENT, json.dumps(results, indent=2) + "\n")
        for name in stale:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write the result to {folder}: {error.strerror or error}", fix=FIX) from error
    return [folder / name for name in results["files"]]


# --- the pictures -----------------------------------------------------------------------------------------------------


SPLIT_STYLES: dict[str, dict[str, Any]] = {
    "held-out": {"color": COLOURS["stream"], "marker": "o"},
    "train": {"color": COLOURS["checkpoint"], "marker": "s", "linestyle": "--"},
}
WHITE_TEXT_ABOVE = 0.55
"""Probability above which the text of a heat-map cell is white, because the cell is dark."""


@with_default_style
def plot_loss_by_position(split_results: Mapping[str, Any], *, title: str) -> bytes | None:
    """Return a PNG of the loss by position, with bands of two standard errors; None if no split has positions."""
    # Slow to import, and only needed here. Figures made without pyplot need no display.
    from matplotlib.figure import Figure

    drawn = {name: part["positions"] for name, part in split_results.items() if part.get("positions")}
    if not drawn:
        return None
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for name, buckets in drawn.items():
        x = [max(1.0, math.sqrt(max(bucket["from"], 1) * bucket["to"])) for bucket in buckets]
        y = [bucket["loss"] for bucket in buckets]
        reach = [2 * (bucket["standard_error"] or 0.0) for bucket in buckets]
        style = SPLIT_STYLES[name]
        axes.plot(x, y, linewidth=2, markersize=5, label=name, **style)
        low, high = ([a + sign * b for a, b in zip(y, reach, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    ends = sorted({end for buckets in drawn.values() for each in buckets for end in (each["from"], each["to"]) if end})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ends, [_show_tokens(end) for end in ends])
    axes.minorticks_off()
    axes.set_xlabel("position in the row (number of preceding tokens)", color=INK)
    axes.set_ylabel("loss per trained token (nats)", color=INK)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, labelcolor=INK)
    _hide_frame(axes)
    return _render_png(figure, axes, title)


@with_default_style
def plot_needle_test(needle_results: Mapping[str, Any], *, title: str) -> bytes:
    """Return a PNG heat map of the needle-in-a-haystack test: a row for each depth, a column for each prompt length.

    The colour of a cell is the geometric mean of the probabilities of the answer tokens. Its text is the number of
    correct greedy answers, and the gain in log-probability per answer token (nats) from the needle.
    """
    from matplotlib.figure import Figure

    lengths, depths = needle_results["lengths"], needle_results["depths"]
    cells = {(cell["length"], cell["depth"]): cell for cell in needle_results["cells"]}
    shade = [[math.exp(cells[length, depth]["logprob"]) for length in lengths] for depth in depths]
    figure = Figure(
        figsize=(max(5.0, 2.2 + 1.05 * len(lengths)), max(3.0, 1.6 + 0.62 * len(depths))),
        dpi=150,
        layout="constrained",
    )
    axes = figure.subplots()
    image = axes.imshow(shade, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    for column, length in enumerate(lengths):
        for row, depth in enumerate(depths):
            cell = cells[length, depth]
            axes.text(
                column,
                row,
                f"{cell['matched']}/{cell['trials']}\n{round(cell['gain'], 2) + 0.0:+.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if shade[row][column] > WHITE_TEXT_ABOVE else INK,
            )
    axes.set_xticks(range(len(lengths)), [_show_tokens(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}%" for depth in depths])
    axes.set_xlabel("length (tokens)", color=INK)
    axes.set_ylabel("depth of the needle", color=INK)
    axes.tick_params(colors=INK, length=0)
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label("probability of an answer token\n(geometric mean)", color=INK)
    figure.supxlabel(
        "in each cell: correct greedy answers / all answers,\n"
        "and the gain in log-probability per answer token (nats) from the needle",
        fontsize=8,
    )
    return _render_png(figure, axes, title)


def _hide_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


def _render_png(figure: Any, axes: Any, title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # A name is not a formula: show `$` unchanged.
    axes.set_title(safe_text(title), loc="left", parse_math=False, color=INK, fontsize=11, fontweight="bold", pad=10)
    picture = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font may lack letters of the name
        FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def _show_tokens(tokens: int) -> str:
    return f"{tokens >> 10}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"
