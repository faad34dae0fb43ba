"""Pages of reference, made from the code: docs/reference/commands.md and docs/reference/recipe.md.

python -m tools.reference_pages          # writes them; `make docs` does
python -m tools.reference_pages --check  # exits with 1 where they are out of date, and names them
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption

from streamtune.base.adapters import ADAPTERS
from streamtune.base.optimizer_table import OPTIMIZERS
from streamtune.cli.app import app
from streamtune.recipe import json_schema

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
MADE = "<!-- Made by `make docs` from the code. Changes here are lost. -->"

GROUPS = {
    "DatasetSpec": ("datasets", "Sources of rows"),
    "EngineSpec": ("engine", "Streaming"),
    "TokenizerSpec": ("tokenizer", "Tokenizer"),
    "TokenizerTrain": ("tokenizer.train", "A tokenizer trained on the rows"),
    "ModelInit": ("model", "A model without weights"),
    "SampleSpec": ("sample", "A prompt to try"),
}
"""Definitions of the schema that are groups of keys: the key that holds them, and a title."""


TABLES: dict[str, Mapping[str, Any]] = {"adapter_type": ADAPTERS, "optim": OPTIMIZERS}
"""Keys that name a row of a table, which says if the method is experimental."""


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    return {"commands.md": "\n".join(_commands()), "recipe.md": "\n".join(_recipe())}


def _commands() -> Iterator[str]:
    """Yield the lines of the page of commands, in the order of ``streamtune --help``."""
    yield from (MADE, "", "# Commands", "")
    yield "`--help` of each command shows the same. Exit codes: 0 done, 1 ran and failed, 2 the input is wrong, 130"
    yield "stopped by Ctrl-C."
    root: Any = typer.main.get_command(app)
    yield from ("", "## streamtune", "", *_options(root))
    for name, command in root.commands.items():
        if isinstance(command, TyperGroup):
            for inner, below in command.commands.items():
                yield from _command(f"{name} {inner}", below)
        else:
            yield from _command(name, command)


def _command(name: str, command: TyperCommand) -> Iterator[str]:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    usage = " ".join([f"streamtune {name}", *(_argument(param) for param in arguments)])
    help_text = " ".join((command.help or "").split())
    yield from ("", f"## {name}", "", help_text, "", "```text", usage, "```", "")
    yield from _options(command)


def _argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    return name if param.required else f"[{name}]"


def _options(command: Any) -> Iterator[str]:
    """Yield a table of the options, without help and shell completion."""
    left_out = {"help", "install_completion", "show_completion"}
    options = [param for param in command.params if isinstance(param, TyperOption) and param.name not in left_out]
    if not options:
        return
    yield from ("| option | value | default | does |", "|---|---|---|---|")
    for option in options:
        names = ", ".join(f"`{name}`" for name in option.opts)
        value = "" if option.is_flag else f"`{option.metavar or option.type.name.upper()}`"
        default = "" if option.is_flag or option.default in (None, ()) else f"`{option.default}`"
        yield f"| {names} | {_cell(value)} | {_cell(default)} | {_cell(option.help or '')} |"


def _recipe() -> Iterator[str]:
    """Yield the lines of the page of keys: of all objectives, of single objectives, and the groups of keys."""
    definitions = json_schema()["$defs"]
    common = definitions["Recipe"]["properties"]
    yield from (MADE, "", "# Recipe keys", "")
    yield "Every leaf name is unique, so `--set learning_rate=1e-4` works wherever the key stands. `streamtune validate"
    yield "RECIPE` checks a file; `streamtune schema` prints [the JSON schema](../recipe.schema.json) for editors."
    yield from (
        "",
        "## All objectives",
        "",
        '`dpo` and `grpo` refuse a key that is "Only for `sft`"; unread adapter keys only give a note.',
    )
    yield from ("", *_keys(common))
    for objective, name in (("dpo", "DpoRecipe"), ("grpo", "GrpoRecipe")):
        own = {key: value for key, value in definitions[name]["properties"].items() if value != common.get(key)}
        yield from (
            "",
            f"## {objective}",
            "",
            f"Keys that `{objective}` adds, or whose default differs.",
            "",
            *_keys(own),
        )
    for name, definition in definitions.items():
        if name in ("Recipe", "DpoRecipe", "GrpoRecipe"):
            continue
        key, title = GROUPS.get(name, (None, name))
        heading = f"`{key}`" if key else title
        yield from ("", f"## {heading}", "", definition.get("description", ""), "", *_keys(definition["properties"]))


def _keys(properties: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| key | takes | default | |", "|---|---|---|---|")
    for key, value in properties.items():
        text = value.get("description", "")
        if experimental := [f"`{name}`" for name, row in TABLES.get(key, {}).items() if row.status == "experimental"]:
            text += f" Experimental: {', '.join(experimental)}."
        yield f"| `{key}` | {_cell(_takes(value))} | {_cell(_default(value))} | {_cell(text)} |"


def _default(value: Mapping[str, Any]) -> str:
    if "default" not in value or value["default"] is None or isinstance(value["default"], dict):
        return ""
    return f"`{json.dumps(value['default'])}`".replace('"', "")


def _takes(value: Mapping[str, Any]) -> str:
    """Return the type of a key in words and numbers."""
    if "anyOf" in value:
        return " or ".join(text for each in value["anyOf"] if (text := _takes(each)))
    if "enum" in value:
        return ", ".join(f"`{each}`" for each in value["enum"])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`".replace('"', "")
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        key = GROUPS.get(name, (name, ""))[0]
        return f"keys, see [{key}](#{key.replace('.', '').lower()})"
    kind = value.get("type", "")
    if kind == "null":
        return ""
    if kind == "array":
        return f"list of {_takes(value.get('items', {})) or 'values'}"
    words = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true`, `false`",
        "object": "keys",
    }
    text = words.get(kind, "")
    low = value.get("minimum", value.get("exclusiveMinimum"))
    if kind in ("integer", "number") and low is not None:
        text += f" {'above' if 'exclusiveMinimum' in value else 'from'} {low:g}"
    return text


def _cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    """Write the pages, or check them. Returns 1 where a page is out of date, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference_pages", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is out of date")
    check = parser.parse_args().check
    old = []
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text + "\n":
            old.append(path)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n", encoding="utf-8")
    for path in old:
        print(f"{path.relative_to(ROOT)} {'is out of date: make docs' if check else 'written'}")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
