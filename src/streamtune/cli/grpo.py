"""``streamtune grpo``: reinforcement learning from rewards, from a recipe to a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .options import RecipeArgument, SetOption
from .training import AllowChangeOption, DryRunOption, OutputDirOption, ResumeOption, train_recipe

__all__ = ["grpo"]


def grpo(
    recipe: RecipeArgument,
    set_: SetOption = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = "auto",
    output_dir: OutputDirOption = None,
    allow_change: AllowChangeOption = None,
) -> None:
    """Train a model on rewards of what it writes itself."""
    train_recipe(
        "grpo",
        _import_room,
        recipe,
        set_ or [],
        dry_run=dry_run,
        resume=resume,
        output_dir=output_dir,
        allow_change=allow_change or [],
    )


def _import_room() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from streamtune.recipe.build_grpo import build_grpo, run_grpo

    return build_grpo, run_grpo
