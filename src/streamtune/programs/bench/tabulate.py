"""Measure the tables of a benchmark: rows in groups, each saved as soon as it is measured, and not measured twice.

One process holds one model and enters one mode after the other, so a table costs the memory of one model and compares
the same weights. The steps that are compared in a group alternate, and a ratio is the median over these rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamtune.base import interrupts
from streamtune.errors import RunError
from streamtune.plan.simulate.workload import Mode
from streamtune.programs.bench.bench import paired
from streamtune.programs.bench.named_tables import TABLES, Wanted
from streamtune.programs.bench.subject import Job
from streamtune.programs.bench.tables import Entry, TableName, TableReport, TableRow
from streamtune.programs.bench.worker import Worker
from streamtune.schedule import Schedule

MeasureGroup = Callable[[Sequence[Entry], Sequence[Entry]], Iterator[TableRow]]
"""Measures the first entries; the second are what they are compared with. Gives a row as soon as it is known."""


def run_table(
    table: TableName,
    job: Job,
    *,
    lengths: Sequence[int],
    modes: Sequence[Mode],
    schedule: Schedule,
    repeats: int,
    folder: Path,
    command: str,
    asked: dict[str, Any],
    notify: Callable[[str], None] = lambda message: None,
) -> TableReport:
    """Measure a table, except for rows that its file in the folder has already.

    Args:
        table: Any but ``max-length``.
        job: The model.
        lengths: Tokens of a row, or of a prompt that is shared.
        modes: Modes to compare; an ablation compares schedules instead, a shared prompt layouts.
        schedule: The schedule of streamed steps.
        repeats: Timed steps of each row; the rows of a group alternate.
        folder: Directory of the table's file; it exists.
        command: Command line that measures the table again.
        asked: Settings that the figures depend on, as JSON values.
        notify: Called with what is being measured.
    """
    declared, worker = TABLES[table], Worker(job)
    try:
        notify("building the model")
        env = worker.ask("env")
        if worker.failed:
            raise RunError(f"the model cannot be built: {worker.failed}")
        report = TableReport(table, command, asked, env)
        with interrupts.temporary_directory(dir=folder, prefix=".offload-") as scratch:
            report.absent = declared.absent(modes, env["device_type"])
            here = [mode for mode in modes if mode not in report.absent]
            assert declared.groups is not None
            groups = declared.groups(Wanted(lengths, here, schedule, env["layers"], scratch))
            measure = _measured(worker, repeats=repeats if declared.timed else 0, memory=declared.memory, notify=notify)
            fill(report, groups, measure, folder=folder)
    finally:
        worker.close()
    return report


def fill(report: TableReport, groups: Sequence[Sequence[Entry]], measure: MeasureGroup, *, folder: Path) -> None:
    """Measure the rows that a report lacks; its file is written after each of them.

    Args:
        report: The report, without rows; those in its file are read first.
        groups: The entries, in groups whose steps alternate.
        measure: Measures a group.
        folder: Directory of the file; it exists.
    """
    report.check(folder)
    report.resume(folder)
    entries = [entry for group in groups for entry in group]
    report.rows = [row for entry in entries if (row := report.row(entry)) is not None]
    for group in groups:
        todo = [entry for entry in group if report.row(entry) is None]
        same = [e for e in entries if e.case.length == group[0].case.length and (e.to_checkpoint or e.to_default)]
        for row in measure(todo, same) if todo else ():
            report.rows.append(row)
            report.rows = [known for entry in entries if (known := report.row(entry)) is not None]
            report.save(folder)
    report.save(folder)


def _measured(
    worker: Worker, *, repeats: int, memory: bool, notify: Callable[[str], None] = lambda message: None
) -> MeasureGroup:
    """Return a function that measures rows by real steps.

    Args:
        worker: The process with the model.
        repeats: Timed steps of each entry, which alternate; 0 runs one step for its loss.
        memory: Measure the memory of a step as well.
        notify: Called with what is being measured.
    """

    def measure(todo: Sequence[Entry], references: Sequence[Entry]) -> Iterator[TableRow]:
        rows = {entry: entry.new_row() for entry in todo}
        steps: dict[Entry, list[tuple[float, float]]] = {}
        failed: dict[Entry, str] = {}

        def ask(entry: Entry, request: str, about: str) -> dict[str, Any]:
            if entry in failed:
                return {}
            notify(f"{entry.case.length:,} tokens, {entry.label}: {about}")
            answer = worker.ask(request, entry.case)
            if worker.failed:
                failed[entry] = worker.failed
            return answer

        for entry in todo if memory else ():
            rows[entry] = replace(rows[entry], **ask(entry, "memory", "memory"))
        again = [entry for entry in references if repeats and entry not in rows]
        for turn in range(repeats + 1):  # the first turn warms up, and is where the loss is from
            for entry in [*again, *todo]:
                answer = ask(entry, "time", f"step {turn} of {repeats}")
                if turn and answer:
                    steps.setdefault(entry, []).append((answer["forward_s"], answer["backward_s"]))
                elif answer and entry in rows:
                    rows[entry] = replace(rows[entry], loss=answer["loss"], grad_norm=answer["grad_norm"])
        for entry, row in rows.items():
            if entry in failed:
                yield replace(entry.new_row(), error=failed[entry])
            else:
                yield _with_times(row, steps[entry], references, steps) if entry in steps else row

    return measure


def _with_times(
    row: TableRow,
    own: list[tuple[float, float]],
    references: Sequence[Entry],
    steps: dict[Entry, list[tuple[float, float]]],
) -> TableRow:
    compared: dict[str, Any] = {
        name: paired(own, steps.get(entry, []))
        for name in ("to_checkpoint", "to_default")
        for entry in references
        if getattr(entry, name)
    }
    forward, backward = (statistics.median(part) for part in zip(*own, strict=True))
    return replace(row, forward_s=forward, backward_s=backward, **compared)
