"""Import a recipe of another trainer: recognise the trainer, convert the fields, and check the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtune.base.privacy import redact
from streamtune.errors import ArgumentError, RecipeError
from streamtune.recipe.mistakes import find_recipe_mistakes, mistakes_to_error
from streamtune.recipe.schema import RECIPES, Recipe
from streamtune.recipe.yaml import dump_yaml

from .axolotl import AXOLOTL
from .conversion import Conversion, FieldFinding, PeerTrainer
from .llamafactory import LLAMAFACTORY
from .recipe_files import PeerFile, read_peer_file
from .swift import SWIFT
from .trainer_arguments import convert_launcher, convert_optimizer, is_accelerate_config, remove_conflicting_keys
from .trl import TRL

TRAINERS: dict[str, PeerTrainer] = {trainer.name: trainer for trainer in (AXOLOTL, LLAMAFACTORY, TRL, SWIFT)}
"""Trainers by their name in the option ``--from``."""

WIDTH = 120


@dataclass(frozen=True)
class ImportedRecipe:
    """A converted recipe, with the outcome of each field."""

    trainer: PeerTrainer
    guessed: tuple[str, ...]
    """Fields that identified the trainer; empty if the user named the trainer."""
    objective: str
    text: str
    """The recipe in YAML, with comments."""
    findings: tuple[FieldFinding, ...]
    notes: tuple[str, ...]

    def findings_of_kind(self, kind: str) -> list[FieldFinding]:
        return [found for found in self.findings if found.kind == kind]

    @property
    def changes_training(self) -> list[FieldFinding]:
        """Outcomes of fields that are not converted although they change training."""
        return [found for found in self.findings if found.kind == "lost" and found.changes_training]


def import_recipe(path: Path, trainer: str | None = None, objective: str | None = None) -> ImportedRecipe:
    """Read a recipe of another trainer and convert it. Nothing is written.

    Args:
        trainer: Key of :data:`TRAINERS`; None: recognise the trainer by the fields of the file.
        objective: Training objective, ``sft``, ``dpo`` or ``grpo``; None: recognise it by the fields of the file.

    Raises:
        RecipeError: The file cannot be read or converted, or converts to an invalid recipe.
        ArgumentError: The trainer or objective is unknown, or the trainer cannot be recognised.
    """
    file = read_peer_file(path)
    guessed: tuple[str, ...] = ()
    if trainer is None:
        trainer, guessed = _recognise_trainer(file)
    if trainer not in TRAINERS:
        raise ArgumentError(f"unknown trainer '{trainer}'", where="--from", fix=f"use {', '.join(TRAINERS)}")
    if objective is not None and objective not in RECIPES:
        raise ArgumentError(f"unknown objective '{objective}'", where="--objective", fix=", ".join(RECIPES))
    conversion = Conversion(file, TRAINERS[trainer])
    conversion.kind = RECIPES[objective or conversion.trainer.objective(conversion)]
    if conversion.objective != "sft":
        conversion.ours["objective"] = conversion.objective
    conversion.trainer.special(conversion)
    convert_optimizer(conversion)
    conversion.apply_rules()
    convert_launcher(conversion)
    conversion.trainer.defaults(conversion)
    remove_conflicting_keys(conversion)
    _check_converted(conversion)
    conversion.findings.sort(key=lambda found: int(found.where.rpartition(":")[2] or 10**9))
    return ImportedRecipe(
        trainer=conversion.trainer,
        guessed=guessed,
        objective=conversion.objective,
        text=_recipe_text(conversion),
        findings=tuple(conversion.findings),
        notes=tuple(file.notes),
    )


def _recognise_trainer(file: PeerFile) -> tuple[str, tuple[str, ...]]:
    """Return the trainer of a file, and the fields that identify it.

    Raises:
        ArgumentError: The trainer cannot be recognised.
    """
    if file.trainer:
        return file.trainer, (f"the command {file.trainer}",)
    if is_accelerate_config(file.fields):
        raise ArgumentError(
            "this is a configuration of accelerate, not a recipe",
            where=str(file.path),
            fix="import the recipe, or a shell script with the whole command: accelerate launch --config_file ...",
        )
    names = {name for name, value in file.fields.items() if value is not None}
    signs = {name: sorted(names.intersection(trainer.signs.split())) for name, trainer in TRAINERS.items()}
    ranked = sorted(signs, key=lambda name: len(signs[name]), reverse=True)
    if signs[ranked[0]] and len(signs[ranked[0]]) > len(signs[ranked[1]]):
        return ranked[0], tuple(signs[ranked[0]])
    if not signs[ranked[0]] and isinstance(file.fields.get("datasets"), list) and names <= set(Recipe.model_fields):
        raise ArgumentError("this is already a StreamTune recipe", where=str(file.path))
    raise ArgumentError(
        "the trainer of this recipe cannot be recognised by its fields",
        where=str(file.path),
        fix=f"give it: --from {'|'.join(TRAINERS)}",
    )


def _check_converted(conversion: Conversion) -> None:
    """Check the converted recipe as the loader does; errors name the line of the original field."""
    tree: dict[str, Any] = {**conversion.ours}
    tree.setdefault("output_dir", "runs/imported")
    marks = conversion.original_lines()
    if mistakes := find_recipe_mistakes(tree, conversion.kind):
        found = mistakes_to_error(mistakes, marks)
        what = found.what.replace(f"{len(mistakes)} mistakes", "", 1) if len(mistakes) > 1 else f" {found.what}"
        count = f"{len(mistakes)} mistakes" if len(mistakes) > 1 else "a mistake"
        raise RecipeError(f"the converted recipe has {count}:{what}", where=found.where, fix=found.fix)


def _recipe_text(conversion: Conversion) -> str:
    """Return the recipe as YAML, with keys in the order of the schema and comments that name the original fields."""
    path, title = conversion.file.path, conversion.trainer.title
    lines = [f"# Imported from {path.name} ({title}) by `streamtune recipes import`.", ""]
    for key in conversion.kind.model_fields:
        if key not in conversion.ours:
            continue
        text = dump_yaml({key: conversion.ours[key]}).rstrip("\n")
        note = redact(" ".join(conversion.notes.get(key, "").split()))
        if not note:
            lines.append(text)
        elif "\n" in text or len(text) + len(note) + 4 > WIDTH:
            lines += [f"# {note}", text]
        else:
            lines.append(f"{text}  # {note}")
    lost = [found for found in conversion.findings if found.kind == "lost"]
    if lost:
        lines += ["", "# Not converted; fields marked * change training:"]
        for found in lost:
            place = f" (line {found.where.rpartition(':')[2]})" if found.where else ""
            mark = "*" if found.changes_training else " "
            lines.append(f"#  {mark} {found.theirs}{place}" + (f" - {found.note}" if found.note else ""))
    return "\n".join(lines) + "\n"
