"""Screens of ``streamtune bench``: the comparison of modes, and the named tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from streamtune.cli.console import make_table, out

if TYPE_CHECKING:
    from streamtune.programs.bench.bench import BenchReport, BenchRow
    from streamtune.programs.bench.tables import TableReport

ONE_BLANK = (0, 1, 0, 0)


def table_screen(report: TableReport) -> None:
    """Print a named table with a description and notes on its columns."""
    from streamtune.programs.bench.named_tables import cells, columns, notes  # imports torch

    shown = [column for column in columns(report) if not column.page]
    wraps = report.table == "ablation"
    columns_shown = [
        Column(each.name, justify="right" if each.right else "left", no_wrap=each.right or not wraps) for each in shown
    ]
    table = make_table(*columns_shown, padding=ONE_BLANK)
    before: Any = None
    for row in report.rows:
        if before is not None and before != (row.length, row.section):
            table.add_section()
        if row.section and before != (row.length, row.section):
            table.add_row(row.section, style="dim")
        before = (row.length, row.section)
        table.add_row(*cells(shown, row), style="bold" if row.to_default == 1 else None)
    out.print(report.describe(), style="bold")
    out.print(table)
    out.print("\n".join(notes(report)), style="dim")


def describe_bench(report: BenchReport) -> str:
    """Return one line on the model, its dtype, the chunk size and the machine."""
    env = report.env
    if not env:
        return "nothing could be measured"
    size = f"{env['parameters'] / 1e6:,.1f}M parameters, {env['dtype']}, batch {env['batch_size']}"
    machine = f"{env['device']}, {env['threads']} threads, torch {env['torch']}"
    return f"{size}; chunks of {report.schedule.chunk_size:,}; {machine}"


def bench_screen(report: BenchReport) -> Table:
    """Return a table with one row for each length, layout and mode.

    Ratios are to gradient checkpointing in the same run; those in ``to 1 row`` are to the same tokens as one row.
    """
    packed = report.packed_rows > 0
    figures = ("peak", "activations", "layers only", "fwd s", "bwd s", "tok/s", "time")
    before_figures, after = ([Column("rows")], ["to 1 row"]) if packed else ([], [])
    table = make_table("tokens", Column("mode"), *before_figures, *figures, *after, padding=ONE_BLANK)
    before = None
    for row in report.rows:
        if before not in (None, row.length):
            table.add_section()
        length = f"{row.length:,}" if row.length != before else ""
        before = row.length
        same = [r for r in report.rows if r.length == row.length and r.layout == row.layout]
        base = next((r for r in same if r.mode == "checkpoint"), None)
        cells = _cells(row, base)
        if packed:
            rows = {"row": "1", "packed": f"{report.packed_rows} packed", "separate": f"{report.packed_rows} apart"}[
                row.layout
            ]
            cells = [rows, *cells, f"{row.row_ratio:.3f}x" if row.row_ratio is not None else ""]
        table.add_row(length, row.mode, *cells, style="bold" if row.mode == "stream" else None)
    return table


def _cells(row: BenchRow, base: BenchRow | None) -> list[str]:
    if row.error:
        return [row.error] + [""] * 6
    return [
        _mib(row.peak_bytes),
        _with_ratio(row, base, "activation_bytes"),
        _with_ratio(row, base, "layer_activation_bytes"),
        f"{row.forward_s:.2f}" if row.forward_s is not None else "",
        f"{row.backward_s:.2f}" if row.backward_s is not None else "",
        f"{row.tokens_per_s:,.0f}" if row.tokens_per_s is not None else "",
        f"{row.ratio:.2f}x" if row.ratio is not None else "",
    ]


def _with_ratio(row: BenchRow, base: BenchRow | None, name: str) -> str:
    value: Any = getattr(row, name)
    reference: Any = getattr(base, name) if base is not None else None
    if value is None:
        return ""
    return _mib(value) if not reference else f"{_mib(value)} {value / reference:.2f}x"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:,.0f}"
