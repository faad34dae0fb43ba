"""List and read the recipes that come with StreamTune, in the installed package or in the source tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from streamtune.errors import ArgumentError, did_you_mean

_PACKAGE = Path(__file__).resolve().parent.parent
_SOURCE_TREE = _PACKAGE.parent.parent

HEADER = "# yaml-language-server: $schema="
"""First line of a shipped recipe, which tells editors where the schema is."""


DEVICE = re.compile(r"-(?:(\d+)x)?(\d+)gb$")
"""Suffix of the name of a recipe for one kind of device, such as ``-80gb`` or ``-8x80gb``."""


@dataclass(frozen=True)
class ShippedRecipe:
    """Recipe that comes with StreamTune.

    Args:
        name: Name in ``streamtune recipes show``: path below the folder of recipes, without suffix.
        summary: First comment line of the file.
        path: Path of the file.
        text: Content of the file.
    """

    name: str
    summary: str
    path: Path
    text: str

    @property
    def device(self) -> str:
        """Device in the suffix of the name, such as ``80 GB`` or ``8 x 80 GB``; empty without one."""
        found = DEVICE.search(self.name)
        return "" if found is None else f"{found[1]} x {found[2]} GB" if found[1] else f"{found[2]} GB"


def shipped_recipes() -> list[ShippedRecipe]:
    """Return all shipped recipes, in the order of :func:`shipped_names`.

    Example:
        >>> "quickstart" in [recipe.name for recipe in shipped_recipes()]
        True
    """
    return [_read_shipped_file(_recipe_path(name)) for name in shipped_names()]


def shipped_names() -> list[str]:
    """Return the names of the shipped recipes, such as ``quickstart`` and ``qwen3/8b-lora-80gb``.

    Recipes outside the folders of models come first. Numbers in names are sorted by value: 8b before 14b.
    """
    folder = _recipe_folder()
    paths = [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]
    return sorted((path.relative_to(folder).as_posix().removesuffix(".yaml") for path in paths), key=_recipe_sort_key)


def read_shipped(name: str) -> ShippedRecipe:
    """Return a shipped recipe.

    Raises:
        ArgumentError: No shipped recipe has this name.
    """
    names = shipped_names()
    stem = name.removesuffix(".yaml")
    if stem not in names:
        fix = did_you_mean(stem, names) or "`streamtune recipes ls` lists the shipped recipes"
        raise ArgumentError(f"unknown shipped recipe '{name}'", fix=fix)
    return _read_shipped_file(_recipe_path(stem))


def with_schema_header(text: str, folder: Path) -> str:
    """Return the text of a shipped recipe, with the path of this installation's schema in its first line.

    The path is relative if the schema is below ``folder``, where the recipe is written. Without a schema the line is
    dropped.
    """
    first, _, rest = text.partition("\n")
    if not first.startswith(HEADER):
        return text
    schema = find_schema_file()
    if schema is None:
        return rest
    nearby = schema.is_relative_to(folder.resolve())
    return f"{HEADER}{schema.relative_to(folder.resolve()) if nearby else schema}\n{rest}"


def find_schema_file() -> Path | None:
    """Return the path of the JSON schema for editors; None if this installation lacks it."""
    for path in (_PACKAGE / "_recipes" / "recipe.schema.json", _SOURCE_TREE / "docs" / "recipe.schema.json"):
        if path.is_file():
            return path
    return None


def _recipe_folder() -> Path:
    installed = _PACKAGE / "_recipes"
    return installed if installed.is_dir() else _SOURCE_TREE / "recipes"


def _recipe_sort_key(name: str) -> tuple[bool, list[tuple[float, str]]]:
    all_devices = DEVICE.sub(lambda found: f"-{int(found[1] or 1) * int(found[2])}gb", name)
    return "/" in name, list(_split_numbers(all_devices))


def _split_numbers(name: str) -> Iterator[tuple[float, str]]:
    for number, word in re.findall(r"(\d+(?:\.\d+)?)|(\D+)", name):
        yield (float(number), "") if number else (-1.0, word)


def _recipe_path(name: str) -> Path:
    return _recipe_folder() / f"{name}.yaml"


def _read_shipped_file(path: Path) -> ShippedRecipe:
    text = path.read_text(encoding="utf-8")
    comments = (line for line in text.splitlines() if line.startswith("# ") and not line.startswith(HEADER))
    name = path.relative_to(_recipe_folder()).as_posix().removesuffix(".yaml")
    return ShippedRecipe(name, next(comments, "").removeprefix("# "), path, text)
