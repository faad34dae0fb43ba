"""Descriptions of a recipe's keys in words, made from its JSON schema, so that the two cannot differ.

``kind`` is the recipe's type: each objective has its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from streamtune.recipe.yaml import KeyPath
from streamtune.sizes import SIZE_PATTERN

from .schema import Recipe

__all__ = ["expected", "field_at", "leaf_paths", "options", "properties"]

Fragment = dict[str, Any]


@cache
def _schema(kind: type[Recipe]) -> Fragment:
    """Return the recipe's schema with every reference replaced by what it points to."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(definitions[node["$ref"].rpartition("/")[2]])
        return {key: inlined(value) for key, value in node.items()}

    found: Fragment = inlined(schema)
    return found


def _resolve(fragment: Fragment) -> Fragment:
    """Reduce "this or null" to "this"."""
    while len(choices := [choice for choice in fragment.get("anyOf", []) if choice.get("type") != "null"]) == 1:
        fragment = choices[0]
    return fragment


def field_at(path: KeyPath, kind: type[Recipe] = Recipe) -> tuple[KeyPath, Fragment]:
    """Return the longest beginning of ``path`` that is in the schema, and the schema of it.

    Pydantic adds the branch of a union that it tried to a path; such parts are dropped.
    """
    fragment = _schema(kind)
    for depth, part in enumerate(path):
        if isinstance(part, str) and part in fragment.get("properties", {}):
            fragment = fragment["properties"][part]
        elif isinstance(part, int) and (items := _items(fragment)) is not None:
            fragment = items
        else:
            return path[:depth], fragment
        fragment = _resolve(fragment)
    return path, fragment


def properties(path: KeyPath, kind: type[Recipe] = Recipe) -> list[str]:
    """Return the keys that may stand at ``path``."""
    return list(field_at(path, kind)[1].get("properties", {}))


def options(fragment: Fragment) -> list[str]:
    """Return the words a key accepts, if it accepts words from a list; else an empty list."""
    fragment = _resolve(fragment)
    if "anyOf" in fragment:
        return [word for choice in fragment["anyOf"] for word in options(choice)]
    words = fragment.get("enum", [fragment["const"]] if "const" in fragment else [])
    return [word for word in words if isinstance(word, str)]


def expected(fragment: Fragment) -> str:
    """Describe the values a key takes: ``a whole number of at least 1, or 'auto'``."""
    fragment = _resolve(fragment)
    if "anyOf" in fragment:
        return ", or ".join(expected(choice) for choice in fragment["anyOf"])
    if "enum" in fragment:
        return _either([_quote(value) for value in fragment["enum"]])
    if "const" in fragment:
        return _quote(fragment["const"])
    match fragment.get("type"):
        case "object":
            keys = list(fragment.get("properties", {}))
            return f"keys of its own ({', '.join(keys)})" if keys else "keys of its own"
        case "array":
            return f"a list of {'words' if _resolve(fragment['items']).get('type') == 'string' else 'entries'}"
        case "boolean":
            return "true or false"
        case "integer":
            return f"a whole number{_range(fragment)}"
        case "number":
            return f"a number{_range(fragment)}"
        case _:
            return f"a size such as {fragment['examples'][0]}" if fragment.get("pattern") == SIZE_PATTERN else "text"


@cache
def leaf_paths(kind: type[Recipe] = Recipe) -> dict[str, list[KeyPath]]:
    """Return the paths of the recipe's leaves by last name; leaves within lists have no one path and are left out."""
    found: dict[str, list[KeyPath]] = {}

    def walk(fragment: Fragment, path: KeyPath) -> None:
        for name, child in fragment["properties"].items():
            inner = _resolve(child)
            if "properties" in inner and inner.get("additionalProperties") is False:
                walk(inner, (*path, name))
            else:
                found.setdefault(name, []).append((*path, name))

    walk(_schema(kind), ())
    return found


def _items(fragment: Fragment) -> Fragment | None:
    for choice in fragment.get("anyOf", [fragment]):
        if "items" in choice:
            items: Fragment = choice["items"]
            return items
    return None


def _range(fragment: Fragment) -> str:
    low, above = fragment.get("minimum"), fragment.get("exclusiveMinimum")
    high, below = fragment.get("maximum"), fragment.get("exclusiveMaximum")
    parts = []
    if low is not None:
        parts.append(f"of at least {low:g}" if isinstance(low, float) else f"of at least {low}")
    if above is not None:
        parts.append(f"above {above:g}")
    if high is not None:
        parts.append(f"of at most {high:g}")
    if below is not None:
        parts.append(f"below {below}")
    return " " + " and ".join(parts) if parts else ""


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _quote(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
