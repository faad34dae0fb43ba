"""The JSON schema of a recipe, for editors and for programs that write recipes."""

from __future__ import annotations

from typing import Any

from .schema import Recipe

__all__ = ["json_schema"]


def json_schema() -> dict[str, Any]:
    """The schema of a recipe file, JSON Schema draft 2020-12, with every key's description."""
    schema = _tidy(Recipe.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "StreamTune recipe", **schema}


def _tidy(node: Any, *, names: bool = False) -> Any:
    """Drop the titles pydantic makes from names; ``names`` says that the keys of ``node`` are a recipe's own."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if isinstance(node, str):
        return " ".join(node.split())  # a docstring's line breaks mean nothing
    if not isinstance(node, dict):
        return node
    return {
        key: _tidy(value, names=key in ("properties", "$defs"))
        for key, value in node.items()
        if names or key != "title" or not isinstance(value, str)
    }
