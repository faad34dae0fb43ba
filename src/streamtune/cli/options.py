"""Command-line arguments and options that several commands share, and errors for unknown commands and options."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from streamtune.base.privacy import use_hub_caches_if_unreachable, use_hub_caches_only
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.recipe import RECIPES, LoadedRecipe, load_recipe, may_name_hub, shipped_names, shipped_recipes
from streamtune.recipe.aliases import ALIASES
from streamtune.recipe.mistakes import leaf_key_paths


def option(metavar: str | None, help: str, *names: str, min_value: int | None = None) -> Any:
    """Return a typer option whose help shows no default; without ``names`` it is named after the parameter."""
    return typer.Option(*names, metavar=metavar, help=help, min=min_value, show_default=False)


RecipeArgument = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", help="Recipe file (YAML), or the name of a shipped recipe.", show_default=False),
]
SetOption = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "Replace the value of a recipe key, such as `--set max_length=4096`; the recipe file is not changed. "
        "Repeatable.",
        "--set",
    ),
]
NprocOption = Annotated[
    int | None,
    option(
        "N",
        "Number of ranks (processes with one device each) to start on this machine, or on each machine of "
        "--hostfile. [default: the slots in --hostfile, otherwise one rank]",
        "--nproc",
    ),
]
HostfileOption = Annotated[
    Path | None,
    option(
        "FILE",
        "File that lists the machines to train on, one per line, as `HOST slots=N` for N ranks. They are reached over "
        "ssh. [default: only this machine]",
        "--hostfile",
    ),
]
AllowCodeOption = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Allow running Python code that the recipe names (callbacks, reward functions) and code that the "
        "model writes (reward `unit_tests`). The same as `allow_code: true` in the recipe.",
        show_default=False,
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Total number of devices to simulate, over all machines. [default: the recipe's sequence_parallel_size]",
        show_default=False,
    ),
]
NodesOption = Annotated[
    int | None,
    typer.Option(
        metavar="M",
        help="Number of machines to simulate, with --ranks / M devices each. [default: --ranks / 8 if that is a whole "
        "number, else 1]",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, option(None, "Print the result as one JSON document on stdout instead of text.", "--json")]


class HelpCommand(TyperCommand):
    """Typer command whose help shows no type for flags, and whose errors suggest the nearest option."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _remove_flag_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            ArgumentError: An option does not exist (``fix`` suggests another), or its value is not a number.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            raise (self._usage_error(ctx, error, given) or error) from None

    def _usage_error(self, ctx: Any, error: Exception, arguments: Sequence[str]) -> ArgumentError | None:
        """Return the error for an unknown option or a value that is not a number; None for other errors."""
        kind, param = type(error).__name__, getattr(error, "param", None)
        if kind == "NoSuchOption":
            name = str(error.option_name)  # type: ignore[attr-defined]
            options = [each for one in self.get_params(ctx) for each in one.opts if each.startswith("--")]
            fix = _nearest_option(name, options, arguments)
            return ArgumentError(f"unknown option '{name}'", where=ctx.command_path, fix=fix)
        if kind == "BadParameter" and param is not None and "valid integer" in str(error):
            name = param.opts[0]
            found = _option_value(name, arguments)
            return ArgumentError(f"{name} must be a whole number, found '{found}'", where=ctx.command_path)
        return None


class HelpGroup(TyperGroup):
    """Typer group whose help shows no type for flags, and whose errors suggest the nearest command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _remove_flag_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the command that the arguments name.

        Raises:
            ArgumentError: The command does not exist; ``fix`` suggests another.
        """
        name = args[0] if args else ""
        if name in self.commands or not name or name.startswith("-"):
            return super().resolve_command(ctx, args)
        fix = did_you_mean(name, self.commands) or f"`{ctx.command_path} --help` lists the commands"
        is_shipped = name in shipped_names()
        if is_shipped or name.endswith((".yaml", ".yml")):
            objective = load_recipe(name).recipe.objective if is_shipped else "sft"
            fix = f"name a command before the recipe, such as `{ctx.command_path} {objective} {name}`"
        raise ArgumentError(f"unknown command '{name}'", where=ctx.command_path, fix=fix)


def _nearest_option(name: str, options: Sequence[str], arguments: Sequence[str]) -> str:
    """Return advice for an unknown option: the recipe key of this name, or the nearest option or key.

    Args:
        name: Unknown option, such as ``--lr``.
        options: Options of the command.
        arguments: Arguments of the command, which may have a value for the option.
    """
    word = name.lstrip("-").replace("-", "_")
    keys = {key for kind in RECIPES.values() for key in leaf_key_paths(kind)} if "--set" in options else set()
    key = ALIASES.get(word, word)
    if key in keys:
        return f"write --set {key}={_option_value(name, arguments)}"
    words = {each.lstrip("-").replace("-", "_"): each for each in options}
    nearest = get_close_matches(word, [*words, *sorted(keys), *(ALIASES if keys else ())], n=1)
    if not nearest:
        return f"the command has {', '.join(options)}"
    if nearest[0] in words:
        return f"did you mean '{words[nearest[0]]}'?"
    return f"did you mean --set {ALIASES.get(nearest[0], nearest[0])}={_option_value(name, arguments)}?"


def _option_value(name: str, arguments: Sequence[str]) -> str:
    """Return the value that follows an option in the arguments; ``...`` if there is none."""
    for argument, following in zip(arguments, [*arguments[1:], "-"], strict=False):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and not following.startswith("-"):
            return following
    return "..."


def _remove_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def read_recipe(
    path: Path, overrides: Sequence[str] | None, objective: str | None = None, *, uses_hub: bool = False
) -> LoadedRecipe:
    """Load a recipe, and set environment variables that libraries read when they are imported.

    Args:
        path: Recipe file, or the name of a shipped recipe.
        overrides: Overrides of recipe keys, each ``key=value``.
        objective: Objective of the command; a recipe of another objective is refused.
        uses_hub: True if the command may use the hub although the recipe names nothing on it.

    Raises:
        RecipeError: The file or a setting is wrong.
    """
    loaded = load_recipe(path, overrides or [], objective)
    if uses_hub or may_name_hub(loaded.recipe):
        use_hub_caches_if_unreachable()
    else:
        use_hub_caches_only()
    let_idle_threads_sleep()
    return loaded


def recipe_name(path: Path) -> str:
    """Return the name of a shipped recipe; for any other recipe file, its path."""
    return next((recipe.name for recipe in shipped_recipes() if recipe.path == path), str(path))


def let_idle_threads_sleep() -> None:
    """Let idle OpenMP threads sleep instead of spin; has an effect only before torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
