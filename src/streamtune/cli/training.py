"""``streamtune sft``, ``dpo`` and ``grpo``: from a recipe to a trained model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from streamtune.base.privacy import is_offline, plain
from streamtune.errors import ArgumentError
from streamtune.recipe import LoadedRecipe

from .console import err, loading_libraries, need_output, out
from .options import AllowCodeOption, HostfileOption, NprocOption, RecipeArgument, SetOption, read_recipe
from .programs import PARTS, load
from .rank_process import enter_rank, launch_ranks, shown, watch
from .training_screens import print_banner, print_outcome

if TYPE_CHECKING:
    from streamtune.train.progress import Listener, Listeners

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Load everything, say what would run, and stop.", show_default=False)
]
ResumeOption = Annotated[
    str,
    typer.Option(
        metavar="auto|never|PATH",
        help="Go on where the run in the output directory stopped, start anew, or go on from a checkpoint.",
    ),
]
OutputDirOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the run.", show_default=False)]
AllowChangeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Go on though this differs from the start of the run: a key of the recipe, `data`, or files that are "
        "read again: `base` (the model), `adapter` (the base its adapters name), `start` (the adapters it starts "
        "from), `reference`, `rewards` (source of reward functions). May be given several times.",
        show_default=False,
    ),
]


def _command(objective: str, text: str) -> Callable[..., None]:
    """Return the command that trains a recipe of an objective, and refuses others; ``text`` is its help."""

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
        need_output(dry_run)  # what is trained is in files
        _check_trackers(loaded)
        if nproc is not None or hostfile is not None:
            raise typer.Exit(launch_ranks(nproc, hostfile, loaded.recipe.device))
        _train(loaded, resume, allow_change or [], dry_run)

    train.__doc__ = text
    return train


sft = _command("sft", "Fine-tune a model on the rows of a recipe.")
dpo = _command("dpo", "Train a model to prefer some completions to others.")
grpo = _command("grpo", "Train a model on rewards of what it writes itself.")


def _train(loaded: LoadedRecipe, resume: str, allow_change: Sequence[str], dry_run: bool) -> None:
    """Train, and exit with the exit code; a dry run prints what would run, and returns."""
    environment = enter_rank()
    try:
        with loading_libraries():
            from streamtune.run.build import build_run
            from streamtune.run.data import blame_recipe
            from streamtune.run.ranks import leave_ranks
            from streamtune.run.train import train_run
        for note in loaded.notes:
            _note(note)
        with blame_recipe(loaded):
            callbacks = _load_callbacks(loaded, environment.is_main)
        with watch(environment) as watchdog:
            doing = shown(err.status, watchdog)
            run = build_run(
                loaded, resume=resume, allow_change=allow_change, dry_run=dry_run, notify=_note, doing=doing
            )
            run.watchdog = watchdog
            print_banner(run)
            listeners = None if dry_run else _listeners(loaded, callbacks)
            try:
                outcome = None if dry_run else train_run(run, out, listeners)
            finally:
                if not dry_run and run.world.is_main:
                    load(PARTS["page of a run"])(run.directory.path)
            leave_ranks()  # while the watchdog still looks: a rank that does not come is named
    except KeyboardInterrupt:
        err.print("Stopped.")
        raise typer.Exit(130) from None
    if outcome is not None:
        print_outcome(run, outcome)
        if outcome.failure is not None:
            raise outcome.failure
        raise typer.Exit(outcome.exit_code)


def _check_trackers(loaded: LoadedRecipe) -> None:
    """Refuse trackers that are not installed, before anything is loaded.

    Raises:
        ArgumentError: With the line of the recipe.
    """
    if not loaded.recipe.report_to:
        return
    try:
        load(PARTS["check trackers"])(loaded.recipe.report_to)
    except ArgumentError as error:
        error.where = loaded.where("report_to")
        raise


def _load_callbacks(loaded: LoadedRecipe, main: bool) -> list[Listener]:
    """Return the callbacks of the recipe; on ranks other than 0 they are imported alone."""
    recipe = loaded.recipe
    if not recipe.callbacks:
        return []
    from streamtune.run.listeners import load_callbacks

    if recipe.allow_code and main:
        _note(f"running the code of {', '.join(recipe.callbacks)}")
    return load_callbacks(
        recipe.callbacks, allow_code=recipe.allow_code, directory=loaded.path.parent.absolute(), main=main
    )


def _listeners(loaded: LoadedRecipe, callbacks: Sequence[Listener]) -> Listeners:
    """Return what is told how the run goes on: trackers, then callbacks."""
    from streamtune.train.progress import Listeners

    make = load(PARTS["trackers"])
    trackers = make(loaded.recipe.report_to, offline=is_offline(), notify=_note, doing=err.status)
    return Listeners([trackers, *callbacks])


def _note(text: str) -> None:
    err.print(Text.assemble(("note", "yellow"), f": {plain(text)}"), soft_wrap=True)
