"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["HostfileOption", "JsonOption", "NprocOption", "RecipeArgument", "SetOption"]

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe (YAML).", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the recipe: `--set max_length=4096`. May be given several times.",
        show_default=False,
    ),
]
NprocOption = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        metavar="N",
        help="Train in N ranks on this machine (or on each host of the hostfile).",
        show_default=False,
    ),
]
HostfileOption = Annotated[
    Path | None,
    typer.Option(
        "--hostfile",
        metavar="FILE",
        help="Train on these machines, reached over ssh: a line `HOST slots=N` for each.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.", show_default=False)]
