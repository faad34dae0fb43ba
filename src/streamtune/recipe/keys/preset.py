"""Recipe keys ``objective`` and ``preset``, a set of key values that apply unless the recipe sets these keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from streamtune.recipe.rules import DELETE, Clash, Not, Rules, Spec

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small_sft": {
        "train_batch_size": 3840,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "warmup_steps": 0,
    },
}
"""Preset -> its keys and values. ``small_sft`` is for models of 3B to 7B parameters (arXiv 2412.13337): steps of
thousands of rows at a low, constant learning rate without warm-up."""

REPLACED_BY = {
    "train_batch_size": ("gradient_accumulation_steps", "tokens_per_batch", "batching"),
    "warmup_ratio": ("warmup_steps",),
    "warmup_steps": ("warmup_ratio",),
}
"""Key of a preset -> keys that replace it. If the recipe gives one of these, the preset's key does not apply."""


def add_preset_keys(recipe_keys: Any) -> Any:
    """Return the keys of a recipe, completed with the keys of its preset. Keys of the recipe take precedence.

    A value that is not a recipe with a preset is returned unchanged.
    """
    name = recipe_keys.get("preset") if isinstance(recipe_keys, dict) else None
    if not isinstance(name, str) or name not in PRESETS:
        return recipe_keys
    added = {
        key: value
        for key, value in PRESETS[name].items()
        if key not in recipe_keys and not any(other in recipe_keys for other in REPLACED_BY.get(key, ()))
    }
    return {**recipe_keys, **added}


def describe_preset(recipe: Any) -> str | None:
    """Return a text that lists the keys set by the preset, and the keys of the preset that the recipe sets itself; None
    without a preset."""
    if recipe.preset is None:
        return None
    values = PRESETS[recipe.preset]
    applied = [f"{key} {value}" for key, value in values.items() if getattr(recipe, key) == value]
    replaced = [key for key, value in values.items() if getattr(recipe, key) != value]
    return f"{recipe.preset} sets {', '.join(applied) or 'nothing'}" + (
        f"; the recipe has its own {', '.join(replaced)}" if replaced else ""
    )


class ObjectiveKeys(Spec):
    """Recipe keys that select the training objective, and a preset of values for other keys."""

    objective: Literal["sft", "dpo", "grpo"] = "sft"
    """Training objective. `sft`: train on the rows. `dpo`: train on preferences between completions. `grpo`: train on
    completions that the model writes, by their rewards, or with `loss_type: gkd` by the distribution of a teacher.
    Default: the objective of the command (`streamtune sft`, `dpo` or `grpo`)."""

    preset: Literal["small_sft"] | None = None
    """Only for `sft`: name of a set of values for several keys; keys in the recipe take precedence. `small_sft` is for
    models of 3B to 7B parameters (arXiv 2412.13337): `train_batch_size: 3840`, `learning_rate: 2.0e-5`,
    `lr_scheduler_type: constant`, no warm-up. The start of a run and `streamtune plan` print which values are used."""

    @model_validator(mode="before")
    @classmethod
    def _add_preset_keys(cls, given: Any) -> Any:
        return add_preset_keys(given)


PRESET_RULES: Rules = (
    Clash({"preset": Not(None), "objective": Not("sft")}, "'preset: {preset}' is only for sft", DELETE),
)
