"""A random sample of the project's text, for a reader who has not seen it: what of it is understood at first reading?

python -m tools.sample_text SEED                       80 docstrings, 50 messages, 132 help texts, 90 names
python -m tools.sample_text SEED --pages               README and twelve random pages, sentence by sentence

Each item has a number and its file. A reader marks an item if its grammar is odd, if a term is made up or wrong, if it
must be read twice, if it cannot be checked, or if it says nothing. docs/log.md has the counts.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from typer.core import TyperGroup, TyperOption

from streamtune.cli.app import app
from streamtune.recipe import json_schema
from tools.words import ROOT, SENTENCE, _paragraphs, _strings

SOURCE = ROOT / "src" / "streamtune"


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield place and text of every docstring."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                signature = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else ""
                yield f"{_name(path)} {node.name}({signature})", text


def messages() -> Iterator[tuple[str, str]]:
    """Yield place and text of what errors, notes and screens say."""
    for path in sorted(SOURCE.rglob("*.py")):
        for line, text, is_docstring in _strings(path):
            if not is_docstring and len(text.split()) > 4 and "\n" not in text:
                yield f"{_name(path)}:{line}", text


def helps() -> Iterator[tuple[str, str]]:
    """Yield place and text of the help of commands and options, and the description of recipe keys."""
    root: Any = typer.main.get_command(app)
    commands = dict(root.commands)
    for name, command in list(commands.items()):
        if isinstance(command, TyperGroup):
            commands |= {f"{name} {inner}": below for inner, below in command.commands.items()}
    for name, command in commands.items():
        if command.help:
            yield f"streamtune {name}", command.help
        for option in command.params:
            if isinstance(option, TyperOption) and option.help:
                yield f"streamtune {name} {option.opts[0]}", option.help
    for name, definition in json_schema()["$defs"].items():
        for key, value in definition.get("properties", {}).items():
            if "description" in value:
                yield f"{name}.{key}", value["description"]


def names() -> Iterator[tuple[str, str]]:
    """Yield place and name of files, functions and arguments."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield "file", _name(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield _name(path), f"{node.name}({', '.join(each.arg for each in node.args.args)})"


def sentences(chosen: random.Random) -> Iterator[tuple[str, str]]:
    """Yield place and text of the sentences of the README and of twelve pages."""
    pages = sorted(page for page in (ROOT / "docs").rglob("*.md") if "reference" not in page.parts)
    for page in [ROOT / "README.md", *chosen.sample(pages, 12)]:
        for _, text, _ in _paragraphs(page):
            for sentence in SENTENCE.split(" ".join(text.split())):
                yield page.relative_to(ROOT).as_posix(), sentence


def _name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--pages", action="store_true", help="sentences of pages, in their order")
    arguments = parser.parse_args()
    chosen = random.Random(arguments.seed)
    parts = (
        [("S", list(sentences(chosen)), None)]
        if arguments.pages
        else [
            ("D", list(docstrings()), 80),
            ("M", list(messages()), 50),
            ("H", list(helps()), 132),
            ("N", list(names()), 90),
        ]
    )
    for letter, found, count in parts:
        for number, (where, text) in enumerate(chosen.sample(found, count) if count else found, 1):
            print(f"{letter}{number} [{where}]\n{text}\n")


if __name__ == "__main__":
    main()
