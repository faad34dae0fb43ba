"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from streamtune.base.privacy import leave_an_unreachable_hub, stay_off_the_hub
from streamtune.recipe import LoadedRecipe, load_recipe, names_a_hub


def option(metavar: str | None, help: str, *names: str, least: int | None = None) -> Any:
    """Return an option whose default is not in the help; without ``names`` it is named as its parameter."""
    return typer.Option(*names, metavar=metavar, help=help, min=least, show_default=False)


RecipeArgument = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe (YAML), or the name of a shipped one.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    option("KEY=VALUE", "Change a key of the recipe: `--set max_length=4096`. May be given several times.", "--set"),
]
NprocOption = Annotated[
    int | None, option("N", "Train in N ranks on this machine (or on each host of the hostfile).", "--nproc")
]
HostfileOption = Annotated[
    Path | None,
    option("FILE", "Train on these machines, reached over ssh: a line `HOST slots=N` for each.", "--hostfile"),
]
AllowCodeOption = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Let code run that the recipe names: callbacks, rewards of your own, and what the model writes "
        "(`unit_tests`).",
        show_default=False,
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Devices in all, of every node; simulated.", show_default=False),
]
NodesOption = Annotated[
    int | None,
    typer.Option(metavar="M", help="Machines they are on; else one for every 8.", show_default=False),
]
JsonOption = Annotated[bool, option(None, "Print one JSON document on stdout.", "--json")]


class HelpCommand(TyperCommand):
    """A command whose help shows no type for a flag, which takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, flags with an empty type."""
        return _without_flag_types(super().get_params(ctx))


class HelpGroup(TyperGroup):
    """A group of commands whose help shows no type for a flag."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, flags with an empty type."""
        return _without_flag_types(super().get_params(ctx))


def _without_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def read_recipe(
    path: Path, settings: Sequence[str] | None, objective: str | None = None, *, connects: bool = False
) -> LoadedRecipe:
    """Read a recipe, and set the environment of the libraries, which are imported later.

    Args:
        path: The file.
        settings: Overrides of the recipe, each ``key=value``.
        objective: Objective of the command; a recipe of another objective is refused.
        connects: The command may use the hub although the recipe names none.

    Raises:
        RecipeError: Anything wrong with the file or the settings.
    """
    loaded = load_recipe(path, settings or [], objective)
    if connects or names_a_hub(loaded.recipe):
        leave_an_unreachable_hub()
    else:
        stay_off_the_hub()
    wait_passively()
    return loaded


def wait_passively() -> None:
    """Let waiting threads sleep: spinning ones starve each other on shared cores. Read when torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
