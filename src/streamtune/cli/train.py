"""``streamtune sft``, ``dpo`` and ``grpo``: from a recipe to a trained model."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import HostfileOption, NprocOption, RecipeArgument, SetOption
from .training import AllowChangeOption, DryRunOption, OutputDirOption, ResumeOption, train_recipe

__all__ = ["dpo", "grpo", "sft"]

AllowCodeOption = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Let rewards run code: functions of your own, and what the model writes (`unit_tests`).",
        show_default=False,
    ),
]


def sft(
    recipe: RecipeArgument,
    set_: SetOption = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = "auto",
    output_dir: OutputDirOption = None,
    allow_change: AllowChangeOption = None,
    nproc: NprocOption = None,
    hostfile: HostfileOption = None,
) -> None:
    """Fine-tune a model on the rows of a recipe."""
    train_recipe("sft", recipe, set_, dry_run, resume, output_dir, allow_change, nproc, hostfile)


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
    train_recipe("dpo", recipe, set_, dry_run, resume, output_dir, allow_change, nproc, hostfile)


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
    settings = [*(set_ or []), *(["allow_code=true"] if allow_code else [])]
    train_recipe("grpo", recipe, settings, dry_run, resume, output_dir, allow_change, nproc, hostfile)
