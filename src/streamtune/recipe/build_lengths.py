"""A recipe to the table of longest sequences: the same search for every schedule."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from streamtune import plan
from streamtune.errors import ArgumentError
from streamtune.plan.longest import Budget, length_entries, longest_by
from streamtune.plan.steps import Shape, StepBudget
from streamtune.plan.tables import Entry
from streamtune.plan.tabulate import fill
from streamtune.plan.trial import Outcome, run_trial
from streamtune.plan.worker import Worker
from streamtune.recipe.build import choose_device, make_schedule
from streamtune.recipe.build_steps import prepare_step
from streamtune.recipe.schema import Recipe

__all__ = ["measure_lengths"]

TRIAL_SECONDS = 1800.0
"""A step that takes longer does not fit."""


def lengths_report(
    recipe: Recipe, job: plan.Job, budget: Budget, command: str, asked: dict[str, Any], notify: Callable[[str], None]
) -> plan.TableReport:
    """The table before its rows.

    Raises:
        ArgumentError: There is no budget, and no device that has one.
    """
    if choose_device(recipe.device).type == "cpu" and budget.device_bytes is None:
        raise ArgumentError("on a CPU there is no device to fill", mend="add --device-memory 1GiB, the size to keep to")
    notify("building the model")
    worker = Worker(job)
    try:
        env = worker.ask("env")
    finally:
        worker.close()
    return plan.TableReport("max-length", command, {**asked, "budget": str(budget)}, env)


def measure_lengths(
    recipe: Recipe,
    job: plan.Job,
    budget: Budget,
    report: plan.TableReport,
    *,
    modes: Sequence[plan.Mode],
    folder: Path,
    notify: Callable[[str], None],
) -> None:
    """Fill the table by whole training steps of the recipe, optimizer included, each trial in a process of its own."""
    device = str(choose_device(recipe.device))
    limits = StepBudget(budget.device_bytes, budget.host_bytes, budget.disk_bytes)

    def attempt(entry: Entry, length: int) -> Outcome:
        engine = recipe.engine.model_copy(update={**asdict(entry.case.schedule), "schedule": "fixed"})
        prepare = partial(prepare_step, recipe.model_copy(update={"engine": engine}), "sft", device)
        shape = Shape(entry.case.mode, length, job.batch_size)
        return run_trial(prepare, shape, limits, seconds=TRIAL_SECONDS)

    with tempfile.TemporaryDirectory(dir=folder, prefix=".offload-") as scratch:
        entries = length_entries(make_schedule(recipe.engine), scratch)
        groups = [[entry] for entry in entries if entry.case.mode in modes]
        fill(report, groups, longest_by(attempt, budget, notify), folder=folder)
