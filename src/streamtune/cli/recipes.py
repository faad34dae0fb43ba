"""``streamtune recipes`` and ``streamtune schema``: the recipes that come with StreamTune, and the schema of all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.syntax import Syntax
from rich.text import Text

from streamtune.errors import ArgumentError
from streamtune.recipe import json_schema, read_shipped, shipped_recipes, with_schema

from .console import err, out, print_json, print_rows
from .options import HelpCommand, HelpGroup, JsonOption

__all__ = ["recipes", "schema"]

recipes = typer.Typer(
    cls=HelpGroup, help="List, show and copy the recipes that come with StreamTune.", no_args_is_help=True
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A name that `ls` lists.", show_default=False)]


@recipes.command("ls", cls=HelpCommand)
def list_recipes(json: JsonOption = False) -> None:
    """List the shipped recipes."""
    shipped = shipped_recipes()
    if json:
        print_json([{"name": recipe.name, "summary": recipe.summary, "path": str(recipe.path)} for recipe in shipped])
        return
    print_rows(((recipe.name, recipe.summary) for recipe in shipped), name_style="bold", indent="")


@recipes.command("show", cls=HelpCommand)
def show_recipe(name: NameArgument) -> None:
    """Print a shipped recipe."""
    text = read_shipped(name).text
    if out.is_terminal:
        out.print(Syntax(text, "yaml", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        print(text, end="")


@recipes.command("copy", cls=HelpCommand)
def copy_recipe(
    name: NameArgument,
    dest: Annotated[
        Path | None, typer.Argument(metavar="[DEST]", help="File or folder; NAME.yaml without it.", show_default=False)
    ] = None,
) -> None:
    """Write a shipped recipe to a file of your own. Never overwrites."""
    recipe = read_shipped(name)
    dest = dest or Path()
    if dest.is_dir():
        dest /= f"{recipe.name}.yaml"
    try:
        with dest.open("x", encoding="utf-8") as file:
            file.write(with_schema(recipe.text, dest.parent))
    except FileExistsError:
        raise ArgumentError(
            "the file is there already; it is left as it was",
            where=str(dest),
            mend=f"`streamtune recipes copy {recipe.name} OTHER.yaml`",
        ) from None
    except OSError as error:
        mend = f"make the folder first: `mkdir -p {dest.parent}`" if not dest.parent.is_dir() else ""
        raise ArgumentError(f"cannot be written: {error.strerror}", where=str(dest), mend=mend) from None
    err.print(Text.assemble("wrote ", (str(dest), "bold"), f"; train with `streamtune sft {dest}`"), soft_wrap=True)


def schema() -> None:
    """Print the JSON schema of recipes: every key, its type, its default, what it does."""
    print_json(json_schema())
