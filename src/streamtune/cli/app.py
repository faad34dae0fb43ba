"""Typer application: global options, and the commands in ``cli/programs.py``."""

from __future__ import annotations

from typing import Annotated

import typer

from streamtune import __version__
from streamtune.cli.options import HelpCommand, HelpGroup
from streamtune.cli.programs import COMMANDS, import_object

app = typer.Typer(
    name="streamtune",
    cls=HelpGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"streamtune {__version__}")
        raise typer.Exit


@app.callback()
def streamtune(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version, show_default=False
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show the traceback of an error. Accepted before or after the command.", show_default=False
        ),
    ] = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Use local files and caches only. Accepted before or after the command.",
            show_default=False,
        ),
    ] = False,
) -> None:
    """Fine-tune language models on very long sequences, with the exact gradient."""


groups = {"": app}
for name, heading, entry in COMMANDS:
    group, _, last = name.rpartition(" ")
    found = import_object(entry)
    if isinstance(found, typer.Typer):
        groups[name] = found
        groups[group].add_typer(found, name=last, rich_help_panel=heading)
    else:
        groups[group].command(last, cls=HelpCommand, rich_help_panel=heading or None)(found)
