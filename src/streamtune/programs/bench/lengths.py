"""Make the table of longest sequences of a recipe: the same search for every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from streamtune.base import interrupts
from streamtune.base.sizes import show_size
from streamtune.errors import ArgumentError, RunError
from streamtune.plan.budget import Budget
from streamtune.plan.search import Attempt, Range, search_largest
from streamtune.plan.simulate.simulate import simulate
from streamtune.plan.simulate.workload import Mode
from streamtune.programs.bench.entries import length_entries
from streamtune.programs.bench.subject import Job, env_of
from streamtune.programs.bench.tables import Entry, TableReport, TableRow
from streamtune.programs.bench.tabulate import MeasureGroup, fill
from streamtune.programs.bench.worker import Worker
from streamtune.programs.probe.prepare import prepare_step
from streamtune.programs.probe.steps import Shape
from streamtune.programs.probe.trial import Outcome, run_trial
from streamtune.recipe.schema import Recipe
from streamtune.run.device import choose_device, make_schedule, prepare_libraries
from streamtune.run.model import make_blueprint
from streamtune.run.plan import recipe_workload
from streamtune.run.precision import precise
from streamtune.tasks import task_of

MARGIN = 0.05
"""Part of a budget that is left free where a step is simulated."""

TRIAL_SECONDS = 1800.0
"""A step that takes longer does not fit."""


def lengths_report(
    recipe: Recipe,
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
    make = _simulated if method == "simulate" else _measured
    env, attempt = make(recipe, job, budget)
    report = TableReport("max-length", command, {**asked, "budget": str(budget), "method": method}, env)
    with interrupts.temporary_directory(dir=folder, prefix=".offload-") as scratch:
        entries = length_entries(make_schedule(recipe.engine), scratch)
        groups = [[entry] for entry in entries if entry.case.mode in modes]
        fill(report, groups, longest_by(attempt, budget, notify), folder=folder)
    return report


def _measured(recipe: Recipe, job: Job, budget: Budget) -> tuple[dict[str, Any], TryLength]:
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


def _simulated(recipe: Recipe, job: Job, budget: Budget) -> tuple[dict[str, Any], TryLength]:
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
