"""The recipe of ``streamtune dpo``: what preference training adds to the keys of fine-tuning."""

from __future__ import annotations

from typing import Literal

from streamtune.recipe.keys.preferences import DPO_RULES, ROW_RULES
from streamtune.recipe.schema import Recipe
from streamtune.recipe.settings import PreferenceSettings


class DpoRecipe(PreferenceSettings, Recipe):
    """Everything a run of preference training depends on."""

    objective: Literal["dpo"] = "dpo"
    """Objective of the training: preferences between completions of a prompt."""

    rules = (*Recipe.rules, *ROW_RULES, *DPO_RULES)
