from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from streamtune.errors import RecipeError
from streamtune.recipe import load_recipe

MINIMAL = "model_name_or_path: Qwen/Qwen3-4B\ndatasets:\n  - path: train.jsonl\n"  # three lines: what follows is line 4

Write = Callable[..., Path]
Refused = Callable[..., RecipeError]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a recipe: the lines given, after the three a recipe needs."""

    def write(lines: str, *, before: str = MINIMAL, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes((before + lines).encode())
        return path

    return write


@pytest.fixture
def refused(write: Write) -> Refused:
    """Write a recipe that is wrong, load it, return the error."""

    def refused(lines: str, *, before: str = MINIMAL, overrides: tuple[str, ...] = ()) -> RecipeError:
        path = write(lines, before=before)
        with pytest.raises(RecipeError) as caught:
            load_recipe(path, overrides)
        return caught.value

    return refused
