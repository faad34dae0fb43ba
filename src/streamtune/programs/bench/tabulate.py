"""Measure the tables of a benchmark: rows in groups, each saved as soon as it is measured, and not measured twice.

One process holds one model and enters one mode after the other, so a table costs the memory of one model and compares
the same weights. The steps that are compared in a group alternate, and a ratio is the median over these rounds.
The table of longest sequences searches the same way for every schedule.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from streamtune.base import interrupts
from streamtune.base.text import show_size
from streamtune.errors import ArgumentError, RunError
from streamtune.plan.budget import Attempt, Budget, Range, search_largest
from streamtune.plan.simulate.simulate import simulate
from streamtune.plan.simulate.workload import Mode
from streamtune.programs.bench.bench import paired
from streamtune.programs.bench.named_tables import TABLES, Wanted
from streamtune.programs.bench.subject import Job, Worker, env_of
from streamtune.programs.bench.tables import Entry, TableName, TableReport, TableRow, length_entries
from streamtune.programs.probe.prepare import prepare_step
from streamtune.programs.probe.trial import Outcome, Shape, run_trial
from streamtune.recipe.settings import TrainingSettings
from streamtune.run.device import choose_device, make_schedule, prepare_libraries
from streamtune.run.model import make_blueprint
from streamtune.run.plan import recipe_workload
from streamtune.run.precision import precise
from streamtune.schedule import Schedule
from streamtune.tasks import task_of

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


# --- the longest sequence ---------------------------------------------------------------------------------------------


MARGIN = 0.05
"""Part of a budget that is left free where a step is simulated."""

TRIAL_SECONDS = 1800.0
"""A step that takes longer does not fit."""


def lengths_report(
    recipe: TrainingSettings,
    job: Job,
    budget: Budget,
    method: str,
    *,
    modes: Sequence[Mode],
    folder: Path,
    command: str,
    asked: dict[str, Any],
    notify: Callable[[str], None],
) -> TableReport:
    """Make the table of longest sequences: whole training steps of the recipe, its optimizer included.

    Args:
        recipe: The recipe; the other schedules differ from its own in what their rows name.
        job: Its model, to measure.
        budget: Bytes a step may take.
        method: ``measure`` on the device at hand, each trial in a process of its own, or ``simulate`` one.
        modes: The modes that get rows.
        folder: Directory of the table's file; it exists.
        command: Command line that makes the table again.
        asked: Settings that the figures depend on, as JSON values.
        notify: Called with what is being tried.

    Raises:
        ArgumentError: There is no budget, and no device that has one.
    """
    if budget.device_bytes is None and (method == "simulate" or choose_device(recipe.device).type == "cpu"):
        raise ArgumentError("there is no device to fill", mend="add --device-memory 80GiB, the size to keep to")
    notify("building the model")
    make = _simulated_lengths if method == "simulate" else _measured_lengths
    env, attempt = make(recipe, job, budget)
    report = TableReport("max-length", command, {**asked, "budget": str(budget), "method": method}, env)
    with interrupts.temporary_directory(dir=folder, prefix=".offload-") as scratch:
        entries = length_entries(make_schedule(recipe.engine), scratch)
        groups = [[entry] for entry in entries if entry.case.mode in modes]
        fill(report, groups, longest_by(attempt, budget, notify), folder=folder)
    return report


def _measured_lengths(recipe: TrainingSettings, job: Job, budget: Budget) -> tuple[dict[str, Any], TryLength]:
    worker = Worker(job)
    try:
        env = worker.ask("env")
        if worker.failed:
            raise RunError(f"the model cannot be built: {worker.failed}")
    finally:
        worker.close()

    def attempt(entry: Entry, length: int) -> Outcome:
        engine = recipe.engine.model_copy(update={**asdict(entry.case.schedule), "schedule": "fixed"})
        changed = recipe.model_copy(update={"engine": engine})
        prepare = partial(prepare_step, changed, str(choose_device(recipe.device)), budget)
        return run_trial(prepare, Shape(entry.case.mode, length, job.batch_size), budget, seconds=TRIAL_SECONDS)

    return env, attempt


def _simulated_lengths(recipe: TrainingSettings, job: Job, budget: Budget) -> tuple[dict[str, Any], TryLength]:
    kernels = torch.device("cpu" if recipe.device == "cpu" else "cuda")
    prepare_libraries(kernels)
    recipe = precise(recipe)
    model = make_blueprint(recipe, kernels)
    env = env_of(model, job, torch.device("meta"))
    whole = recipe_workload(recipe, model, task_of(recipe).shortest, kernels)

    def attempt(entry: Entry, length: int) -> Outcome:
        workload = replace(whole, length=length, mode=entry.case.mode)
        found = simulate(workload, entry.case.schedule)
        outcome = Outcome(True, "", "", "", found.peak_bytes, found.host_bytes, found.disk_bytes, terms=found.terms)
        filled = (1 + MARGIN) * (budget.share_of(found.peak_bytes, found.host_bytes, found.disk_bytes) or 0)
        reason = f"a step takes {show_size(found.peak_bytes)} of the device"
        return outcome if filled <= 1 else replace(outcome, fits=False, reason=reason)

    return env, attempt


WITHIN = Range(first=2048, least=256, most=1 << 27, step=256, grain=64)
"""Tokens: where to begin, where to stop; a multiple of the grain."""

TryLength = Callable[[Entry, int], Outcome]
"""A step of so many tokens, real or simulated."""


def longest_by(attempt: TryLength, budget: Budget, notify: Callable[[str], None]) -> MeasureGroup:
    """Return a function that measures rows by a search over lengths.

    Args:
        attempt: Tries a length.
        budget: The budget that a step has to fit.
        notify: Called with what is being tried.
    """

    def measure(todo: Sequence[Entry], references: Sequence[Entry]) -> Iterator[TableRow]:
        for entry in todo:
            yield _longest(entry, attempt, budget, notify)

    return measure


def _longest(entry: Entry, attempt: TryLength, budget: Budget, notify: Callable[[str], None]) -> TableRow:
    fitted: dict[int, Outcome] = {}
    failed: dict[int, Outcome] = {}

    def tried(length: int) -> Attempt:
        notify(f"{entry.label}: {length:,} tokens")
        outcome = attempt(entry, length)
        (fitted if outcome.fits else failed)[length] = outcome
        return Attempt(outcome.fits, budget.share_of(outcome.peak_bytes, outcome.host_bytes, outcome.disk_bytes))

    found = search_largest(tried, WITHIN).fits
    row = replace(entry.new_row(), max_length=found)
    if not found:
        return replace(row, error=f"not even {min(failed):,} tokens: {failed[min(failed)].reason}")
    best = fitted[found]
    return replace(
        row,
        peak_bytes=best.peak_bytes,
        host_bytes=best.host_bytes,
        disk_bytes=best.disk_bytes,
        terms=best.terms,
    )
