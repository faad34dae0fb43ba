"""The type of recipe for each objective."""

from __future__ import annotations

from streamtune.recipe.dpo import DpoRecipe
from streamtune.recipe.grpo import GrpoRecipe

from .schema import Recipe

__all__ = ["RECIPES", "objectives_with"]

RECIPES: dict[str, type[Recipe]] = {"sft": Recipe, "dpo": DpoRecipe, "grpo": GrpoRecipe}
"""Value of the key ``objective`` -> the recipe's type. A command of the same name trains it."""


def objectives_with(key: str) -> list[str]:
    """Return the objectives whose recipes have a key at their top level."""
    return [objective for objective, kind in RECIPES.items() if key in kind.model_fields]
