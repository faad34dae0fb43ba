"""Command ``streamtune recipes import``: convert a recipe of another trainer, and report the outcome of each field."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from streamtune.base.interrupts import temporary_directory
from streamtune.base.privacy import safe_text
from streamtune.cli.console import err, out, print_json, print_note, print_rows
from streamtune.cli.options import JsonOption, option
from streamtune.cli.recipes import file_exists_error, write_new_file
from streamtune.errors import ArgumentError, RecipeError
from streamtune.programs.imports.conversion import FieldFinding
from streamtune.programs.imports.importing import TRAINERS, ImportedRecipe
from streamtune.programs.imports.importing import import_recipe as convert
from streamtune.recipe import load_recipe


def import_recipe(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Recipe of another trainer: YAML, JSON, or a shell script with its command.",
            show_default=False,
        ),
    ],
    dest: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OUT]",
            help="File to write, or `-` for stdout. [default: FILE-streamtune.yaml]",
            show_default=False,
        ),
    ] = None,
    trainer: Annotated[
        str | None,
        option(
            "TRAINER",
            f"Trainer that FILE was written for: {', '.join(TRAINERS)}. [default: recognised by the fields]",
            "--from",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        option(
            "NAME",
            "Training objective of the new recipe: sft, dpo or grpo. [default: recognised by the fields of FILE]",
            "--objective",
        ),
    ] = None,
    strict: Annotated[
        bool,
        option(
            None,
            "Exit with an error and write nothing if a field that changes training cannot be converted.",
            "--strict",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Convert a recipe of axolotl, LLaMA-Factory, TRL or ms-swift, and report for each field what it became."""
    dest = dest or Path(f"{file.stem}-streamtune.yaml")
    piped, other = dest == Path("-"), f"`streamtune recipes import {file} OTHER.yaml`"
    if piped and json:
        raise ArgumentError("--json and OUT '-' exclude each other: both print to stdout", fix=f"{other[:-1]} --json`")
    if dest.is_dir():
        dest /= f"{file.stem}-streamtune.yaml"
    if dest.exists() and not piped:
        raise file_exists_error(dest, other)
    imported = convert(file, trainer, objective)
    if not json:
        with redirect_stdout(sys.stderr) if piped else nullcontext():
            _print_imported(file, imported)
    changed = imported.changes_training
    if not (strict and changed):
        if piped:
            with temporary_directory() as folder:
                _write_checked_recipe(Path(folder) / "recipe.yaml", imported.text, other)
            print(imported.text, end="")
        else:
            _write_checked_recipe(dest, imported.text, other)
    if json:
        print_json({**_imported_json(file, imported), "path": None if strict and changed else str(dest)})
    for note in imported.notes:
        print_note(note)
    if strict and changed:
        places = "\n".join(f"- {found.where or imported.trainer.title}: {found.theirs}" for found in changed)
        raise RecipeError(
            f"--strict: {len(changed)} fields that change training cannot be converted\n{places}",
            where=str(file),
            fix="leave out --strict to write the recipe without them",
        )
    if not piped:
        err.print(Text.assemble("written: ", (str(dest), "bold")), soft_wrap=True)
        err.print(Text(f"Next: streamtune {imported.objective} {dest}"), soft_wrap=True)


def _write_checked_recipe(dest: Path, text: str, fix: str) -> None:
    write_new_file(dest, text, fix)
    try:
        load_recipe(dest)
    except RecipeError:
        dest.unlink()
        raise


SECTIONS = {
    "mapped": "mapped",
    "default": "written, because StreamTune's default differs",
    "not_needed": "not needed",
    "lost": "not converted",
}
"""{outcome of a field: heading in the report}."""


def _print_imported(file: Path, imported: ImportedRecipe) -> None:
    seen = f", recognised by {', '.join(imported.guessed[:4])}" if imported.guessed else ""
    out.print(
        Text.assemble((safe_text(str(file)), "bold"), f": a recipe of {imported.trainer.title}{seen}"), soft_wrap=True
    )
    for kind, heading in SECTIONS.items():
        found = imported.findings_of_kind(kind)
        if not found:
            continue
        changed = sum(item.changes_training for item in found)
        tail = f"; * changes training: {changed}" if kind == "lost" and changed else ""
        out.print(Text.assemble("\n", (f"{heading}: {len(found)}", "bold"), tail), soft_wrap=True)
        print_rows(_describe_finding(item) for item in found)


def _describe_finding(finding: FieldFinding) -> tuple[str, str]:
    if finding.kind == "lost":
        place = finding.where or "-"
        return f"{place}{' *' if finding.changes_training else ''}", finding.theirs + (
            f": {finding.note}" if finding.note else ""
        )
    if finding.kind == "default":
        return finding.ours, finding.note
    if finding.kind == "not_needed":
        return finding.theirs, finding.note
    return finding.theirs, f"-> {finding.ours}" + (f" ({finding.note})" if finding.note else "")


def _imported_json(file: Path, imported: ImportedRecipe) -> dict[str, object]:
    kinds = {kind: [_finding_json(found) for found in imported.findings_of_kind(kind)] for kind in SECTIONS}
    return {
        "from": imported.trainer.name,
        "recognised_by": list(imported.guessed),
        "objective": imported.objective,
        "file": str(file),
        **kinds,
        "changes_training": len(imported.changes_training),
    }


def _finding_json(finding: FieldFinding) -> dict[str, object]:
    values = {"theirs": finding.theirs, "where": finding.where, "ours": finding.ours, "note": finding.note}
    return {key: value for key, value in values.items() if value} | (
        {"changes_training": finding.changes_training} if finding.kind == "lost" else {}
    )
