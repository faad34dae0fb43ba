"""Progress of a run, early stopping, and the steps with the best evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamtune.errors import did_you_mean
from streamtune.train.checkpoint import checkpoint_path
from streamtune.train.progress import Progress
from streamtune.train.rundir import RunDirectory
from streamtune.train.step import TrainSettings


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run, saved in every checkpoint and returned at the end."""

    step: int = 0
    """Number of optimizer steps taken."""
    tokens: int = 0
    """Number of input tokens trained on, without padding."""
    first_loss: float | None = None
    last_loss: float | None = None
    eval_loss: float | None = None
    """Latest evaluation loss."""
    eval_due: bool = False
    """True if the evaluation after this step has not finished."""
    sample_due: bool = False
    """True if the sample prompts have not been completed after this step."""
    skipped: int = 0
    """Number of steps without an update, because a loss or gradient was not finite."""
    overflows: int = 0
    """Number of steps without an update, because a gradient overflowed float16; not counted in ``skipped``."""
    best: float | None = None
    """Best value so far of ``ranked_by``, for early stopping."""
    not_better: int = 0
    """Number of consecutive evaluations that did not improve ``best``."""
    ended_early: bool = False
    best_evaluations: Sequence[Sequence[float]] = ()
    """(value of ``ranked_by``, step) of the best evaluations, best first."""
    ranked_by: str | None = None
    """Metric that ranks evaluations: ``metric_for_best_model`` or ``eval_loss``; None in checkpoints of older runs."""
    greater_is_better: bool | None = None

    @property
    def checkpoint_key(self) -> tuple[int, bool, bool]:
        """(``step``, ``eval_due``, ``sample_due``): at most one checkpoint is saved with each of these values."""
        return self.step, self.eval_due, self.sample_due


def rank_by_current_metric(state: RunProgress, settings: TrainSettings, progress: Progress) -> RunProgress:
    """Return ``state`` of a resumed run; earlier evaluations are forgotten if ``settings`` rank by another metric."""
    before, now = (state.ranked_by, state.greater_is_better), (settings.ranked_by, settings.greater_is_better)
    if state.ranked_by is not None and before != now and (state.best is not None or state.best_evaluations):
        kinds = [f"the {'greatest' if greater else 'smallest'} {name}" for name, greater in (before, now)]
        progress.report_note(
            state.step,
            f"{kinds[1]} is now the best, before it was {kinds[0]}: evaluations are ranked from here on",
        )
        state = replace(state, best=None, not_better=0, ended_early=False, best_evaluations=())
    return replace(state, ranked_by=settings.ranked_by, greater_is_better=settings.greater_is_better)


def update_early_stopping(
    state: RunProgress, metrics: Mapping[str, Any], settings: TrainSettings, progress: Progress
) -> RunProgress:
    """Return ``state`` with the fields for early stopping updated after an evaluation.

    Args:
        state: State before the evaluation.
        metrics: Metrics of the evaluation.
        settings: Settings of the run.
        progress: Output, for a note if the run stops early.
    """
    value = metrics.get(settings.metric_for_best_model or "")
    if settings.early_stopping_patience == 0 or value is None:
        return state
    gain = math.inf if state.best is None else value - state.best if settings.greater_is_better else state.best - value
    if gain > settings.early_stopping_threshold:
        return replace(state, best=value, not_better=0, ended_early=False)
    not_better = state.not_better + 1
    ended = not_better >= settings.early_stopping_patience and state.step < settings.total_steps
    if ended:
        progress.report_note(
            state.step,
            f"stopped early: {settings.metric_for_best_model} was not better than {state.best:.4g} in the last "
            f"{not_better} evaluations",
        )
    return replace(state, not_better=not_better, ended_early=ended)


def update_best_evaluations(
    state: RunProgress, metrics: Mapping[str, Any], settings: TrainSettings
) -> tuple[RunProgress, bool]:
    """Return ``state`` with ``best_evaluations`` updated, and True if this evaluation's checkpoint must be saved now.

    It must be saved if ``metric_for_best_model`` is set and this evaluation is among the best.
    """
    value = metrics.get(settings.ranked_by)
    if value is None:
        return state, False
    limit = settings.save_best_limit or 1
    pairs = [*(tuple(pair) for pair in state.best_evaluations), (value, state.step)]
    best = sorted(pairs, key=lambda pair: -pair[0] if settings.greater_is_better else pair[0])[:limit]
    is_best = (value, state.step) in best and settings.metric_for_best_model is not None
    return replace(state, best_evaluations=tuple(best)), is_best


def note_unsaved_best(state: RunProgress, settings: TrainSettings, run: RunDirectory, progress: Progress) -> None:
    """Show a note if an earlier evaluation was better than the last, and its checkpoint was not saved."""
    if settings.metric_for_best_model is not None or not state.best_evaluations or state.eval_loss is None:
        return
    value, step = state.best_evaluations[0]
    if value < state.eval_loss and not checkpoint_path(run.checkpoints, int(step)).exists():
        progress.report_note(
            state.step,
            f"eval_loss was best at step {int(step)} ({value:.4g}, now {state.eval_loss:.4g}), but no checkpoint has "
            "those weights; next time set metric_for_best_model: eval_loss to keep the best",
        )


def note_missing_metric(settings: TrainSettings, latest: Mapping[str, Any], step: int, progress: Progress) -> None:
    """Show a note if ``metric_for_best_model`` names a metric that is not measured.

    Args:
        settings: Settings of the run.
        latest: Record of the step with the metrics of its evaluation; the step's own record may be missing.
        step: Number of the step.
        progress: Output.
    """
    name = settings.metric_for_best_model
    is_step_measured = "lr" in latest and not latest.get("skipped")
    if name is not None and name not in latest and (is_step_measured or name.startswith("eval_")):
        use = "keep checkpoints by" if settings.early_stopping_patience == 0 else "stop early by"
        suggestion = did_you_mean(name, latest) or f"metrics: {', '.join(latest)}"
        progress.report_note(step, f"unknown metric '{name}' to {use}; {suggestion}")
