"""Readable tables: the columns of each, as cells for a screen, and the page that is written next to the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamtune.bench.sharing import COMPLETIONS, SHARING
from streamtune.bench.tables import TABLES, TableName, TableReport, TableRow
from streamtune.simulate.workload import LABELS, MODES

__all__ = ["Column", "cells", "columns", "describe", "markdown", "notes"]

HEADS = {
    "activations": "activ.",
    "layer inputs": "inputs",
    "gradients": "grads",
    "keys and values": "K,V",
    "attention outputs": "attn",
    "optimizer": "optim",
}
"""Short for what a peak is made of."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        cell: Returns its text for a row.
        right: True if it is aligned to the right, as figures are.
        page: True if there is room for it on a page only, and not on a screen.
    """

    name: str
    cell: Callable[[TableRow], str]
    right: bool = True
    page: bool = False


def columns(report: TableReport) -> list[Column]:
    """Return the columns of a table, those that would be empty left out."""
    lengths = {row.length for row in report.rows}
    found = [Column("mode", lambda row: row.mode, right=False)]
    if report.table in ("ablation", "max-length", "prefix-sharing"):
        name = "rows" if report.table == "prefix-sharing" else "schedule"
        found = [Column(name, lambda row: row.label, right=False)]
    if report.table in ("bp-time", "memory", "prefix-sharing") or len(lengths) > 1:
        found.insert(
            0, Column("prompt" if report.table == "prefix-sharing" else "tokens", lambda row: f"{row.length:,}")
        )
    found += _COLUMNS[report.table](report)
    found += [Column("loss", lambda row: _error(report, row, "loss"))]
    found += [Column("grad", lambda row: _error(report, row, "gradient norm"), page=report.table == "memory")]
    return [column for column in found if any(column.cell(row) for row in report.rows)]


def _time(report: TableReport) -> list[Column]:
    rows_of_batch = report.env["batch_size"]
    return [
        Column("fwd s", lambda row: _seconds(row.forward_s)),
        Column("bwd s", lambda row: _seconds(row.backward_s)),
        Column("tok/s", lambda row: f"{rows_of_batch * row.length / row.step_s:,.0f}" if row.step_s else ""),
        Column("time", lambda row: _ratio(row.to_checkpoint)),
    ]


def _memory(report: TableReport) -> list[Column]:
    show = _shown(report)

    def term(name: str) -> Callable[[TableRow], str]:
        return lambda row: show(row.terms.get(name) or None)

    terms = dict.fromkeys(name for row in report.rows for name in row.terms)
    return [
        Column("peak", lambda row: show(row.peak_bytes)),
        *(Column(HEADS.get(name, name), term(name), page=name in ("weights", "gradients")) for name in terms),
        Column("most activ.", lambda row: show(row.activation_bytes)),
        Column("no head", lambda row: show(row.layer_activation_bytes), page=True),
        *_elsewhere(report),
    ]


def _ablation(report: TableReport) -> list[Column]:
    show = _shown(report)
    return [
        Column("time", lambda row: _ratio(row.to_checkpoint)),
        Column("to default", lambda row: _ratio(row.to_default)),
        Column("peak", lambda row: show(row.peak_bytes)),
        Column("activ.", lambda row: show(row.activation_bytes)),
        *_elsewhere(report),
    ]


def _longest(report: TableReport) -> list[Column]:
    show = _shown(report)
    return [
        Column("tokens", lambda row: "" if row.max_length is None else f"{row.max_length:,}"),
        Column("to checkpointing", lambda row: _times(report, row)),
        Column("peak", lambda row: show(row.peak_bytes)),
        *_elsewhere(report),
    ]


def _sharing(report: TableReport) -> list[Column]:
    show = _shown(report)

    def to_batch(figure: Callable[[TableRow], int | None]) -> Callable[[TableRow], str]:
        def ratio(row: TableRow) -> str:
            base = next((r for r in report.rows if r.length == row.length and r.to_default == 1), None)
            whole, part = (None if base is None else figure(base)), figure(row)
            return f"{part / whole:.2f}x" if whole and part else ""

        return ratio

    return [
        Column("fwd s", lambda row: _seconds(row.forward_s), page=True),
        Column("bwd s", lambda row: _seconds(row.backward_s), page=True),
        Column("step s", lambda row: _seconds(row.step_s)),
        Column("time", lambda row: _ratio(row.to_default)),
        Column("peak", lambda row: show(row.peak_bytes)),
        Column("memory", to_batch(lambda row: row.peak_bytes)),
        Column("activ.", lambda row: show(row.activation_bytes), page=True),
        *_elsewhere(report),
    ]


_COLUMNS: dict[TableName, Callable[[TableReport], list[Column]]] = {
    "bp-time": _time,
    "memory": _memory,
    "ablation": _ablation,
    "max-length": _longest,
    "prefix-sharing": _sharing,
}


def _times(report: TableReport, row: TableRow) -> str:
    """Return how many times as long a sequence fits as with gradient checkpointing."""
    base = next((r.max_length for r in report.rows if r.mode == "checkpoint"), None)
    return f"{row.max_length / base:.1f}x" if base and row.max_length else ""


def _elsewhere(report: TableReport) -> list[Column]:
    show = _shown(report)
    return [
        Column("host", lambda row: show(row.host_bytes or None)),
        Column("disk", lambda row: show(row.disk_bytes or None)),
    ]


def describe(report: TableReport) -> str:
    """Return one line on the model and the machine."""
    env = report.env
    million = env["parameters"] / 1e6
    size = f"{million / 1000:.1f}B" if million >= 1000 else f"{million:.1f}M"
    model = f"{size} parameters, {env['layers']} layers, {env['dtype']}"
    machine = (
        f"{env['device']}, {env['threads']} thread{'s' * (env['threads'] > 1)}"
        if env["device_type"] == "cpu"
        else env["device"]
    )
    return f"{model}, batch {env['batch_size']}; {machine}, torch {env['torch']}"


def notes(report: TableReport) -> list[str]:
    """Return the meaning of the columns, the peers that are compared with, and those that are not in the table."""
    unit, _ = report.unit
    said = {
        "bp-time": "Seconds are medians; time is to gradient checkpointing, the median over steps that took turns.",
        "memory": f"{unit}. The parts are those of the peak; most activ. is what activations come to at their own peak "
        "(beyond weights, gradients and layer inputs), no head the same of a step without the head.",
        "ablation": "Times are to gradient checkpointing and to the recipe's schedule, medians over steps that took "
        f"turns. Peak, activations (beyond weights, gradients and layer inputs), host and disk in {unit}.",
        "max-length": ("Simulated, 5% of the budget left free. " if report.env["device_type"] == "meta" else "")
        + f"Tokens of the longest sequence whose step fits {report.asked.get('budget')}, within 1% or 256 "
        f"tokens. Peak, host and disk in {unit}.",
        "prefix-sharing": f"{COMPLETIONS} completions, each a fourth as long as the prompt; the loss is over their "
        f"tokens. Time and memory (peak, in {unit}) are to {SHARING['batch']}; times are medians over steps that took "
        "turns.",
    }[report.table]
    exact = "Loss and grad are how far the loss and the norm of the gradient are from plain autograd's, relative."
    lines = [said, exact] if any(report.errors_of(row) for row in report.rows) else [said]
    if report.table in ("bp-time", "memory"):
        peers = dict.fromkeys(row.mode for row in report.rows if row.mode not in MODES)
        lines += [f"{mode}: {LABELS[mode]}." for mode in peers]
    return lines + [f"{mode}: {why}." for mode, why in report.absent.items()]


def markdown(report: TableReport) -> str:
    """Return the page of a table: command, model and machine, the table, its meaning, the plot."""
    env, shown = report.env, columns(report)
    lines = [f"# {TABLES[report.table]}", "", "```", report.command, "```", "", f"{describe(report)}."]
    lines += [f"transformers {env['transformers']}, Python {env['python']}."]
    lines += [f"The recipe's schedule: {report.asked['schedule_in_words']}.", ""]
    lines += ["| " + " | ".join(column.name for column in shown) + " |"]
    lines += ["|" + "|".join("---:" if column.right else "---" for column in shown) + "|"]
    section = ""
    for row in report.rows:
        if row.section != section:
            section = row.section
            lines.append(f"| **{section}** |" + " |" * (len(shown) - 1))
        lines.append("| " + " | ".join(cells(shown, row)) + " |")
    lines += [
        "",
        *(f"- {note}" for note in notes(report)),
        "",
        f"Figures: [{report.stem}.json]({report.stem}.json).",
        "",
    ]
    lines += [f"![{TABLES[report.table]}]({report.stem}.png)", ""]
    return "\n".join(lines)


def cells(shown: list[Column], row: TableRow) -> list[str]:
    """Return the cells of a row; its error is in the column after that of its name."""
    found = [column.cell(row) for column in shown]
    if row.error:
        found[next(i for i, column in enumerate(shown) if not column.right) + 1] = row.error
    return found


def _error(report: TableReport, row: TableRow, name: str) -> str:
    error = report.errors_of(row).get(name)
    return "" if error is None else "equal" if error == 0 else f"{error:.0e}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _shown(report: TableReport) -> Callable[[int | None], str]:
    """Return a function that writes bytes in the unit of a table."""
    _, unit = report.unit

    def show(value: int | None) -> str:
        return "" if value is None else f"{value / unit:,.0f}" if value >= 100 * unit else f"{value / unit:.1f}"

    return show
