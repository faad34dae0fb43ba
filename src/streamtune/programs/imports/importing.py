"""Import of a recipe of another trainer: recognise the trainer, convert, check, write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtune.base.privacy import redact
from streamtune.errors import ArgumentError, RecipeError
from streamtune.recipe.mistakes import find_mistakes, to_error
from streamtune.recipe.schema import RECIPES, Recipe
from streamtune.recipe.yaml import dump_values

from .axolotl import AXOLOTL
from .conversion import Conversion, FieldFinding, PeerTrainer
from .llamafactory import LLAMAFACTORY
from .peer_files import PeerFile, read_peer_file
from .swift import SWIFT
from .trainer_arguments import finish, is_accelerate_config, take_launcher, take_optimizer
from .trl import TRL

TRAINERS: dict[str, PeerTrainer] = {trainer.name: trainer for trainer in (AXOLOTL, LLAMAFACTORY, TRL, SWIFT)}
"""Value of ``--from`` -> the trainer."""

WIDTH = 120


@dataclass(frozen=True)
class ImportedRecipe:
    """A recipe of another trainer in our keys."""

    trainer: PeerTrainer
    guessed: tuple[str, ...]
    """fields that identified the trainer; empty where the user named it"""
    objective: str
    text: str
    """the recipe, with comments, as ``load_recipe`` reads it"""
    findings: tuple[FieldFinding, ...]
    notes: tuple[str, ...]
    """messages for the user"""

    def of_kind(self, kind: str) -> list[FieldFinding]:
        return [found for found in self.findings if found.kind == kind]

    @property
    def changes_training(self) -> list[FieldFinding]:
        return [found for found in self.findings if found.kind == "lost" and found.trains]


def import_recipe(path: Path, trainer: str | None = None, objective: str | None = None) -> ImportedRecipe:
    """Read a recipe of another trainer and convert it. Nothing is written.

    Args:
        path: YAML, JSON or a shell script.
        trainer: Key of :data:`TRAINERS`; None recognises the trainer by the fields.
        objective: ``sft``, ``dpo`` or ``grpo``; None takes the file's objective.

    Raises:
        RecipeError: The file cannot be read, has no counterpart, or converts to an invalid recipe.
        ArgumentError: The trainer cannot be recognised, or there is no such trainer or objective.
    """
    file = read_peer_file(path)
    guessed: tuple[str, ...] = ()
    if trainer is None:
        trainer, guessed = _recognise(file)
    if trainer not in TRAINERS:
        raise ArgumentError(f"no recipes of '{trainer}' are read", where="--from", fix=f"use {', '.join(TRAINERS)}")
    if objective is not None and objective not in RECIPES:
        raise ArgumentError(f"there is no objective '{objective}'", where="--objective", fix=", ".join(RECIPES))
    conversion = Conversion(file, TRAINERS[trainer])
    conversion.kind = RECIPES[objective or conversion.trainer.objective(conversion)]
    if conversion.objective != "sft":
        conversion.ours["objective"] = conversion.objective
    conversion.trainer.special(conversion)
    take_optimizer(conversion)
    conversion.apply()
    take_launcher(conversion)
    conversion.trainer.defaults(conversion)
    finish(conversion)
    _check(conversion)
    conversion.findings.sort(key=lambda found: int(found.where.rpartition(":")[2] or 10**9))
    return ImportedRecipe(
        trainer=conversion.trainer,
        guessed=guessed,
        objective=conversion.objective,
        text=_text(conversion),
        findings=tuple(conversion.findings),
        notes=tuple(file.notes),
    )


def _recognise(file: PeerFile) -> tuple[str, tuple[str, ...]]:
    """Return the trainer of a file, and the fields that identify it."""
    if file.trainer:
        return file.trainer, (f"the command {file.trainer}",)
    if is_accelerate_config(file.fields):
        raise ArgumentError(
            "this is a configuration of accelerate, which starts a training script and trains nothing itself",
            where=str(file.path),
            fix="import the recipe, or a shell script with the whole command: accelerate launch --config_file ...",
        )
    names = {name for name, value in file.fields.items() if value is not None}
    signs = {name: sorted(names.intersection(trainer.signs.split())) for name, trainer in TRAINERS.items()}
    ranked = sorted(signs, key=lambda name: len(signs[name]), reverse=True)
    if signs[ranked[0]] and len(signs[ranked[0]]) > len(signs[ranked[1]]):
        return ranked[0], tuple(signs[ranked[0]])
    if not signs[ranked[0]] and isinstance(file.fields.get("datasets"), list) and names <= set(Recipe.model_fields):
        raise ArgumentError("this is a recipe of StreamTune already", where=str(file.path))
    raise ArgumentError(
        "the fields do not show whose recipe this is", where=str(file.path), fix=f"say it: --from {'|'.join(TRAINERS)}"
    )


def _check(conversion: Conversion) -> None:
    """Check the converted recipe as the loader does; a mistake is reported at the line of their field."""
    tree: dict[str, Any] = {**conversion.ours}
    tree.setdefault("output_dir", "runs/imported")
    marks = conversion.marks()
    if mistakes := find_mistakes(tree, conversion.kind):
        found = to_error(mistakes, marks)
        what = found.what.replace(f"{len(mistakes)} mistakes", "", 1) if len(mistakes) > 1 else f" {found.what}"
        count = f"{len(mistakes)} mistakes" if len(mistakes) > 1 else "a mistake"
        raise RecipeError(f"as a recipe of ours it has {count}:{what}", where=found.where, fix=found.fix)


def _text(conversion: Conversion) -> str:
    """Return the recipe as YAML: our keys in the order of the schema, with comments on their origin."""
    path, title = conversion.file.path, conversion.trainer.title
    lines = [f"# Imported from {path.name} ({title}) by `streamtune recipes import`.", ""]
    for key in conversion.kind.model_fields:
        if key not in conversion.ours:
            continue
        text = dump_values({key: conversion.ours[key]}).rstrip("\n")
        note = redact(" ".join(conversion.notes.get(key, "").split()))
        if not note:
            lines.append(text)
        elif "\n" in text or len(text) + len(note) + 4 > WIDTH:
            lines += [f"# {note}", text]
        else:
            lines.append(f"{text}  # {note}")
    lost = [found for found in conversion.findings if found.kind == "lost"]
    if lost:
        lines += ["", "# Without counterpart; those marked * change what is trained:"]
        for found in lost:
            place = f" (line {found.where.rpartition(':')[2]})" if found.where else ""
            mark = "*" if found.trains else " "
            lines.append(f"#  {mark} {found.theirs}{place}" + (f" - {found.note}" if found.note else ""))
    return "\n".join(lines) + "\n"
