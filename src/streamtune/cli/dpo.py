"""``streamtune dpo``: training on preferences, from a recipe to a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .options import HostfileOption, NprocOption, RecipeArgument, SetOption
from .training import AllowChangeOption, DryRunOption, OutputDirOption, ResumeOption, train_recipe

__all__ = ["dpo"]


def dpo(
    recipe: RecipeArgument,
    set_: SetOption = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = "auto",
    output_dir: OutputDirOption = None,
    allow_change: AllowChangeOption = None,
    nproc: NprocOption = None,
    hostfile: HostfileOption = None,
) -> None:
    """Train a model to prefer some completions to others."""
    train_recipe(
        "dpo",
        _import_room,
        recipe,
        set_ or [],
        dry_run=dry_run,
        resume=resume,
        output_dir=output_dir,
        allow_change=allow_change or [],
        nproc=nproc,
        hostfile=hostfile,
    )


def _import_room() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from streamtune.run.dpo import build_dpo, run_dpo

    return build_dpo, run_dpo
