"""Tables of ``streamtune bench --table``: rows to measure, columns, notes and plot of each table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamtune.base.palette import to_png, with_default_style
from streamtune.plan.simulate.workload import LABELS, MODES, Mode
from streamtune.programs.bench import plots
from streamtune.programs.bench.modes import why_modes_unavailable
from streamtune.programs.bench.subject import COMPLETIONS, SHARING
from streamtune.programs.bench.table_rows import (
    Entry,
    TableName,
    TableReport,
    TableRow,
    ablation_entries,
    mode_entries,
    prefix_sharing_entries,
)
from streamtune.schedule import Schedule

GROUP_SIZE = 4
"""Number of ablation schedules that take turns with their timed steps."""

TERM_HEADINGS = {
    "activations": "activ.",
    "layer inputs": "inputs",
    "gradients": "grads",
    "keys and values": "K,V",
    "attention outputs": "attn",
    "optimizer": "optim",
}
"""Short column headings for the parts of peak memory."""


@dataclass(frozen=True)
class Column:
    """A column of a benchmark table."""

    name: str
    cell: Callable[[TableRow], str]
    right: bool = True
    page: bool = False
    """True to show the column only on the Markdown page, not in the terminal."""


@dataclass(frozen=True)
class TableInputs:
    """Inputs of ``Table.groups``, the function that lists the rows of a benchmark table to measure.

    Attributes:
        lengths: Sequence lengths in tokens; for ``prefix-sharing``, prompt lengths.
        modes: Training methods that can run on this machine.
        folder: Folder for tensors that schedules offload to disk.
    """

    lengths: Sequence[int]
    modes: Sequence[Mode]
    schedule: Schedule
    layers: int
    folder: str


@dataclass(frozen=True)
class Table:
    """Definition of a table of ``streamtune bench --table``.

    Attributes:
        title: Title of the page and of the plot.
        columns: Function that returns the table's own columns; all tables also have columns for names and errors.
        note: Function that returns an explanation of the columns.
        draw: Function that draws the table into a matplotlib figure.
        groups: Function that returns groups of rows to measure; the rows of a group take turns with their timed steps.
            None for a length search.
        rows: Heading of the column of row names.
        lengths: Heading of the column of lengths; empty to omit this column if there is only one length.
        compares_modes: True if each row is a training method; notes then list methods that did not run.
    """

    title: str
    columns: Callable[[TableReport], list[Column]]
    note: Callable[[TableReport], str]
    draw: Callable[[TableReport, Any], None]
    groups: Callable[[TableInputs], list[list[Entry]]] | None = None
    rows: str = "schedule"
    lengths: str = ""
    compares_modes: bool = False
    timed: bool = True
    memory: bool = True

    def why_modes_unavailable(self, modes: Sequence[Mode], device_type: str) -> dict[str, str]:
        return why_modes_unavailable(modes, device_type) if self.compares_modes else {}


def table_columns(report: TableReport) -> list[Column]:
    """Return the columns of a table, without columns that have only empty cells."""
    table, lengths = TABLES[report.table], {row.length for row in report.rows}
    names = [Column(table.rows, lambda row: row.mode if table.compares_modes else row.label, right=False)]
    if table.lengths or len(lengths) > 1:
        names.insert(0, Column(table.lengths or "tokens", lambda row: f"{row.length:,}"))
    figures = [
        *table.columns(report),
        Column("loss", lambda row: _show_error(report, row, "loss")),
        Column("grad", lambda row: _show_error(report, row, "gradient norm"), page=report.table == "memory"),
    ]
    shown = [column for column in figures if any(column.cell(row) for row in report.rows)]
    if report.rows and not any(not column.page for column in shown):  # all rows failed
        shown.append(Column("error", lambda row: row.error, right=False))
    return [column for column in names if any(column.cell(row) for row in report.rows)] + shown


def _time_columns(report: TableReport) -> list[Column]:
    rows_of_batch = report.env["batch_size"]
    return [
        Column("fwd s", lambda row: _show_seconds(row.forward_s)),
        Column("bwd s", lambda row: _show_seconds(row.backward_s)),
        Column("tok/s", lambda row: f"{rows_of_batch * row.length / row.step_s:,.0f}" if row.step_s else ""),
        Column("time", lambda row: _show_ratio(row.to_checkpoint)),
    ]


def _memory_columns(report: TableReport) -> list[Column]:
    show = _byte_format(report)

    def term(name: str) -> Callable[[TableRow], str]:
        return lambda row: show(row.terms.get(name) or None)

    terms = dict.fromkeys(name for row in report.rows for name in row.terms)
    return [
        Column("peak", lambda row: show(row.peak_bytes)),
        *(Column(TERM_HEADINGS.get(name, name), term(name), page=name in ("weights", "gradients")) for name in terms),
        Column("most activ.", lambda row: show(row.activation_bytes)),
        Column("no head", lambda row: show(row.layer_activation_bytes), page=True),
        *_offload_columns(report),
    ]


def _ablation_columns(report: TableReport) -> list[Column]:
    show = _byte_format(report)
    return [
        Column("time", lambda row: _show_ratio(row.to_checkpoint)),
        Column("to default", lambda row: _show_ratio(row.to_default)),
        Column("peak", lambda row: show(row.peak_bytes)),
        Column("activ.", lambda row: show(row.activation_bytes)),
        *_offload_columns(report),
    ]


def _longest_columns(report: TableReport) -> list[Column]:
    show = _byte_format(report)
    return [
        Column("tokens", lambda row: "" if row.max_length is None else f"{row.max_length:,}"),
        Column("to checkpointing", lambda row: _offload_ratio(report, row)),
        Column("peak", lambda row: show(row.peak_bytes)),
        *_offload_columns(report),
    ]


def _sharing_columns(report: TableReport) -> list[Column]:
    show = _byte_format(report)

    def to_batch(figure: Callable[[TableRow], int | None]) -> Callable[[TableRow], str]:
        def ratio(row: TableRow) -> str:
            base = next((r for r in report.rows if r.length == row.length and r.to_default == 1), None)
            whole, part = (None if base is None else figure(base)), figure(row)
            return f"{part / whole:.2f}x" if whole and part else ""

        return ratio

    return [
        Column("fwd s", lambda row: _show_seconds(row.forward_s), page=True),
        Column("bwd s", lambda row: _show_seconds(row.backward_s), page=True),
        Column("step s", lambda row: _show_seconds(row.step_s)),
        Column("time", lambda row: _show_ratio(row.to_default)),
        Column("peak", lambda row: show(row.peak_bytes)),
        Column("memory", to_batch(lambda row: row.peak_bytes)),
        Column("activ.", lambda row: show(row.activation_bytes), page=True),
        *_offload_columns(report),
    ]


def _offload_ratio(report: TableReport, row: TableRow) -> str:
    base = next((r.max_length for r in report.rows if r.mode == "checkpoint"), None)
    return f"{row.max_length / base:.1f}x" if base and row.max_length else ""


def _offload_columns(report: TableReport) -> list[Column]:
    show = _byte_format(report)
    return [
        Column("host", lambda row: show(row.host_bytes or None)),
        Column("disk", lambda row: show(row.disk_bytes or None)),
    ]


def table_notes(report: TableReport) -> list[str]:
    """Return notes on a table: meaning of its columns, compared libraries, and training methods that did not run."""
    table = TABLES[report.table]
    lines = [table.note(report)]
    truths = dict.fromkeys(LABELS[truth.mode] for row in report.rows if (truth := report.true_row(row)) is not None)
    if any(report.relative_errors(row) for row in report.rows):
        against = f"Loss and grad are the relative errors of loss and gradient norm against {' or '.join(truths)}."
        lines.append(
            f"{against} With dropout, each method draws other numbers." if report.env.get("dropout") else against
        )
    if table.compares_modes:
        peers = dict.fromkeys(row.mode for row in report.rows if row.mode not in MODES)
        lines += [f"{mode}: {LABELS[mode]}." for mode in peers]
    return lines + [f"{mode}: {why}." for mode, why in report.absent.items()]


def _time_note(report: TableReport) -> str:
    return (
        "Seconds are medians of measured steps. Time is relative to gradient checkpointing, the median over all turns."
    )


def _memory_note(report: TableReport) -> str:
    return (
        f"Memory is measured, in {report.unit[0]}. 'peak' is the peak of the step. The columns between 'peak' and "
        "'most activ.' are its parts, by purpose. Activations may have their own peak at another time. The column "
        "'most activ.' is the peak of activations, keys, values and LM head together. The column 'no head' is this "
        "peak in a step without the LM head."
    )


def _ablation_note(report: TableReport) -> str:
    return (
        "Times are relative to gradient checkpointing (time) and to the recipe's schedule (to default): medians over "
        "alternating steps. Peak, activations (beyond weights, gradients and layer inputs), host and disk are "
        f"measured, in {report.unit[0]}."
    )


def _longest_note(report: TableReport) -> str:
    simulated = report.env["device_type"] == "meta"
    how = "Simulated, with 5% of the budget left free." if simulated else "Measured."
    return (
        f"{how} Tokens: the longest sequence whose step fits {report.asked.get('budget')}, to within 1% or 256 tokens. "
        f"Peak, host and disk are in {report.unit[0]}."
    )


def _sharing_note(report: TableReport) -> str:
    batch = SHARING["batch"]
    return (
        f"Each prompt has {COMPLETIONS} completions, a fourth as long as the prompt; the loss counts their tokens. "
        f"Time and memory are relative to '{batch}'; times are medians over alternating steps. Peak, host and disk are "
        f"measured, in {report.unit[0]}."
    )


def table_markdown(report: TableReport) -> str:
    """Return the Markdown page of a table: command, model, machine, table, notes and plot."""
    env, shown = report.env, table_columns(report)
    lines = [f"# {TABLES[report.table].title}", "", "```", report.command, "```", "", f"{report.describe()}."]
    lines += [f"transformers {env['transformers']}, Python {env['python']}."]
    schedule = report.asked["schedule_in_words"]
    lines += [f"The recipe's schedule (head: chunk size of the LM head): {schedule}.", ""]
    lines += ["| " + " | ".join(column.name for column in shown) + " |"]
    lines += ["|" + "|".join("---:" if column.right else "---" for column in shown) + "|"]
    section = ""
    for row in report.rows:
        if row.section != section:
            section = row.section
            lines.append(f"| **{section}** |" + " |" * (len(shown) - 1))
        lines.append("| " + " | ".join(row_cells(shown, row)) + " |")
    lines += [
        "",
        *(f"- {note}" for note in table_notes(report)),
        "",
        f"Figures: [{report.stem}.json]({report.stem}.json).",
        "",
    ]
    lines += [f"![{TABLES[report.table].title}]({report.stem}.png)", ""]
    return "\n".join(lines)


def row_cells(columns: list[Column], row: TableRow) -> list[str]:
    """Return the text of each cell of a row; if the row failed, its error replaces the cell after the row name."""
    found = [column.cell(row) for column in columns]
    if row.error:
        found[next(i for i, column in enumerate(columns) if not column.right) + 1] = row.error
    return found


def _show_error(report: TableReport, row: TableRow, name: str) -> str:
    error = report.relative_errors(row).get(name)
    return "" if error is None else "equal" if error == 0 else f"{error:.0e}"


def _show_seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _show_ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _byte_format(report: TableReport) -> Callable[[int | None], str]:
    _, unit = report.unit

    def show(value: int | None) -> str:
        return "" if value is None else f"{value / unit:,.0f}" if value >= 100 * unit else f"{value / unit:.1f}"

    return show


# --- all tables -------------------------------------------------------------------------------------------------------


def _grouped_mode_entries(inputs: TableInputs) -> list[list[Entry]]:
    return [mode_entries(inputs.modes, length, inputs.schedule) for length in inputs.lengths]


def _grouped_ablation_entries(inputs: TableInputs) -> list[list[Entry]]:
    rows = [ablation_entries(inputs.schedule, length, inputs.layers, inputs.folder) for length in inputs.lengths]
    return [part[start : start + GROUP_SIZE] for part in rows for start in range(0, len(part), GROUP_SIZE)]


def _grouped_sharing_entries(inputs: TableInputs) -> list[list[Entry]]:
    return [prefix_sharing_entries(length, inputs.schedule) for length in inputs.lengths]


TABLES: dict[TableName, Table] = {
    "bp-time": Table(
        "Forward and backward time by length",
        _time_columns,
        _time_note,
        plots.draw_time,
        _grouped_mode_entries,
        rows="mode",
        lengths="tokens",
        compares_modes=True,
        memory=False,
    ),
    "max-length": Table("Longest sequence in a given memory", _longest_columns, _longest_note, plots.draw_longest),
    "memory": Table(
        "Memory of a training step by category",
        _memory_columns,
        _memory_note,
        plots.draw_memory,
        _grouped_mode_entries,
        rows="mode",
        lengths="tokens",
        compares_modes=True,
        timed=False,
    ),
    "ablation": Table(
        "What each choice of a schedule costs and saves",
        _ablation_columns,
        _ablation_note,
        plots.draw_ablation,
        _grouped_ablation_entries,
    ),
    "prefix-sharing": Table(
        "A prompt with several completions, streamed once or once for each",
        _sharing_columns,
        _sharing_note,
        plots.draw_sharing,
        _grouped_sharing_entries,
        rows="rows",
        lengths="prompt",
    ),
}


@with_default_style
def draw_table(report: TableReport) -> bytes:
    """Return the plot of a table as PNG."""
    from matplotlib.figure import Figure  # slow to import, and only needed here

    table = TABLES[report.table]
    figure = Figure(figsize=(11, 5.2), dpi=150, layout="constrained")
    table.draw(report, figure)
    figure.supxlabel(report.describe(), x=0.01, ha="left", color="#5d6470", fontsize=8)
    return to_png(figure, table.title)
