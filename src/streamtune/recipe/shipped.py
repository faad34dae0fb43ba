"""The recipes that come with StreamTune: in the package when installed, in the source tree otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streamtune.errors import ArgumentError, did_you_mean

__all__ = ["ShippedRecipe", "read_shipped", "schema_file", "shipped_names", "shipped_recipes", "with_schema"]

_PACKAGE = Path(__file__).resolve().parent.parent
_SOURCE_TREE = _PACKAGE.parent.parent

HEADER = "# yaml-language-server: $schema="
"""First line of a shipped recipe: tells editors where the schema is."""


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that comes with StreamTune.

    Args:
        name: What ``streamtune recipes show`` calls it.
        summary: Its first comment line.
        path: Its file.
        text: Its content.
    """

    name: str
    summary: str
    path: Path
    text: str


def shipped_recipes() -> list[ShippedRecipe]:
    """Return all shipped recipes, sorted by name."""
    return [_read(path) for path in sorted(_folder().glob("*.yaml"))]


def shipped_names() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def read_shipped(name: str) -> ShippedRecipe:
    """Return one shipped recipe.

    Raises:
        ArgumentError: There is none of that name.
    """
    names = shipped_names()
    stem = name.removesuffix(".yaml")
    if stem not in names:
        mend = did_you_mean(stem, names) or f"there are {', '.join(names)}"
        raise ArgumentError(f"no shipped recipe is called '{name}'", mend=mend)
    return _read(_folder() / f"{stem}.yaml")


def with_schema(text: str, folder: Path) -> str:
    """Return a shipped recipe's text for a file in ``folder``: its header points to this installation's schema."""
    first, _, rest = text.partition("\n")
    if not first.startswith(HEADER):
        return text
    schema = schema_file()
    if schema is None:
        return rest
    nearby = schema.is_relative_to(folder.resolve())
    return f"{HEADER}{schema.relative_to(folder.resolve()) if nearby else schema}\n{rest}"


def schema_file() -> Path | None:
    """Return the path of the JSON schema, for editors; ``None`` if this installation has none."""
    for path in (_PACKAGE / "_recipes" / "recipe.schema.json", _SOURCE_TREE / "docs" / "recipe.schema.json"):
        if path.is_file():
            return path
    return None


def _folder() -> Path:
    installed = _PACKAGE / "_recipes"
    return installed if installed.is_dir() else _SOURCE_TREE / "recipes"


def _read(path: Path) -> ShippedRecipe:
    text = path.read_text(encoding="utf-8")
    comments = (line for line in text.splitlines() if line.startswith("# ") and not line.startswith(HEADER))
    return ShippedRecipe(path.stem, next(comments, "").removeprefix("# "), path, text)
