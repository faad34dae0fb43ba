"""Make the settings of the training loop from a recipe."""

from __future__ import annotations

from streamtune import train
from streamtune.recipe.schema import Recipe
from streamtune.schedule import Schedule
from streamtune.tasks.steps import StepPlan

__all__ = ["train_settings"]


def train_settings(recipe: Recipe, plan: StepPlan, schedule: Schedule) -> train.TrainSettings:
    """Return the settings of the training loop, with advice to print if memory runs out."""
    mend = _mend_of_the_schedule(recipe, schedule)
    if recipe.per_device_train_batch_size > 1:
        mend += "; then per_device_train_batch_size, with more gradient_accumulation_steps"
    mend += f"; then max_length (now {recipe.max_length:,})"
    if recipe.finetuning_type == "full":
        mend += "; or train adapters with finetuning_type: lora"
    elif recipe.finetuning_type == "lora":
        mend += "; or keep the frozen weights in fewer bits with finetuning_type: qlora"
    return train.TrainSettings(
        total_steps=plan.total_steps,
        steps_per_epoch=plan.steps_per_epoch,
        max_grad_norm=recipe.max_grad_norm,
        eval_steps=recipe.eval_steps,
        save_steps=recipe.save_steps,
        save_total_limit=recipe.save_total_limit,
        bf16=recipe.bf16,
        seed=recipe.seed,
        out_of_memory_mend=mend,
        on_nan=recipe.on_nan,
        max_skips=recipe.max_skips,
        on_oom=recipe.on_oom,
        save_async=recipe.save_async,
        metric_for_best_model=recipe.metric_for_best_model,
        greater_is_better=_greater_is_better(recipe),
        save_best_limit=recipe.save_best_limit if recipe.metric_for_best_model is not None else 0,
    )


def _greater_is_better(recipe: Recipe) -> bool:
    """Return True if a greater metric is better: as asked, or by the metric's name."""
    if recipe.greater_is_better is not None:
        return recipe.greater_is_better
    return not (recipe.metric_for_best_model or "loss").endswith("loss")


def _mend_of_the_schedule(recipe: Recipe, schedule: Schedule) -> str:
    """Return advice on the schedule for when memory ran out: none of it changes a result."""
    if recipe.engine.schedule == "auto":
        return (
            "leave the planner less, with engine.device_memory or a larger engine.margin (now "
            f"{recipe.engine.margin:g}): it predicted that this step fits; no result changes"
        )
    return (
        f"write engine.schedule: auto, and the planner finds what fits; or lower engine.chunk_size (now "
        f"{schedule.chunk_size:,}) or engine.head_chunk_size (now {schedule.head_chunk_size:,}); no result changes"
    )
