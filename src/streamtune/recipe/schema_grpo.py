"""The keys of reinforcement learning with group advantages, beside those every recipe has."""

from __future__ import annotations

from typing import Literal

from .schema import Recipe

__all__ = ["GrpoRecipe"]


class GrpoRecipe(Recipe):
    """Everything a run of reinforcement learning depends on."""

    objective: Literal["grpo"] = "grpo"
    """What is trained for: rewards of completions that the model itself writes."""
