"""The type of recipe for each objective, and the JSON schema of them all, for editors and programs."""

from __future__ import annotations

from typing import Any

from streamtune.recipe.dpo import DpoRecipe
from streamtune.recipe.grpo import GrpoRecipe

from .schema import Recipe

RECIPES: dict[str, type[Recipe]] = {"sft": Recipe, "dpo": DpoRecipe, "grpo": GrpoRecipe}
"""Value of the key ``objective`` -> the recipe's type. A command of the same name trains it."""


def objectives_with(key: str) -> list[str]:
    """Return the objectives whose recipes have a key at their top level."""
    return [objective for objective, kind in RECIPES.items() if key in kind.model_fields]


def json_schema() -> dict[str, Any]:
    """Return the schema of a recipe file, JSON Schema draft 2020-12, with every key's description.

    Each objective's recipe is a definition of its own; the key ``objective`` decides which of them applies to a file.
    """
    definitions: dict[str, Any] = {}
    for kind in RECIPES.values():
        schema = kind.model_json_schema()
        definitions |= schema.pop("$defs", {})
        entries, sets = schema["properties"]["datasets"], schema["properties"]["eval_datasets"]
        path = {"type": "string", "minLength": 1}
        one = {"anyOf": [entries["items"], path]}  # a path alone
        entries["items"] = sets["additionalProperties"]["items"] = one
        sets["additionalProperties"] = {"anyOf": [sets["additionalProperties"], *one["anyOf"]]}
        definitions[kind.__name__] = schema
    others = [(objective, kind) for objective, kind in RECIPES.items() if objective != "sft"]
    held_to: dict[str, Any] = {"$ref": f"#/$defs/{RECIPES['sft'].__name__}"}
    for objective, kind in reversed(others):
        condition = {"properties": {"objective": {"const": objective}}, "required": ["objective"]}
        held_to = {"if": condition, "then": {"$ref": f"#/$defs/{kind.__name__}"}, "else": held_to}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "StreamTune recipe", "type": "object"}
    return {**head, **held_to, "$defs": _tidy(definitions, names=True)}


def _tidy(node: Any, *, names: bool = False) -> Any:
    """Drop the titles pydantic makes from names; with ``names`` the keys of ``node`` are a recipe's own, and stay."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: " ".join(value.split())  # a docstring's line breaks mean nothing
        if key == "description" and isinstance(value, str)
        else _tidy(value, names=key in ("properties", "$defs"))
        for key, value in node.items()
        if names or key != "title" or not isinstance(value, str)
    }
