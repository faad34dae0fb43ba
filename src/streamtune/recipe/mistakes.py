"""Find all mistakes in a recipe, and report them in one error.

Mistakes are found by pydantic and by the rules on combinations of keys. The text about the values that a key accepts is
made from its JSON schema. In all functions ``recipe_type`` is the class of the recipe.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from pydantic import ValidationError

from streamtune.base.text import SIZE_PATTERN
from streamtune.errors import RecipeError, did_you_mean
from streamtune.recipe.yaml import KeyOrigins, KeyPath, Mistake, parse_scalar, show_path

from .aliases import ALIASES, CHOICES, SWITCHES
from .rules import TOO_LARGE
from .schema import Recipe, objectives_with

MOST_SHOWN = 20


def mistakes_to_error(mistakes: Sequence[Mistake], origins: KeyOrigins) -> RecipeError:
    """Return one error about all mistakes, in the order of the file."""
    mistakes = sorted(mistakes, key=lambda mistake: mistake.line or origins.key_line(mistake.path))
    first, *others = mistakes
    if not others:
        return RecipeError(first.what, where=_mistake_location(first, origins), fix=first.fix)
    lines = [f"{len(mistakes)} mistakes"]
    for mistake in mistakes[:MOST_SHOWN]:
        where = _mistake_location(mistake, origins).removeprefix(f"{origins.file}:")
        where = f"line {where}" if where.isdecimal() else where
        lines.append(f"- {where}: {mistake.what}" + (f"; {mistake.fix}" if mistake.fix else ""))
    if (left := len(mistakes) - MOST_SHOWN) > 0:
        lines.append(f"- and {left} more")
    return RecipeError("\n".join(lines), where=_mistake_location(first, origins))


def find_recipe_mistakes(tree: dict[str, Any], recipe_type: type[Recipe]) -> list[Mistake]:
    """Return all mistakes in a recipe; empty if it is correct.

    Rules about several keys stop at their first mistake. So the key of each mistake is removed, and the rest is checked
    again. A mistake that names a removed key is not reported, because the removal may have caused it.
    """
    tree, found = copy.deepcopy(tree), list[Mistake]()
    gone: set[KeyPath] = set()
    while True:
        try:
            recipe_type.model_validate(tree)
        except ValidationError as error:
            mistakes = mistakes_from_validation(error, tree, recipe_type)
        else:
            return found
        named = re.compile(rf"\b({'|'.join(re.escape(str(path[-1])) for path in gone) or '(?!)'})\b")
        new = [each for each in mistakes if each.path not in gone and not named.search(f"{each.what} {each.fix}")]
        found += new
        gone |= {each.path for each in new}
        if not new or not all(_remove_key(tree, each.path) for each in new):
            return found


def _remove_key(tree: Any, path: KeyPath) -> bool:
    try:
        for part in path[:-1]:
            tree = tree[part]
        del tree[path[-1]]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def mistakes_from_validation(error: ValidationError, tree: dict[str, Any], recipe_type: type[Recipe]) -> list[Mistake]:
    """Return pydantic's findings as mistakes, one for each key, with the expected and the found value."""
    found: dict[KeyPath, Mistake] = {}
    for detail in error.errors():
        context = detail.get("ctx", {})
        loc = tuple(detail["loc"])
        if detail["type"] == "recipe":
            key = tuple(int(part) if part.isdecimal() else part for part in context["key"].split("."))
            mistake = Mistake(key, context["what"], context["mend"])
        elif detail["type"] == "extra_forbidden":
            mistake = unknown_key_mistake(loc, recipe_type)
        elif detail["type"] == "missing":
            fix = "add datasets: [{path: data/train.jsonl}]" if loc == ("datasets",) else f"add {loc[-1]}: ..."
            mistake = Mistake(loc, f"'{show_path(loc)}' is missing", fix)
        elif detail["type"] == TOO_LARGE:
            # The other branches of a union refuse the number too; only this one has the reason.
            mistake = _too_large_mistake(loc, tree, recipe_type, context["limit"])
            found.pop(mistake.path, None)
        else:
            mistake = _value_mistake(loc, tree, recipe_type)
        found.setdefault(mistake.path, mistake)
    # A list with a wrong entry is also reported as too short; the entry's mistake is clearer.
    outer = {path[:end] for path in found for end in range(len(path))}
    return [mistake for path, mistake in found.items() if path not in outer]


def unknown_key_mistake(path: KeyPath, recipe_type: type[Recipe]) -> Mistake:
    """Return the mistake for an unknown key; its fix names the most similar known key."""
    parent, name = path[:-1], str(path[-1])
    known = allowed_keys_at(parent, recipe_type) + ([*ALIASES, *CHOICES, *SWITCHES] if not parent else [])
    if not parent and (others := objectives_with(name)):
        how = " or ".join(f"add objective: {other}, or run `streamtune {other}`" for other in others)
        return Mistake(path, f"'{name}' is a key of {' and '.join(others)} recipes only", how)
    leaves = {} if parent else leaf_key_paths(recipe_type)
    fix = did_you_mean(name, [*known, *leaves])
    nearest = fix.split("'")[1] if fix else ""
    if nearest in leaves and nearest not in known:
        fix = f"did you mean '{show_path(leaves[nearest][0])}'?"
    if elsewhere := [place for place in leaf_key_paths(recipe_type).get(name, []) if place != path]:
        place = elsewhere[0]
        fix = f"write it under '{show_path(place[:-1])}:'" if place[:-1] else "write it at the top level"
    elif not fix and parent:
        fix = f"keys of '{show_path(parent)}': {', '.join(known)}"
    shown = f" in '{show_path(parent)}'" if parent else ""
    return Mistake(path, f"unknown key '{name}'{shown}", fix or "`streamtune schema` lists every key")


def _mistake_location(mistake: Mistake, origins: KeyOrigins) -> str:
    return f"{origins.file}:{mistake.line}" if mistake.line else origins.key_origin(*mistake.path)


def _value_mistake(path_in_error: KeyPath, tree: dict[str, Any], recipe_type: type[Recipe]) -> Mistake:
    path, fragment = schema_at(path_in_error, recipe_type)
    value = _value_at(path, tree)
    name = show_path(path)
    if value is None:
        return Mistake(
            path,
            f"'{name}' has no value; it must be {describe_accepted_values(fragment)}",
            "write a value, or delete the line",
        )
    what = f"'{name}' must be {describe_accepted_values(fragment)}; found {_describe_value(value)}"
    return Mistake(path, what, _suggest_fix(fragment, value))


def _too_large_mistake(
    path_in_error: KeyPath, tree: dict[str, Any], recipe_type: type[Recipe], max_value: int
) -> Mistake:
    path, _ = schema_at(path_in_error, recipe_type)
    return Mistake(
        path,
        f"'{show_path(path)}' must be at most {max_value:,}; found {_describe_value(_value_at(path, tree))}",
        "write a smaller number",
    )


def _value_at(path: KeyPath, tree: Any) -> Any:
    for part in path:
        if not isinstance(tree, dict | list):
            return tree  # a single value in place of a list
        tree = cast("Any", tree)[part]
    return tree


def _describe_value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f"'{value}'" if len(value) <= 60 else f"'{value[:57]}...'"
        case []:
            return "an empty list"
        case list():
            return "a list with an empty text" if "" in value else "a list"
        case dict():
            return "a group of keys"
        case _:
            return str(value) if len(str(value)) <= 60 else f"a number of {len(str(value))} digits"


def _suggest_fix(fragment: dict[str, Any], value: Any) -> str:
    """Return the fix for a value with a common mistake, such as text in place of a number; empty for other values."""
    takes = {choice.get("type") for choice in fragment.get("anyOf", [fragment])}
    if "boolean" in takes and isinstance(value, str) and value.lower() in _BOOLEANS:
        return f"write {_BOOLEANS[value.lower()]}"
    if takes & {"integer", "number"} and (number := _parse_number(value)) is not None:
        return f"write {number}"
    if "integer" in takes and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, str) and (fix := did_you_mean(value, accepted_words(fragment))):
        return fix
    if isinstance(value, str) and "path" in fragment.get("properties", {}):
        return f"write {{path: {value}}}"
    if "array" in takes and isinstance(value, str):
        return f"write [{value}]"
    if "array" in takes and isinstance(value, list) and "" in value:
        return "delete the empty text"
    if "array" in takes and isinstance(value, dict):
        return "start each entry with '- '"
    if takes == {"string"} and not accepted_words(fragment) and isinstance(value, (bool, int, float)):
        patterns = [part["pattern"] for part in (fragment, *fragment.get("anyOf", ())) if "pattern" in part]
        return "put the value in quotes" if all(re.search(each, str(value)) for each in patterns) else ""
    return ""


_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "true": "true",
               "no": "false", "off": "false", "n": "false", "false": "false"}  # fmt: skip
_SUFFIXES = {"": 1, "k": 1024, "m": 1024**2}


def _parse_number(value: Any) -> int | float | None:
    """Return the number meant by ``8_192``, ``"8192"``, ``8,192`` or ``8k``; None for other values."""
    if not isinstance(value, str):
        return None
    if whole := re.fullmatch(r"([0-9][0-9_,]{0,30}) ?([kKmM]?)", value):
        return int(re.sub("[_,]", "", whole[1])) * _SUFFIXES[whole[2].lower()]
    number = parse_scalar(value)
    return number if isinstance(number, (int, float)) and not isinstance(number, bool) else None


Fragment = dict[str, Any]


@cache
def _inlined_schema(recipe_type: type[Recipe]) -> Fragment:
    """Return the recipe's schema with every reference replaced by its definition."""
    schema = recipe_type.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline_references(node: Any) -> Any:
        if isinstance(node, list):
            return [inline_references(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inline_references(definitions[node["$ref"].rpartition("/")[2]])
        return {key: inline_references(value) for key, value in node.items()}

    found: Fragment = inline_references(schema)
    return found


def _drop_null_option(fragment: Fragment) -> Fragment:
    """Return the schema of X if ``fragment`` is the schema of "X or null"; otherwise ``fragment``."""
    while len(choices := [choice for choice in fragment.get("anyOf", []) if choice.get("type") != "null"]) == 1:
        fragment = choices[0]
    return fragment


def schema_at(path: KeyPath, recipe_type: type[Recipe] = Recipe) -> tuple[KeyPath, Fragment]:
    """Return the longest prefix of ``path`` that exists in the schema, and the schema of the value there.

    Pydantic also adds to a path the branch of a union that it tried; such parts are dropped.
    """
    fragment = _inlined_schema(recipe_type)
    for depth, part in enumerate(path):
        if isinstance(part, str) and part in fragment.get("properties", {}):
            fragment = fragment["properties"][part]
        elif isinstance(part, int) and (items := _list_item_schema(fragment)) is not None:
            fragment = items
        elif isinstance(part, str) and (named := _mapping_value_schema(fragment)) is not None:
            fragment = named
        else:
            return path[:depth], fragment
        fragment = _drop_null_option(fragment)
    return path, fragment


def allowed_keys_at(path: KeyPath, recipe_type: type[Recipe] = Recipe) -> list[str]:
    return list(schema_at(path, recipe_type)[1].get("properties", {}))


def accepted_words(fragment: Fragment) -> list[str]:
    """Return the strings that a key accepts, if it accepts only certain strings; otherwise an empty list."""
    fragment = _drop_null_option(fragment)
    if "anyOf" in fragment:
        return [word for choice in fragment["anyOf"] for word in accepted_words(choice)]
    words = fragment.get("enum", [fragment["const"]] if "const" in fragment else [])
    return [word for word in words if isinstance(word, str)]


def describe_accepted_values(fragment: Fragment) -> str:
    """Describe the values that a key accepts, such as ``a whole number of at least 1, or 'auto'``."""
    fragment = _drop_null_option(fragment)
    if "anyOf" in fragment:
        return ", or ".join(dict.fromkeys(describe_accepted_values(choice) for choice in fragment["anyOf"]))
    if "enum" in fragment:
        return _join_with_or([_quote(value) for value in fragment["enum"]])
    if "const" in fragment:
        return _quote(fragment["const"])
    match fragment.get("type"):
        case "object":
            keys = list(fragment.get("properties", {}))
            return f"a group of keys ({', '.join(keys)})" if keys else "a group of keys"
        case "array":
            return f"a list of {'texts' if _drop_null_option(fragment['items']).get('type') == 'string' else 'entries'}"
        case "boolean":
            return "true or false"
        case "integer":
            return f"a whole number{_describe_range(fragment)}"
        case "number":
            return f"a number{_describe_range(fragment)}"
        case _:
            noun = "a size" if fragment.get("pattern") == SIZE_PATTERN else "text"
            return f"{noun} such as {fragment['examples'][0]}" if "examples" in fragment else noun


@cache
def leaf_key_paths(recipe_type: type[Recipe] = Recipe) -> dict[str, list[KeyPath]]:
    """Return a mapping from the last component of a key to the paths that end with it, such as ``levels`` ->
    ``engine.levels``.

    Groups, and keys inside lists, are left out.
    """
    found: dict[str, list[KeyPath]] = {}

    def collect_leaves(fragment: Fragment, path: KeyPath) -> None:
        for name, child in fragment["properties"].items():
            inner = _drop_null_option(child)
            if "properties" in inner and inner.get("additionalProperties") is False:
                collect_leaves(inner, (*path, name))
            else:
                found.setdefault(name, []).append((*path, name))

    collect_leaves(_inlined_schema(recipe_type), ())
    return found


def _list_item_schema(fragment: Fragment) -> Fragment | None:
    for choice in fragment.get("anyOf", [fragment]):
        if "items" in choice:
            items: Fragment = choice["items"]
            return items
    return None


def _mapping_value_schema(fragment: Fragment) -> Fragment | None:
    named = fragment.get("additionalProperties")
    return named if isinstance(named, dict) else None


def _describe_range(fragment: Fragment) -> str:
    low, above = fragment.get("minimum"), fragment.get("exclusiveMinimum")
    high, below = fragment.get("maximum"), fragment.get("exclusiveMaximum")
    parts = []
    if low is not None:
        parts.append(f"of at least {low:g}" if isinstance(low, float) else f"of at least {low}")
    if above is not None:
        parts.append(f"above {above:g}")
    if high is not None:
        parts.append(f"at most {high:g}" if parts else f"of at most {high:g}")
    if below is not None:
        parts.append(f"below {below}")
    return " " + " and ".join(parts) if parts else ""


def _join_with_or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _quote(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
