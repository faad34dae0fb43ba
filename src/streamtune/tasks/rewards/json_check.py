"""Check a JSON document against a JSON Schema, for the part of JSON Schema that scoring needs.

Read (draft 2020-12, https://json-schema.org): ``type``, ``enum``, ``const``, ``properties``, ``required``,
``additionalProperties``, ``items``, ``minItems``, ``maxItems``, ``uniqueItems``, ``minLength``, ``maxLength``,
``pattern``, ``minimum``, ``maximum``, ``exclusiveMinimum``, ``exclusiveMaximum``, ``multipleOf``, ``allOf``, ``anyOf``,
``oneOf``, ``not``; ``true`` and ``false`` as schemas. Keywords that only describe are ignored. Anything
else, ``$ref`` included, is a ``ValueError``: every document would meet a constraint that is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import Any

from streamtune.base.patterns import pattern_error, search_within_limit

DESCRIBES = {"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "format"}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and math.isfinite(value) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def _key(value: Any) -> Hashable:
    """Return a hashable value, equal for values that are the same in JSON: 1 is 1.0, but true is not 1."""
    if isinstance(value, list):
        return ("list", tuple(map(_key, value)))
    if isinstance(value, dict):
        return ("object", frozenset((key, _key(item)) for key, item in value.items()))
    return (isinstance(value, bool), value)


def _same(one: Any, other: Any) -> bool:
    return _key(one) == _key(other)


def _properties(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Check ``properties``, ``required`` and ``additionalProperties`` together: they depend on each other."""
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(key in value for key in schema.get("required", ())) and all(
        conforms(item, known.get(key, others)) for key, item in value.items()
    )


def _distinct(items: list[Any]) -> bool:
    return len({_key(item) for item in items}) == len(items)


def _divides(value: float, step: float) -> bool:
    """Return True if a number is a multiple of another, both as they are written: 0.3 is three times 0.1."""
    return (Fraction(str(value)) / Fraction(str(step))).denominator == 1


CHECKS: dict[str, tuple[Callable[[Any], bool] | None, Callable[[Any, Any], bool]]] = {
    "type": (None, lambda value, names: any(TYPES[n](value) for n in ([names] if isinstance(names, str) else names))),
    "enum": (None, lambda value, allowed: any(_same(value, one) for one in allowed)),
    "const": (None, _same),
    "items": (TYPES["array"], lambda value, schema: all(conforms(item, schema) for item in value)),
    "minItems": (TYPES["array"], lambda value, least: len(value) >= least),
    "maxItems": (TYPES["array"], lambda value, most: len(value) <= most),
    "uniqueItems": (TYPES["array"], lambda value, wanted: not wanted or _distinct(value)),
    "minLength": (TYPES["string"], lambda value, least: len(value) >= least),
    "maxLength": (TYPES["string"], lambda value, most: len(value) <= most),
    "pattern": (TYPES["string"], lambda value, pattern: search_within_limit(pattern, value)),
    "minimum": (_is_number, lambda value, least: value >= least),
    "maximum": (_is_number, lambda value, most: value <= most),
    "exclusiveMinimum": (_is_number, lambda value, least: value > least),
    "exclusiveMaximum": (_is_number, lambda value, most: value < most),
    "multipleOf": (_is_number, _divides),
    "allOf": (None, lambda value, schemas: all(conforms(value, one) for one in schemas)),
    "anyOf": (None, lambda value, schemas: any(conforms(value, one) for one in schemas)),
    "oneOf": (None, lambda value, schemas: sum(conforms(value, one) for one in schemas) == 1),
    "not": (None, lambda value, schema: not conforms(value, schema)),
}
"""Word -> (the values it speaks of, None for all; whether a value meets it)."""


def conforms(value: Any, schema: Any) -> bool:
    """Return True if a parsed JSON value conforms to a schema that :func:`check_schema` accepted."""
    if isinstance(schema, bool):
        return schema
    for word, (speaks_of, meets) in CHECKS.items():
        if word in schema and (speaks_of is None or speaks_of(value)) and not meets(value, schema[word]):
            return False
    return not isinstance(value, dict) or _properties(value, schema)


LISTS = {"allOf", "anyOf", "oneOf"}
COUNTS = {"minItems", "maxItems", "minLength", "maxLength"}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


def check_schema(schema: Any, path: str = "the schema") -> None:
    """Check that a schema is well formed and that all of it is read; a ``ValueError`` names the place."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{path} is neither an object nor true or false")
    for word, value in schema.items():
        if word in ("items", "not", "additionalProperties"):
            check_schema(value, f"{path}.{word}")
        elif word in LISTS or word == "properties":
            _check_schemas(word, value, f"{path}.{word}")
        elif word in CHECKS or word == "required":
            _check_word(word, value, path)
        elif word not in DESCRIBES:
            raise ValueError(f"{path} uses '{word}', which is not read")


def _check_schemas(word: str, value: Any, path: str) -> None:
    if not isinstance(value, dict if word == "properties" else list):
        raise ValueError(f"{path} is no {'object' if word == 'properties' else 'list'}")
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        check_schema(one, f"{path}.{key}")


def _check_word(word: str, value: Any, path: str) -> None:
    names = [value] if isinstance(value, str) else value
    well_formed = {
        "type": lambda: isinstance(names, list) and all(isinstance(n, str) and n in TYPES for n in names),
        "enum": lambda: isinstance(value, list),
        "required": lambda: isinstance(value, list) and all(isinstance(key, str) for key in value),
        "uniqueItems": lambda: isinstance(value, bool),
        "pattern": lambda: isinstance(value, str) and pattern_error(value) is None,
        **{bound: lambda: _is_number(value) and (word != "multipleOf" or value > 0) for bound in BOUNDS},
        **{count: lambda: isinstance(value, int) and not isinstance(value, bool) and value >= 0 for count in COUNTS},
    }
    if not well_formed.get(word, lambda: True)():
        raise ValueError(f"{path}: {word} cannot be {value!r}")
