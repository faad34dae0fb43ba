"""``streamtune schema``: the JSON schema of recipes."""

from __future__ import annotations

from streamtune.recipe import json_schema

from .console import print_json

__all__ = ["schema"]


def schema() -> None:
    """Print the JSON schema of recipes: every key, its type, its default, what it does."""
    print_json(json_schema())
