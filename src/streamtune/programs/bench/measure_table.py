"""Measure the tables of ``streamtune bench --table``, and save every finished row.

One process builds the model once and prepares it for each training method in turn, so that all methods have the same
weights. Rows are measured in groups. The rows of a group take turns with their timed steps, and a ratio is the median
over the turns. The table ``max-length`` is different: it searches the longest sequence for every schedule.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from streamtune import train
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
from streamtune.run.model import make_meta_model
from streamtune.run.plan import recipe_workload
from streamtune.run.weight_choices import with_best_precision
from streamtune.schedule import Schedule
from streamtune.tasks import task_of
from streamtune.tasks.steps import count_micro_batches

MeasureGroup = Callable[[Sequence[Entry], Sequence[Entry]], Iterator[TableRow]]
"""Function ``(entries, references) -> rows``: measure entries, with times relative to the reference entries."""


@dataclass(frozen=True)
class TableOptions:
    """Command-line options of ``streamtune bench --table``.

    Attributes:
        lengths: Sequence lengths in tokens; for ``prefix-sharing``, prompt lengths.
        modes: Training methods to compare; ``ablation`` and ``prefix-sharing`` do not use them.
        repeats: Number of timed steps of each row.
        folder: Existing folder for the files of the table.
        command: Command line that reproduces the table.
        method: Way in which the table ``max-length`` tests a length: ``measure`` or ``simulate``.
        sizes: Memory budgets of ``max-length`` in bytes, for device, host and disk; None if not given.
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
    """Measure a table other than ``max-length``; rows in the table's JSON file are not measured again.

    Args:
        schedule: Schedule of streaming.
        settings: Settings that affect the measurements, as JSON values.
        notify: Callback for text about the current measurement.
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
    """Measure the rows that the report's JSON file lacks, and write the file after each row.

    Args:
        report: Report without rows.
        groups: Rows to measure, in groups; the rows of a group take turns with their timed steps.
        folder: Existing folder of the file.
    """
    report.check_writable(folder)
    report.load_earlier_rows(folder)
    entries = [entry for group in groups for entry in group]
    report.rows = [row for entry in entries if (row := report.find_row(entry)) is not None]
    for group in groups:
        unmeasured = [entry for entry in group if report.find_row(entry) is None]
        same = [e for e in entries if e.case.length == group[0].case.length and (e.to_checkpoint or e.to_default)]
        for row in measure(unmeasured, same) if unmeasured else ():
            report.rows.append(row)
            report.rows = [known for entry in entries if (known := report.find_row(entry)) is not None]
            report.save(folder)
    report.save(folder)


def _measure_steps(worker: Worker, repeats: int, memory: bool, notify: Callable[[str], None]) -> MeasureGroup:
    """Return a function that measures a group of table rows by running training steps in ``worker``.

    Args:
        repeats: Number of timed steps of each row; 0 runs a single step for its loss.
        memory: True to measure the memory of a step too.
        notify: Callback for text about the current measurement.
    """

    def measure(entries: Sequence[Entry], references: Sequence[Entry]) -> Iterator[TableRow]:
        rows = {entry: entry.new_row() for entry in entries}
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

        for entry in entries if memory else ():
            rows[entry] = replace(rows[entry], **ask(entry, "measure_memory", "memory"))
        known = [entry for entry in references if repeats and entry not in rows]
        for turn in range(repeats + 1):  # the first turn warms up and gives the loss
            for entry in [*known, *entries]:
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
"""Fraction by which simulated memory is increased before it is compared with the budget."""

TRIAL_SECONDS = 1800.0
"""Time limit of a measured trial, in seconds."""


def measure_longest_lengths(
    recipe: TrainingSettings, job: Job, options: TableOptions, settings: dict[str, Any], notify: Callable[[str], None]
) -> TableReport:
    """Return the table ``max-length``: the longest sequence that fits the memory budget, for each schedule.

    Each length is tested by a whole training step, including the optimizer, which is measured or simulated.

    Args:
        recipe: Recipe; each row of the table changes the schedule fields that the row's label names.
        settings: Settings that affect the results, as JSON values.
        notify: Callback for text about the current trial.

    Raises:
        ArgumentError: No device memory budget is given, and the trials are simulated or run on a CPU.
    """
    device_bytes, host_bytes, disk_bytes = options.sizes
    budget, simulates = Budget(device_bytes, host_bytes, disk_bytes), options.method == "simulate"
    if budget.device_bytes is None and (simulates or choose_device(recipe.device).type == "cpu"):
        raise ArgumentError(
            "--table max-length needs --device-memory if it simulates or runs on a CPU", fix="add --device-memory 80GiB"
        )
    notify("building the model")
    env, attempt = (_prepare_simulated_lengths if simulates else _prepare_measured_lengths)(recipe, job, budget)
    settings = {**settings, "budget": str(budget), "method": options.method}
    if (count := count_micro_batches(recipe, train.WORLD)) > 1:  # gradients of the first wait during the second
        settings["micro_batches"] = count
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
    model = make_meta_model(recipe, kernels)
    env = describe_environment(model, job, torch.device("meta"))
    shortest = recipe_workload(recipe, model, task_of(recipe).min_row_tokens, kernels)

    def try_length(entry: Entry, length: int) -> Outcome:
        workload = replace(shortest, length=length, mode=entry.case.mode)
        found = simulate(workload, entry.case.schedule)
        outcome = Outcome(True, "", "", "", found.peak_bytes, found.host_bytes, found.disk_bytes, terms=found.terms)
        needs = (
            ("device memory", found.peak_bytes, budget.device_bytes),
            ("host memory", found.host_bytes, budget.host_bytes),
            ("disk space", found.disk_bytes, budget.disk_bytes),
        )
        reasons = [
            f"a step needs {show_size(used)} of {name}"
            for name, used, limit in needs
            if limit is not None and (1 + MARGIN) * used > limit
        ]
        return replace(outcome, fits=False, reason=" and ".join(reasons)) if reasons else outcome

    return env, try_length


TryLength = Callable[[Entry, int], Outcome]
"""Function ``(entry, length) -> outcome`` that runs or simulates a training step."""


def search_longest(try_length: TryLength, budget: Budget, notify: Callable[[str], None]) -> MeasureGroup:
    """Return a function that finds, for each row of the table, the longest sequence that fits ``budget``."""

    def measure(entries: Sequence[Entry], references: Sequence[Entry]) -> Iterator[TableRow]:
        for entry in entries:
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
