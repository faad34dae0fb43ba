"""Print the document of ``streamtune eval`` as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from streamtune.base.secrets import plain
from streamtune.cli.console import make_table, out

BAR = 16
"""Columns of the longest bar."""
PARTS = " ▏▎▍▌▋▊▉█"


def print_evaluation(found: Mapping[str, Any]) -> None:
    """Print losses or metrics of each split, then needles and tasks of a harness, where there are any."""
    for split, part in found["splits"].items():
        if "positions" in part:
            _print_losses(split, part)
        else:
            _print_metrics(split, part)
    if found.get("needle"):
        _print_needles(found["needle"])
    if found.get("lm_eval"):
        _print_harness(found["lm_eval"])


def _print_losses(split: str, part: Mapping[str, Any]) -> None:
    from streamtune.programs.evaluate.losses import context_sentence

    columns = ("tokens", "loss", "+-", "perplexity")
    table = _table(f"{split}, by set", *columns)
    for row in [*part["sets"], {"name": "all", **part}]:
        table.add_row(plain(row["name"]), f"{row['tokens']:,}", *map(_number, _figures(row)))
    _show(table)
    table = _table(f"{split}, by position", *columns, Column("lowest to highest", no_wrap=True))
    losses = [row["loss"] for row in part["positions"]]
    for row in part["positions"]:
        name = f"{row['from']:,} to {row['to'] - 1:,}"
        table.add_row(name, f"{row['tokens']:,}", *map(_number, _figures(row)), _bar(row["loss"], losses))
    _show(table)
    out.print(Text(context_sentence(part["context"])))
    out.print()


def _print_metrics(split: str, part: Mapping[str, Any]) -> None:
    """Print each metric with its standard error, and a column for each set where there are several."""
    sets = part["sets"] if len(part["sets"]) > 1 else []
    table = _table(f"{split}, {part['rows']:,} rows", "mean", "+-", *(plain(each["name"]) for each in sets))
    for name, figure in part["metrics"].items():
        own = [_number(each["metrics"].get(name, {}).get("mean")) for each in sets]
        table.add_row(plain(name), _number(figure["mean"]), _number(figure["standard_error"]), *own)
    _show(table)


def _print_needles(found: Mapping[str, Any]) -> None:
    cells = {(cell["length"], cell["depth"]): cell for cell in found["cells"]}
    table = _table("needle, by depth and length", *(f"{length:,}" for length in found["lengths"]))
    for depth in found["depths"]:
        row = [cells[length, depth] for length in found["lengths"]]
        shown = [f"{each['matched']}/{each['trials']} {round(each['gain'], 2) + 0.0:+.2f}" for each in row]
        table.add_row(f"{depth:g}%", *shown)
    _show(table)
    out.print(Text("Answers that match, and nats that the needle adds to the log-prob of an answer's token."))
    out.print()


def _print_harness(found: Mapping[str, Any]) -> None:
    table = _table("lm-evaluation-harness", "figure", "value")
    for task, figures in found.items():
        for name, value in figures.items():
            table.add_row(plain(task), plain(name), _number(value) if isinstance(value, float) else json.dumps(value))
    _show(table)


def _table(title: str, *columns: Column | str) -> Table:
    return make_table(Column(title, overflow="fold"), *columns)


def _show(table: Table) -> None:
    out.print(table)
    out.print()


def _bar(value: float, values: Sequence[float]) -> str:
    """Return a bar of 1 column for the lowest of ``values`` to :data:`BAR` for the highest, to an eighth of one."""
    low, high = min(values), max(values)
    part = (1 + (BAR - 1) * (value - low) / ((high - low) or 1.0)) / BAR
    if not out.encoding.lower().startswith("utf"):
        return "#" * round(part * BAR)
    eighths = round(part * BAR * 8)
    return PARTS[8] * (eighths // 8) + PARTS[eighths % 8].strip()


def _figures(row: Mapping[str, Any]) -> Sequence[float | None]:
    return [row["loss"], row["standard_error"], row["perplexity"]]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
