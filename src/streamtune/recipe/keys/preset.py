"""The objective, and presets: values of several keys at once, which the keys of the file replace."""

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
"""Name -> keys and values. ``small_sft``: models of 3B to 7B parameters (arXiv 2412.13337): steps of thousands of rows
at a low rate, and neither warm-up nor decay."""

INSTEAD = {
    "train_batch_size": ("gradient_accumulation_steps", "tokens_per_batch", "batching"),
    "warmup_ratio": ("warmup_steps",),
    "warmup_steps": ("warmup_ratio",),
}
"""Key -> keys that decide the same: where one of them is given the preset does not."""


def with_preset(given: Any) -> Any:
    """Return a recipe's keys with those of its preset that it does not give; anything else as it is."""
    name = given.get("preset") if isinstance(given, dict) else None
    if not isinstance(name, str) or name not in PRESETS:
        return given
    added = {
        key: value
        for key, value in PRESETS[name].items()
        if key not in given and not any(other in given for other in INSTEAD.get(key, ()))
    }
    return {**given, **added}


def describe_preset(recipe: Any) -> str | None:
    """Return the keys that a recipe's preset sets, and those it sets to something else; None without a preset."""
    if recipe.preset is None:
        return None
    values = PRESETS[recipe.preset]
    kept = [f"{key} {value}" for key, value in values.items() if getattr(recipe, key) == value]
    replaced = [key for key, value in values.items() if getattr(recipe, key) != value]
    return f"{recipe.preset} sets {', '.join(kept) or 'nothing'}" + (
        f"; the recipe has its own {', '.join(replaced)}" if replaced else ""
    )


class ObjectiveKeys(Spec):
    """The objective, and the preset of its keys."""

    objective: Literal["sft", "dpo", "grpo"] = "sft"
    """Objective of the training: `sft` the rows as they are, `dpo` preferences between completions, `grpo` rewards. The
    command of that name implies it."""

    preset: Literal["small_sft"] | None = None
    """`sft`: set several keys, where the recipe does not give them. `small_sft` is for models of 3B to 7B (arXiv
    2412.13337): `train_batch_size: 3840`, `learning_rate: 2.0e-5`, `lr_scheduler_type: constant`, no warm-up. The
    banner and `plan` show what is set."""

    @model_validator(mode="before")
    @classmethod
    def _takes_its_preset(cls, given: Any) -> Any:
        return with_preset(given)


PRESET_RULES: Rules = (Clash({"preset": Not(None), "objective": Not("sft")}, "'preset: {preset}' is for sft", DELETE),)
