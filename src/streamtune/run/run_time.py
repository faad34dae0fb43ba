"""Prediction of the time of a whole run from the planned time of its longest step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamtune.tasks.steps import RowCost

if TYPE_CHECKING:
    from streamtune.run.train import Run


def predict_run_seconds(run: Run) -> float | None:
    """Return the predicted seconds of the remaining training steps.

    The planned seconds of the longest step are scaled by the cost of all rows: ``seconds = step_seconds * epochs *
    sum(cost of all rows) / (rows per step * cost of the longest row)``, divided by the share of positions that are not
    padding.

    Returns:
        Seconds, without evaluations, samples and checkpoints. None if no step was planned, if the rows of a step are
            not known before the run (streamed, weighted or selected rows; GRPO), or if the weights are sharded.
    """
    memory, plan, recipe = run.streamed.memory, run.plan, run.recipe
    if memory is None or plan.steps_per_epoch is None or run.weights_are_sharded:
        return None
    if recipe.objective == "grpo" or recipe.select_rows is not None or run.batches.mixture is not None:
        return None
    cost = RowCost.from_model(run.model)
    costs = cost.per_token * run.batches.lengths() + cost.per_square * run.batches.squared_lengths()
    if not len(costs):
        return None
    epochs = (plan.total_steps - run.first_step) / plan.steps_per_epoch
    filled = 1.0 if run.batch_facts is None else 1 - run.batch_facts.padding
    return float(memory.step_seconds * epochs * costs.sum() / (run.start.rows_per_step * costs.max() * filled))
