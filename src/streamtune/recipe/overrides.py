"""``--set key=value``: one way to change any key of a recipe from the command line.

A key is written in full (``engine.chunk_size=4096``, ``datasets.0.path=other.jsonl``) or by its last name where that
name is unique (``chunk_size=4096``, ``num_hidden_layers=8`` for a model made from a configuration). A value is read as
it would be in the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from streamtune.errors import RecipeError, did_you_mean
from streamtune.recipe.mistakes import leaf_paths
from streamtune.recipe.yaml import KeyPath, Marks, read_yaml, show_path

from .aliases import ALIASES, INSTEAD, LATER, SWITCHES
from .kinds import objectives_with
from .mistakes import unknown_key
from .schema import Recipe

__all__ = ["apply_overrides"]


def apply_overrides(
    tree: dict[str, Any], marks: Marks, overrides: Sequence[str], kind: type[Recipe] = Recipe
) -> list[str]:
    """Write ``key=value`` settings into a recipe, in place; of two for one key the last counts.

    Args:
        tree: The recipe, with its aliases already renamed.
        marks: The places of its keys; the keys written are marked with their setting.
        overrides: Settings as given after ``--set``.
        kind: The recipe's type, which decides which keys there are.

    Returns:
        Notes on other trainers' names taken.

    Raises:
        RecipeError: A setting without ``=``, with a value that is not YAML, with an unknown or ambiguous key.
    """
    notes: list[str] = []
    for override in overrides:
        setting = f"--set {override}"
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not name:
            raise RecipeError(
                f"'{override}' sets nothing", where=setting, mend="write --set key=value, such as --set max_length=4096"
            )
        value = _read_value(text, setting)
        if name in ALIASES:
            notes.append(f"'{name}' is read as '{ALIASES[name]}'")
            name = ALIASES[name]
        path = _find(name, tree, setting, kind)
        _write(tree, path, value, marks, setting)
    return notes


def _read_value(text: str, setting: str) -> Any:
    try:
        value, _, mistakes = read_yaml(text.strip(), "--set")
    except RecipeError as error:
        raise RecipeError(error.what, where=setting, mend="quote the value: --set 'key=\"value\"'") from error
    if mistakes:
        raise RecipeError(mistakes[0].what.partition(",")[0], where=setting, mend=mistakes[0].mend)
    return value


def _find(name: str, tree: dict[str, Any], setting: str, kind: type[Recipe]) -> KeyPath:
    """Return the path that a name stands for: written in full, at the top level, or a last name that is unique."""
    parts = tuple(int(part) if part.isdecimal() else part for part in re.sub(r"\[(\d+)\]", r".\1", name).split("."))
    leaves = leaf_paths(kind)
    if len(parts) > 1 or (name,) in leaves.get(name, []) or name in {*INSTEAD, *SWITCHES} or (name,) in LATER:
        return parts
    if name in {str(paths[0][0]) for paths in leaves.values()}:  # 'engine', 'tokenizer': whole groups
        return parts
    configuration = _configuration(tree)
    places = leaves.get(name, []) + ([("model", "init", name)] if name in configuration else [])
    if len(places) == 1:
        return places[0]
    if places:
        raise RecipeError(
            f"'{name}' could be {' or '.join(show_path(place) for place in places)}",
            where=setting,
            mend=f"write it in full, such as --set {'.'.join(map(str, places[0]))}=...",
        )
    if entries := [
        i for i, entry in enumerate(tree.get("datasets") or []) if isinstance(entry, dict) and name in entry
    ]:
        raise RecipeError(
            f"'{name}' stands in an entry of a list",
            where=setting,
            mend=f"write --set datasets.{entries[0]}.{name}=...",
        )
    if objectives_with(name):
        mistake = unknown_key((name,), kind)
        raise RecipeError(mistake.what, where=setting, mend=mistake.mend)
    mend = did_you_mean(name, [*leaves, *ALIASES, *SWITCHES, *configuration])
    raise RecipeError(f"unknown key '{name}'", where=setting, mend=mend or "`streamtune schema` lists every key")


def _configuration(tree: dict[str, Any]) -> dict[str, Any]:
    model = tree.get("model")
    init = model.get("init") if isinstance(model, dict) else None
    return init if isinstance(init, dict) else {}


def _write(tree: dict[str, Any], path: KeyPath, value: Any, marks: Marks, setting: str) -> None:
    """Put a value at a path, creating missing mappings; all that is new is marked with the setting."""
    here: Any = tree
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(part, int) and isinstance(here, list):
            if part >= len(here):
                shown = show_path(path[:depth])
                raise RecipeError(f"'{shown}' has {len(here)} entries; the first is {shown}[0]", where=setting)
        elif isinstance(part, int) or not isinstance(here, dict):
            raise RecipeError(f"'{show_path(path[:depth])}' has no '{part}'", where=setting, mend="set it as a whole")
        if last:
            here[part] = value
            marks.set(path, setting)
        elif isinstance(here, dict) and not isinstance(here.get(part), (dict, list)):
            here[part] = here = {}
            marks.set(path[: depth + 1], setting)
        else:
            here = here[part]
