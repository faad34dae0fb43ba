"""A recipe for a command that trains or measures; the hub is switched off where the recipe names nothing on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamtune.network import stay_off_the_hub
from streamtune.recipe import LoadedRecipe, load_recipe, names_a_hub

__all__ = ["read_recipe"]


def read_recipe(path: Path, settings: Sequence[str], objective: str | None = None) -> LoadedRecipe:
    """Read a recipe; called before the libraries are imported, which look at their environment then.

    Args:
        path: The file.
        settings: ``key=value``.
        objective: What the command trains for.

    Raises:
        RecipeError: Anything wrong with the file or the settings.
    """
    loaded = load_recipe(path, settings, objective)
    if not names_a_hub(loaded.recipe):
        stay_off_the_hub()
    return loaded
