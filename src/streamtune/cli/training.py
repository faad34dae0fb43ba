"""``streamtune sft``, ``dpo`` and ``grpo``: train a model from a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamtune.base.privacy import is_offline
from streamtune.errors import ArgumentError
from streamtune.recipe import LoadedRecipe

from .console import err, loading_libraries, out, print_note, print_title, set_command_needs_stdout
from .options import AllowCodeOption, HostfileOption, NprocOption, RecipeArgument, SetOption, read_recipe, recipe_name
from .programs import PARTS, import_object
from .rank_process import command_arguments, launch_ranks, make_watchdog, report_activity, set_up_rank
from .training_screens import print_banner, print_dry_run_end, print_outcome

if TYPE_CHECKING:
    from streamtune.train.progress import Listener, Listeners

DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Load model and data, print the model, schedule and steps that would run, and end without training.",
        show_default=False,
    ),
]
ResumeOption = Annotated[
    str,
    typer.Option(
        metavar="auto|never|PATH",
        help="What to do with an earlier run in the output directory. auto: resume it, if one exists. never: move it "
        "aside and start a new run. PATH: resume from this checkpoint.",
    ),
]
OutputDirOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory for checkpoints, metrics and the final model. [default: the recipe's output_dir]",
        show_default=False,
    ),
]
AllowChangeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Resume a run although KEY has changed since its start; other changes are refused. KEY is a recipe key "
        "or one of these names. `data`: the rows. `base`: files of model_name_or_path, which may be adapters. "
        "`adapter`: files of the base model of these adapters. `start`: files of adapter_name_or_path. "
        "`reference`: files of the reference model, or a teacher's file. `rewards`: source code of reward "
        "functions. Repeatable.",
        show_default=False,
    ),
]


def _make_training_command(objective: str, help_text: str) -> Callable[..., None]:
    """Return a command that trains recipes of one objective and refuses other recipes."""

    def train(
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
        settings = [*(set_ or []), *(["allow_code=true"] if allow_code else [])]
        settings += [f"output_dir={json.dumps(str(output_dir))}"] if output_dir else []
        loaded = read_recipe(recipe, settings, objective)
        set_command_needs_stdout(dry_run)  # a training run writes its results to files
        _check_trackers(loaded)
        if nproc is not None or hostfile is not None:
            raise typer.Exit(launch_ranks(nproc, hostfile, loaded.recipe.device))
        _train(loaded, resume, allow_change or [], dry_run)

    train.__doc__ = help_text
    return train


sft = _make_training_command("sft", "Train a model on the rows of a recipe: supervised fine-tuning (SFT).")
dpo = _make_training_command(
    "dpo", "Train a model to prefer chosen completions over rejected completions (DPO and related losses)."
)
grpo = _make_training_command(
    "grpo",
    "Train a model on completions that it writes itself and that reward functions score (GRPO and related losses).",
)


def _train(loaded: LoadedRecipe, resume: str, allow_change: Sequence[str], dry_run: bool) -> None:
    """Train, and exit with the exit code of the run; a dry run prints what would run, and returns."""
    environment = set_up_rank()
    print_title(f"{loaded.recipe.objective} {recipe_name(loaded.path)}", right="DRY RUN" if dry_run else "")
    try:
        with loading_libraries():
            from streamtune.run.build import build_run
            from streamtune.run.data import locate_errors
            from streamtune.run.ranks import leave_ranks
            from streamtune.run.train import train_run
        for note in loaded.notes:
            print_note(note)
        with locate_errors(loaded):
            callbacks = _load_callbacks(loaded, environment.is_main)
        with make_watchdog(environment) as watchdog:
            doing = report_activity(err.status, watchdog)
            run = build_run(
                loaded, resume=resume, allow_change=allow_change, dry_run=dry_run, notify=print_note, doing=doing
            )
            run.watchdog = watchdog
            print_banner(run)
            listeners = None if dry_run else _make_listeners(loaded, callbacks)
            try:
                outcome = None if dry_run else train_run(run, out, listeners)
            finally:
                if not dry_run and run.world.is_main:
                    import_object(PARTS["page of a run"])(run.directory.path)
            leave_ranks()  # inside the watchdog, which names a rank that does not arrive
    except KeyboardInterrupt:
        err.print("Stopped.")
        raise typer.Exit(130) from None
    if outcome is None:
        print_dry_run_end(run, command_arguments())
    else:
        print_outcome(run, outcome)
        if outcome.failure is not None:
            raise outcome.failure
        raise typer.Exit(outcome.exit_code)


def _check_trackers(loaded: LoadedRecipe) -> None:
    """Check that the trackers of the recipe are installed.

    Raises:
        ArgumentError: A tracker is not installed; ``where`` is the line of the recipe.
    """
    if not loaded.recipe.report_to:
        return
    try:
        import_object(PARTS["check trackers"])(loaded.recipe.report_to)
    except ArgumentError as error:
        error.where = loaded.key_origin("report_to")
        raise


def _load_callbacks(loaded: LoadedRecipe, is_main: bool) -> list[Listener]:
    """Return the recipe's callbacks on rank 0; other ranks import their code and return an empty list."""
    recipe = loaded.recipe
    if not recipe.callbacks:
        return []
    from streamtune.run.listeners import load_callbacks

    if recipe.allow_code and is_main:
        print_note(f"running the code of {', '.join(recipe.callbacks)}")
    return load_callbacks(
        recipe.callbacks, allow_code=recipe.allow_code, directory=loaded.path.parent.absolute(), is_main=is_main
    )


def _make_listeners(loaded: LoadedRecipe, callbacks: Sequence[Listener]) -> Listeners:
    from streamtune.train.progress import Listeners

    make = import_object(PARTS["trackers"])
    trackers = make(loaded.recipe.report_to, offline=is_offline(), notify=print_note, doing=err.status)
    return Listeners([trackers, *callbacks])
