"""Check a JSON document against a JSON Schema. A subset of JSON Schema is supported.

Supported keywords (draft 2020-12, https://json-schema.org): ``type``, ``enum``, ``const``, ``properties``,
``required``, ``additionalProperties``, ``items``, ``minItems``, ``maxItems``, ``uniqueItems``, ``minLength``,
``maxLength``, ``pattern``, ``minimum``, ``maximum``, ``exclusiveMinimum``, ``exclusiveMaximum``, ``multipleOf``,
``allOf``, ``anyOf``, ``oneOf``, ``not``. The schemas ``true`` and ``false`` are supported too. Annotations such as
``title`` are ignored. Any other keyword, such as ``$ref``, raises a ``ValueError``, because a document could otherwise
pass without conforming to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import Any

from streamtune.base.patterns import pattern_error, search_within_limit

ANNOTATIONS = {"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "format"}


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


def _to_hashable(value: Any) -> Hashable:
    """Return a hashable form of a JSON value. Equal JSON values have equal forms: 1 equals 1.0, but true is not 1."""
    if isinstance(value, list):
        return ("list", tuple(map(_to_hashable, value)))
    if isinstance(value, dict):
        return ("object", frozenset((key, _to_hashable(item)) for key, item in value.items()))
    return (isinstance(value, bool), value)


def _equal(one: Any, other: Any) -> bool:
    return _to_hashable(one) == _to_hashable(other)


def _passes_properties(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(key in value for key in schema.get("required", ())) and all(
        conforms(item, known.get(key, others)) for key, item in value.items()
    )


def _all_distinct(items: list[Any]) -> bool:
    return len({_to_hashable(item) for item in items}) == len(items)


def _is_multiple(value: float, step: float) -> bool:
    """Return True if ``value`` is a multiple of ``step`` in decimal notation: 0.3 is a multiple of 0.1."""
    return (Fraction(str(value)) / Fraction(str(step))).denominator == 1


CHECKS: dict[str, tuple[Callable[[Any], bool] | None, Callable[[Any, Any], bool]]] = {
    "type": (None, lambda value, names: any(TYPES[n](value) for n in ([names] if isinstance(names, str) else names))),
    "enum": (None, lambda value, allowed: any(_equal(value, one) for one in allowed)),
    "const": (None, _equal),
    "items": (TYPES["array"], lambda value, schema: all(conforms(item, schema) for item in value)),
    "minItems": (TYPES["array"], lambda value, least: len(value) >= least),
    "maxItems": (TYPES["array"], lambda value, most: len(value) <= most),
    "uniqueItems": (TYPES["array"], lambda value, wanted: not wanted or _all_distinct(value)),
    "minLength": (TYPES["string"], lambda value, least: len(value) >= least),
    "maxLength": (TYPES["string"], lambda value, most: len(value) <= most),
    "pattern": (TYPES["string"], lambda value, pattern: search_within_limit(pattern, value)),
    "minimum": (_is_number, lambda value, least: value >= least),
    "maximum": (_is_number, lambda value, most: value <= most),
    "exclusiveMinimum": (_is_number, lambda value, least: value > least),
    "exclusiveMaximum": (_is_number, lambda value, most: value < most),
    "multipleOf": (_is_number, _is_multiple),
    "allOf": (None, lambda value, schemas: all(conforms(value, one) for one in schemas)),
    "anyOf": (None, lambda value, schemas: any(conforms(value, one) for one in schemas)),
    "oneOf": (None, lambda value, schemas: sum(conforms(value, one) for one in schemas) == 1),
    "not": (None, lambda value, schema: not conforms(value, schema)),
}
"""Keyword -> (test of a value's type, or None for all types; check of a value of this type against the keyword)."""


def conforms(value: Any, schema: Any) -> bool:
    """Return True if a parsed JSON value conforms to a schema that :func:`check_schema` accepted."""
    if isinstance(schema, bool):
        return schema
    for keyword, (constrains, passes) in CHECKS.items():
        if keyword in schema and (constrains is None or constrains(value)) and not passes(value, schema[keyword]):
            return False
    return not isinstance(value, dict) or _passes_properties(value, schema)


SCHEMA_LIST_KEYS = {"allOf", "anyOf", "oneOf"}
COUNT_KEYS = {"minItems", "maxItems", "minLength", "maxLength"}
NUMBER_KEYS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


def check_schema(schema: Any, path: str = "the schema") -> None:
    """Check that a parsed schema is well formed and has only supported keywords. ``path`` is its name in errors.

    Raises:
        ValueError: The schema is malformed or has another keyword; the message has the path of the faulty part.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{path} must be an object, true or false, found {type(schema).__name__}")
    for keyword, value in schema.items():
        if keyword in ("items", "not", "additionalProperties"):
            check_schema(value, f"{path}.{keyword}")
        elif keyword in SCHEMA_LIST_KEYS or keyword == "properties":
            _check_subschemas(keyword, value, f"{path}.{keyword}")
        elif keyword in CHECKS or keyword == "required":
            _check_keyword(keyword, value, path)
        elif keyword not in ANNOTATIONS:
            raise ValueError(f"{path} has '{keyword}', which is not supported")


def _check_subschemas(keyword: str, value: Any, path: str) -> None:
    if not isinstance(value, dict if keyword == "properties" else list):
        wanted = "an object" if keyword == "properties" else "a list"
        raise ValueError(f"{path} must be {wanted}, found {type(value).__name__}")
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        check_schema(one, f"{path}.{key}")


def _check_keyword(keyword: str, value: Any, path: str) -> None:
    names = [value] if isinstance(value, str) else value
    well_formed = {
        "type": lambda: isinstance(names, list) and all(isinstance(n, str) and n in TYPES for n in names),
        "enum": lambda: isinstance(value, list),
        "required": lambda: isinstance(value, list) and all(isinstance(key, str) for key in value),
        "uniqueItems": lambda: isinstance(value, bool),
        "pattern": lambda: isinstance(value, str) and pattern_error(value) is None,
        **{bound: lambda: _is_number(value) and (keyword != "multipleOf" or value > 0) for bound in NUMBER_KEYS},
        **{
            count: lambda: isinstance(value, int) and not isinstance(value, bool) and value >= 0 for count in COUNT_KEYS
        },
    }
    if not well_formed.get(keyword, lambda: True)():
        raise ValueError(f"{path}: {keyword} cannot be {value!r}")
