"""Measure the named tables. Rows are measured in groups; each row is saved as soon as it is measured.

One process holds one model and prepares it for one mode after the other. So a table needs the memory of one model, and
all modes have the same weights. The steps of a group alternate, and a ratio is the median over these rounds. The table
of longest sequences searches the length for every schedule.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from streamtune.base import interrupts
from streamtune.base.text import show_size
from streamtune.errors import ArgumentError, RunError
from streamtune.plan.budget import Attempt, Budget, search_largest
from streamtune.plan.simulate.simulate import simulate
from streamtune.plan.simulate.workload import Mode
from streamtune.programs.bench.bench import median_ratio
from streamtune.programs.bench.named_tables import TABLES, TableInputs
from streamtune.programs.bench.subject import Job, Worker, describe_environment
from streamtune.programs.bench.table_rows import (
    Entry,
    TableName,
    TableReport,
    TableRow,
    maxlen_entries,
)
from streamtune.programs.probe.probe import LENGTHS, measured_trials
from streamtune.programs.probe.recipe_trials import prepare_step
from streamtune.programs.probe.trial import Outcome, Shape
from streamtune.recipe.settings import TrainingSettings
from streamtune.run.device import choose_device, make_schedule, prepare_libraries
from streamtune.run.model import make_blueprint
from streamtune.run.plan import recipe_workload
from streamtune.run.weight_choices import with_best_precision
from streamtune.schedule import Schedule
from streamtune.tasks import task_of

MeasureGroup = Callable[[Sequence[Entry], Sequence[Entry]], Iterator[TableRow]]
"""``(entries, references) -> rows``: measures entries relative to the references; yields each finished row."""


@dataclass(frozen=True)
class TableOptions:
    """Command-line options of a table.

    Attributes:
        lengths: Row lengths in tokens; for ``prefix-sharing``, prompt lengths.
        modes: Modes to compare; ``ablation`` compares schedules instead, ``prefix-sharing`` layouts.
        repeats: Number of timed steps of each row; the rows of a group alternate.
        folder: Existing folder for the files of the table.
        command: Command line that measures the table again.
        method: How ``max-length`` runs its trials: ``measure`` or ``simulate``.
        sizes: Budgets of ``max-length`` in bytes: device, host, disk; None if not given.
    """

    lengths: Sequence[int]
    modes: Sequence[Mode]
    repeats: int
    folder: Path
    command: str
    method: str = "simulate"
    sizes: Sequence[int | None] = (None, None, None)


def measure_table_steps(
    table: TableName,
    job: Job,
    schedule: Schedule,
    options: TableOptions,
    settings: dict[str, Any],
    notify: Callable[[str], None] = lambda message: None,
) -> TableReport:
    """Measure a table other than ``max-length``; rows that its file already has are not measured again.

    Args:
        table: Name of the table.
        job: The model and its batch size.
        schedule: Schedule of streamed steps.
        options: Options of the command line.
        settings: Settings on which the figures depend, as JSON values.
        notify: Called with text about the current measurement.
    """
    declared, worker = TABLES[table], Worker(job)
    try:
        notify("building the model")
        env = _worker_environment(worker)
        report = TableReport(table, options.command, settings, env)
        with interrupts.temporary_directory(dir=options.folder, prefix=".offload-") as scratch:
            report.absent = declared.why_modes_unavailable(options.modes, env["device_type"])
            here = [mode for mode in options.modes if mode not in report.absent]
            assert declared.groups is not None
            groups = declared.groups(TableInputs(options.lengths, here, schedule, env["layers"], scratch))
            repeats = options.repeats if declared.timed else 0
            measure_missing_rows(
                report, groups, _measure_steps(worker, repeats, declared.memory, notify), folder=options.folder
            )
    finally:
        worker.close()
    return report


def _worker_environment(worker: Worker) -> dict[str, Any]:
    env = worker.ask("environment")
    if worker.failed:
        raise RunError(f"the model cannot be built: {worker.failed}")
    return env


def measure_missing_rows(
    report: TableReport, groups: Sequence[Sequence[Entry]], measure: MeasureGroup, *, folder: Path
) -> None:
    """Measure the rows that are missing from the report's file, and write the file after each row.

    Args:
        report: The report, without rows.
        groups: All entries, in groups whose steps alternate.
        measure: Function that measures a group.
        folder: Existing folder of the file.
    """
    report.check_writable(folder)
    report.load_earlier_rows(folder)
    entries = [entry for group in groups for entry in group]
    report.rows = [row for entry in entries if (row := report.find_row(entry)) is not None]
    for group in groups:
        todo = [entry for entry in group if report.find_row(entry) is None]
        same = [e for e in entries if e.case.length == group[0].case.length and (e.to_checkpoint or e.to_default)]
        for row in measure(todo, same) if todo else ():
            report.rows.append(row)
            report.rows = [known for entry in entries if (known := report.find_row(entry)) is not None]
            report.save(folder)
    report.save(folder)


def _measure_steps(worker: Worker, repeats: int, memory: bool, notify: Callable[[str], None]) -> MeasureGroup:
    """Return a function that measures a group of table rows by running training steps in ``worker``.

    Args:
        worker: The process with the model.
        repeats: Number of timed steps of each entry; 0 runs a single step for its loss.
        memory: True to measure the memory of a step as well.
        notify: Called with text about the current measurement.
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
            rows[entry] = replace(rows[entry], **ask(entry, "measure_memory", "memory"))
        known = [entry for entry in references if repeats and entry not in rows]
        for turn in range(repeats + 1):  # the first turn warms up and gives the loss
            for entry in [*known, *todo]:
                answer = ask(entry, "measure_time", f"step {turn} of {repeats}")
                if turn and answer:
                    steps.setdefault(entry, []).append((answer["forward_s"], answer["backward_s"]))
                elif answer and entry in rows:
                    rows[entry] = replace(rows[entry], loss=answer["loss"], grad_norm=answer["grad_norm"])
        for entry, row in rows.items():
            if entry in failed:
                yield replace(entry.new_row(), error=failed[entry])
            else:
                yield _add_times_to_row(row, steps[entry], references, steps) if entry in steps else row

    return measure


def _add_times_to_row(
    row: TableRow,
    row_times: list[tuple[float, float]],
    references: Sequence[Entry],
    times_of_entries: dict[Entry, list[tuple[float, float]]],
) -> TableRow:
    compared: dict[str, Any] = {
        name: median_ratio(row_times, times_of_entries.get(entry, []))
        for name in ("to_checkpoint", "to_default")
        for entry in references
        if getattr(entry, name)
    }
    forward, backward = (statistics.median(part) for part in zip(*row_times, strict=True))
    return replace(row, forward_s=forward, backward_s=backward, **compared)


# --- the longest sequence ---------------------------------------------------------------------------------------------


MARGIN = 0.05
"""Fraction of the budget that a simulated step leaves free."""

TRIAL_SECONDS = 1800.0
"""Time limit of a measured trial, in seconds."""


def measure_longest_lengths(
    recipe: TrainingSettings, job: Job, options: TableOptions, settings: dict[str, Any], notify: Callable[[str], None]
) -> TableReport:
    """Return the table of longest sequences, from whole training steps of the recipe with its optimizer.

    Args:
        recipe: The recipe; each row of the table changes the schedule fields that its label names.
        job: Model of the recipe and its batch size.
        options: Options of the command line.
        settings: Settings on which the figures depend, as JSON values.
        notify: Called with text about the current trial.

    Raises:
        ArgumentError: No device budget is given, and the trials are simulated or run on a CPU.
    """
    device_bytes, host_bytes, disk_bytes = options.sizes
    budget, simulates = Budget(device_bytes, host_bytes, disk_bytes), options.method == "simulate"
    if budget.device_bytes is None and (simulates or choose_device(recipe.device).type == "cpu"):
        raise ArgumentError(
            "--table max-length needs --device-memory on a CPU and to simulate", fix="add --device-memory 80GiB"
        )
    notify("building the model")
    env, attempt = (_prepare_simulated_lengths if simulates else _prepare_measured_lengths)(recipe, job, budget)
    settings = {**settings, "budget": str(budget), "method": options.method}
    report = TableReport("max-length", options.command, settings, env)
    with interrupts.temporary_directory(dir=options.folder, prefix=".offload-") as scratch:
        entries = maxlen_entries(make_schedule(recipe.engine), scratch)
        groups = [[entry] for entry in entries if entry.case.mode in options.modes]
        measure_missing_rows(report, groups, search_longest(attempt, budget, notify), folder=options.folder)
    return report


def _prepare_measured_lengths(recipe: TrainingSettings, job: Job, budget: Budget) -> tuple[dict[str, Any], TryLength]:
    worker = Worker(job)
    try:
        env = _worker_environment(worker)
    finally:
        worker.close()

    def try_length(entry: Entry, length: int) -> Outcome:
        engine = recipe.engine.model_copy(update={**asdict(entry.case.schedule), "schedule": "fixed"})
        changed = recipe.model_copy(update={"engine": engine})
        prepare = partial(prepare_step, changed, str(choose_device(recipe.device)), budget)
        run = measured_trials(prepare, budget, timeout_seconds=TRIAL_SECONDS)
        return run(Shape(entry.case.mode, length, job.batch_size), lambda phase: None)

    return env, try_length


def _prepare_simulated_lengths(recipe: TrainingSettings, job: Job, budget: Budget) -> tuple[dict[str, Any], TryLength]:
    kernels = torch.device("cpu" if recipe.device == "cpu" else "cuda")
    prepare_libraries(kernels)
    recipe = with_best_precision(recipe)
    model = make_blueprint(recipe, kernels)
    env = describe_environment(model, job, torch.device("meta"))
    shortest = recipe_workload(recipe, model, task_of(recipe).min_row_tokens, kernels)

    def try_length(entry: Entry, length: int) -> Outcome:
        workload = replace(shortest, length=length, mode=entry.case.mode)
        found = simulate(workload, entry.case.schedule)
        outcome = Outcome(True, "", "", "", found.peak_bytes, found.host_bytes, found.disk_bytes, terms=found.terms)
        filled = (1 + MARGIN) * (budget.used_fraction(found.peak_bytes, found.host_bytes, found.disk_bytes) or 0)
        reason = f"a step needs {show_size(found.peak_bytes)} of device memory"
        return outcome if filled <= 1 else replace(outcome, fits=False, reason=reason)

    return env, try_length


TryLength = Callable[[Entry, int], Outcome]
"""``(entry, length) -> outcome``: runs or simulates a step."""


def search_longest(try_length: TryLength, budget: Budget, notify: Callable[[str], None]) -> MeasureGroup:
    """Return a function that finds, for each row of the table, the longest sequence that can be trained."""

    def measure(todo: Sequence[Entry], references: Sequence[Entry]) -> Iterator[TableRow]:
        for entry in todo:
            yield _search_longest_row(entry, try_length, budget, notify)

    return measure


def _search_longest_row(entry: Entry, try_length: TryLength, budget: Budget, notify: Callable[[str], None]) -> TableRow:
    fitted: dict[int, Outcome] = {}
    failed: dict[int, Outcome] = {}

    def try_and_record(length: int) -> Attempt:
        notify(f"{entry.label}: {length:,} tokens")
        outcome = try_length(entry, length)
        (fitted if outcome.fits else failed)[length] = outcome
        return Attempt(outcome.fits, budget.used_fraction(outcome.peak_bytes, outcome.host_bytes, outcome.disk_bytes))

    found = search_largest(try_and_record, LENGTHS).fits
    row = replace(entry.new_row(), max_length=found)
    if not found:
        return replace(row, error=f"{min(failed):,} tokens do not fit: {failed[min(failed)].reason}")
    best = fitted[found]
    return replace(
        row,
        peak_bytes=best.peak_bytes,
        host_bytes=best.host_bytes,
        disk_bytes=best.disk_bytes,
        terms=best.terms,
    )
