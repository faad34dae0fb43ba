"""The progress of a run, and the best of its evaluations: when a run ends early, and which checkpoints it keeps."""

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
class Progressed:
    """The progress of a run. Saved in every checkpoint, returned at the end."""

    step: int = 0
    """Optimizer steps taken."""
    tokens: int = 0
    """Input tokens trained on, without padding."""
    first_loss: float | None = None
    last_loss: float | None = None
    eval_loss: float | None = None
    """The newest held-out loss."""
    eval_due: bool = False
    """True if the evaluation at this step was interrupted and is still to be done."""
    sample_due: bool = False
    """True if the completions of the sample prompts at this step are still to be written."""
    skipped: int = 0
    """Steps without an update, because something was not finite."""
    best: float | None = None
    """The best value so far of the metric that ends a run early."""
    not_better: int = 0
    """Evaluations in a row whose metric was not better than ``best``."""
    ended_early: bool = False
    """True if the run is over before its last step."""
    best_evaluations: Sequence[Sequence[float]] = ()
    """The best values of ``metric_for_best_model`` (default: ``eval_loss``) and their steps, the best first."""

    @property
    def boundary(self) -> tuple[int, bool, bool]:
        """Step, and which interrupted work is due there: a checkpoint is saved once for each."""
        return self.step, self.eval_due, self.sample_due


def after_evaluation(
    state: Progressed, found: Mapping[str, Any], settings: TrainSettings, progress: Progress
) -> Progressed:
    """Return the state after an evaluation: with the best value so far, and whether the run ends early."""
    value = found.get(settings.metric_for_best_model or "")
    if settings.early_stopping_patience == 0 or value is None:
        return state
    gain = math.inf if state.best is None else value - state.best if settings.greater_is_better else state.best - value
    if gain > settings.early_stopping_threshold:
        return replace(state, best=value, not_better=0, ended_early=False)
    not_better = state.not_better + 1
    ended = not_better >= settings.early_stopping_patience and state.step < settings.total_steps
    if ended:
        progress.note(
            state.step,
            f"stopped early: {not_better} evaluations without a better {settings.metric_for_best_model} than "
            f"{state.best:.4g}",
        )
    return replace(state, not_better=not_better, ended_early=ended)


def among_the_best(state: Progressed, found: Mapping[str, Any], settings: TrainSettings) -> tuple[Progressed, bool]:
    """Return the state with the best evaluations updated, and True if this one is among them.

    Its checkpoint is then saved whatever ``save_steps`` says: later steps overwrite these weights.
    """
    value = found.get(settings.metric_for_best_model or "eval_loss")
    if value is None:
        return state, False
    limit = settings.save_best_limit or 1
    before = [tuple(each) for each in state.best_evaluations]
    ranked = sorted(
        [*before, (value, state.step)], key=lambda each: -each[0] if settings.greater_is_better else each[0]
    )
    best = ranked[:limit]
    is_best = (value, state.step) in best and settings.metric_for_best_model is not None
    return replace(state, best_evaluations=tuple(best)), is_best


def tell_lost_best(state: Progressed, settings: TrainSettings, run: RunDirectory, progress: Progress) -> None:
    """Show a note if an earlier evaluation was better than the last, and its weights are in no checkpoint."""
    if settings.metric_for_best_model is not None or not state.best_evaluations or state.eval_loss is None:
        return
    value, step = state.best_evaluations[0]
    if value < state.eval_loss and not checkpoint_path(run.checkpoints, int(step)).exists():
        progress.note(
            state.step,
            f"eval_loss was {value:.4g} at step {int(step)} and is {state.eval_loss:.4g}: the weights of that step are "
            "not kept; metric_for_best_model: eval_loss keeps the best ones of the next run",
        )


def tell_missing_metric(settings: TrainSettings, latest: Mapping[str, Any], step: int, progress: Progress) -> None:
    """Show a note if checkpoints are to be kept for a metric that is not measured."""
    name = settings.metric_for_best_model
    if name is not None and name not in latest:
        what = "keep checkpoints for" if settings.early_stopping_patience == 0 else "stop early by"
        known = did_you_mean(name, latest) or f"there are {', '.join(latest)}"
        progress.note(step, f"there is no metric '{name}' to {what}; {known}")
