"""``streamtune optim ls``: the optimizers that a recipe can name."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Column
from rich.text import Text

from streamtune.base.optimizer_table import OPTIMIZERS, OptimizerEntry, state_bytes

from .console import make_table, out, print_json, print_rows
from .options import HelpCommand, HelpGroup, JsonOption

optimizers = typer.Typer(cls=HelpGroup, help="List the optimizers that `optim` can name.", no_args_is_help=True)

SIZE = 4096
"""Rows and columns of the matrix whose bytes are shown."""


@optimizers.command("ls", cls=HelpCommand)
def list_optimizers(json: JsonOption = False) -> None:
    """List the optimizers: bytes of state, library, options, and what each does not combine with."""
    if json:
        print_json([_document(name, entry) for name, entry in OPTIMIZERS.items()])
        return
    reasons = list(dict.fromkeys(entry.not_divided for entry in OPTIMIZERS.values() if entry.not_divided))
    columns = [
        Column(title, no_wrap=True, justify="right" if title in ("fp32", "bf16") else "left")
        for title in ("optim", "fp32", "bf16", "library", "deepspeed, fsdp")
    ]
    table = make_table(*columns, padding=(0, 2, 0, 0))
    table.pad_edge = True
    for name, entry in OPTIMIZERS.items():
        library = entry.library if entry.installed else f"{entry.library}*"
        sizes = (f"{_per_parameter(name, width):.3g}" for width in (4, 2))
        divided = f"no ({reasons.index(entry.not_divided) + 1})" if entry.not_divided else "yes"
        table.add_row(Text(name, style="bold"), *sizes, library, divided)
    out.print(table)
    out.print()
    out.print(f"fp32, bf16: bytes of state to a parameter, of a {SIZE:,} x {SIZE:,} matrix in that dtype", style="dim")
    for number, reason in enumerate(reasons, 1):
        out.print(f"({number}) {reason}", style="dim")
    missing = {entry.library: entry.install for entry in OPTIMIZERS.values() if not entry.installed}
    for library, line in missing.items():
        out.print(Text.assemble(f"* {library} is not installed: ", (line, "bold")))
    out.print()
    print_rows([(name, _about(entry)) for name, entry in OPTIMIZERS.items()], name_style="bold", indent="")


def _per_parameter(name: str, width: int) -> float:
    return state_bytes(name, (SIZE, SIZE), width, {}) / SIZE**2


def _about(entry: OptimizerEntry) -> str:
    """Return the text of an entry, with its options."""
    options = ", ".join(f"{key}: {_value(value)}" for key, value in entry.options.items())
    only = f"; {entry.only_on} only" if entry.only_on else ""
    return f"{entry.text}{only}" + (f"; optim_args {{{options}}}" if options else "")


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _document(name: str, entry: OptimizerEntry) -> dict[str, Any]:
    return {
        "name": name,
        "text": entry.text,
        "library": entry.library,
        "installed": entry.installed,
        "install": entry.install or None,
        "state_bytes_per_parameter": {"float32": _per_parameter(name, 4), "bfloat16": _per_parameter(name, 2)},
        "options": dict(entry.options),
        "adam_keys": entry.is_adam or entry.adamw_for_rest,
        "adamw_for_rest": entry.adamw_for_rest,
        "only_on": entry.only_on or None,
        "not_divided": entry.not_divided or None,
    }
