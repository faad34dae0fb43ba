"""The tables of ``streamtune bench``, from fixed figures: screens, pages and documents, byte for byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from streamtune import Schedule
from streamtune.plan.simulate import ALL_MODES
from streamtune.plan.simulate.workload import LABELS
from streamtune.programs.bench.bench import BenchReport, BenchRow
from streamtune.programs.bench.bench_command import print_bench, print_table_screen
from streamtune.programs.bench.named_tables import table_markdown
from streamtune.programs.bench.subject import SHARING
from streamtune.programs.bench.table_rows import (
    Entry,
    TableName,
    TableReport,
    TableRow,
    ablation_entries,
    maxlen_entries,
)
from tests.golden_kit import WIDTHS, check_golden, screen

GOLDEN = Path(__file__).parent / "golden"
MIB = 1 << 20
SCHEDULE = Schedule(chunk_size=1024, head_chunk_size=512)
ENV = {
    "device": "x86_64",
    "device_type": "cpu",
    "threads": 2,
    "cpus": 2,
    "python": "3.11",
    "torch": "2.0",
    "transformers": "5.0",
    "dtype": "float32",
    "layers": 4,
    "parameters": 20_000_000,
    "batch_size": 2,
}
TERMS = {"weights": 80 * MIB, "gradients": 80 * MIB, "layer inputs": 12 * MIB, "activations": 33 * MIB, "head": 9 * MIB}


def filled(row: TableRow, place: int) -> TableRow:
    """A row with figures made of its place in the table."""
    return replace(
        row,
        peak_bytes=(900 - 7 * place) * MIB,
        terms={name: size * (place + 1) for name, size in TERMS.items()},
        activation_bytes=(400 - 11 * place) * MIB + 1,
        layer_activation_bytes=(300 - 11 * place) * MIB,
        host_bytes=place % 3 * 5 * MIB,
        disk_bytes=place % 4 * 3 * MIB,
        forward_s=0.5 + place / 8,
        backward_s=1.25 + place / 4,
        to_checkpoint=1 + place / 16,
        to_default=1.0 if place == 2 else 0.75 + place / 32,
        loss=5.5 + place * 1e-6,
        grad_norm=0.25 + place * 1e-7,
    )


def rows_of(table: TableName) -> list[TableRow]:
    """Rows as a measurement of the table has them."""
    if table in ("bp-time", "memory"):
        rows = [TableRow(mode, length, LABELS[mode]) for length in (1024, 16384) for mode in ALL_MODES]
    elif table == "prefix-sharing":
        rows = [
            TableRow("stream", prompt, label, "StreamTune") for prompt in (1024, 4096) for label in SHARING.values()
        ]
        rows.append(TableRow("checkpoint", 4096, SHARING["turns"], LABELS["checkpoint"]))
    else:
        entries: list[Entry] = (
            ablation_entries(SCHEDULE, 2048, 4, "folder") if table == "ablation" else maxlen_entries(SCHEDULE, "folder")
        )
        rows = [TableRow(e.case.mode, e.case.length, e.label, e.section) for e in entries]
    rows = [filled(row, place) for place, row in enumerate(rows)]
    if table == "max-length":
        rows = [replace(row, max_length=4096 * (place + 1), loss=None) for place, row in enumerate(rows)]
    if table == "prefix-sharing":
        rows = [replace(row, to_default=1.0 if row.label == SHARING["batch"] else row.to_default) for row in rows]
    last = rows[-1]
    return [*rows[:-1], TableRow(last.mode, last.length, last.label, last.section, error="out of memory")]


def report_of(table: TableName) -> TableReport:
    """A report whose figures are all fixed."""
    asked = {"streamtune": "0", "recipe": {}, "schedule_in_words": SCHEDULE.describe(4), "budget": "2 GiB"}
    env = {**ENV, "device_type": "meta", "device": "simulated"} if table == "max-length" else ENV
    report = TableReport(table, f"streamtune bench recipe.yaml --table {table}", asked, env, rows_of(table))
    if table == "bp-time":
        report.absent = {"liger-loss": "not run here: Liger's kernels need an accelerator"}
    return report


@pytest.mark.parametrize("table", get_args(TableName))
def test_a_table(table: TableName, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(table)
    for width in WIDTHS:
        check_golden(GOLDEN / f"{table}-{width}.txt", screen(width, lambda: print_table_screen(report), capsys))
    check_golden(GOLDEN / f"{table}.md", table_markdown(report))
    check_golden(GOLDEN / f"{table}.json", json.dumps(report.to_json(), indent=1) + "\n")


@pytest.mark.parametrize("table", get_args(TableName))
def test_a_table_of_rows_that_all_failed(table: TableName, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(table)
    report.rows = [
        TableRow(row.mode, row.length, row.label, row.section, error=f"out of memory {place}")
        for place, row in enumerate(report.rows)
    ]
    shown = screen(200, lambda: print_table_screen(report), capsys)
    for text in (shown, table_markdown(report)):
        assert all(text.count(f"out of memory {place}") >= 1 for place in range(len(report.rows)))


def test_the_entries_of_the_tables_that_compare_schedules() -> None:
    entries = [*ablation_entries(SCHEDULE, 2048, 4, "folder"), *maxlen_entries(SCHEDULE, "folder")]
    check_golden(GOLDEN / "entries.txt", "".join(f"{entry}\n" for entry in entries))


def bench_report(packed_rows: int = 0) -> BenchReport:
    """A report of the comparison without a table."""
    report = BenchReport(dict(ENV), SCHEDULE, [], packed_rows)
    layouts = ("row", "packed", "separate") if packed_rows else ("row",)
    for length in (2048, 16384):
        for mode in ("plain", "checkpoint", "stream"):
            for layout in layouts:
                place = len(report.rows) + 1
                row = BenchRow(mode, length, layout=layout)  # type: ignore[arg-type]
                if (mode, length) == ("plain", 16384):
                    report.rows.append(replace(row, error="out of memory"))
                    continue
                figures = {
                    "peak_bytes": 100 * MIB * place,
                    "activation_bytes": 60 * MIB * place,
                    "layer_activation_bytes": 30 * MIB * place if layout == "row" else None,
                    "host_bytes": 0,
                    "disk_bytes": 0,
                }
                times = {"forward_s": place / 8, "backward_s": place / 4, "tokens_per_s": 8000.0 / place}
                report.rows.append(replace(row, **figures, **times, ratio=place / 3, row_ratio=1 + place / 1000))
    return report


@pytest.mark.parametrize("packed_rows", [0, 16])
def test_the_comparison_without_a_table(packed_rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_report(packed_rows)

    for width in WIDTHS:
        check_golden(GOLDEN / f"bench-{packed_rows}-{width}.txt", screen(width, lambda: print_bench(report), capsys))
    check_golden(GOLDEN / f"bench-{packed_rows}.json", json.dumps(report.to_json(), indent=2) + "\n")
