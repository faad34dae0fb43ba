"""``streamtune grpo``: reinforcement learning from rewards, from a recipe to a trained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from .options import HostfileOption, NprocOption, RecipeArgument, SetOption
from .training import AllowChangeOption, DryRunOption, OutputDirOption, ResumeOption, train_recipe

__all__ = ["grpo"]

AllowCodeOption = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Let rewards run code: functions of your own, and what the model writes (`unit_tests`).",
        show_default=False,
    ),
]


def grpo(
    recipe: RecipeArgument,
    set_: SetOption = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = "auto",
    output_dir: OutputDirOption = None,
    allow_change: AllowChangeOption = None,
    nproc: NprocOption = None,
    hostfile: HostfileOption = None,
    allow_code: AllowCodeOption = False,
) -> None:
    """Train a model on rewards of what it writes itself."""
    train_recipe(
        "grpo",
        _import_room,
        recipe,
        [*(set_ or []), *(["allow_code=true"] if allow_code else [])],
        dry_run=dry_run,
        resume=resume,
        output_dir=output_dir,
        allow_change=allow_change or [],
        nproc=nproc,
        hostfile=hostfile,
    )


def _import_room() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from streamtune.run.grpo import build_grpo, run_grpo

    return build_grpo, run_grpo
