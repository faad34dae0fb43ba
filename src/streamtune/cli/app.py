"""The commands, in the order the help lists them. Each has a file of its own and loads what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from streamtune import __version__
from streamtune.cli.recipes import schema, validate
from streamtune.cli.training import dpo, grpo, sft

from .bench import bench
from .data import data
from .doctor import doctor
from .env import env
from .evaluate import evaluate
from .export import export
from .generate import generate
from .optimizers import optimizers
from .options import HelpCommand, HelpGroup
from .plan import plan
from .probe_max_len import probe_max_len
from .recipes import recipes
from .report import report
from .teach import teach
from .verify import verify

__all__ = ["app"]

app = typer.Typer(
    name="streamtune",
    cls=HelpGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.", show_default=False)
    ] = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="Connect to nothing: local files and caches only; may stand anywhere.", show_default=False
        ),
    ] = False,
) -> None:
    """Fine-tune language models on very long sequences, with the exact gradient."""


app.command("sft", cls=HelpCommand, rich_help_panel="Training")(sft)
app.command("dpo", cls=HelpCommand, rich_help_panel="Training")(dpo)
app.command("grpo", cls=HelpCommand, rich_help_panel="Training")(grpo)
app.command("data", cls=HelpCommand, rich_help_panel="Measuring")(data)
app.command("plan", cls=HelpCommand, rich_help_panel="Measuring")(plan)
app.command("bench", cls=HelpCommand, rich_help_panel="Measuring")(bench)
app.command("probe-max-len", cls=HelpCommand, rich_help_panel="Measuring")(probe_max_len)
app.command("verify", cls=HelpCommand, rich_help_panel="Measuring")(verify)
app.command("teach", cls=HelpCommand, rich_help_panel="Training")(teach)
app.command("generate", cls=HelpCommand, rich_help_panel="Afterwards")(generate)
app.command("eval", cls=HelpCommand, rich_help_panel="Afterwards")(evaluate)
app.command("export", cls=HelpCommand, rich_help_panel="Afterwards")(export)
app.command("report", cls=HelpCommand, rich_help_panel="Afterwards")(report)
app.command("validate", cls=HelpCommand, rich_help_panel="Recipes")(validate)
app.add_typer(recipes, name="recipes", rich_help_panel="Recipes")
app.add_typer(optimizers, name="optim", rich_help_panel="Recipes")
app.command("schema", cls=HelpCommand, rich_help_panel="Recipes")(schema)
app.command("doctor", cls=HelpCommand, rich_help_panel="This machine")(doctor)
app.command("env", cls=HelpCommand, rich_help_panel="This machine")(env)
