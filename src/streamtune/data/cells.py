"""Cells of a row of any type: JSON text in a cell, names of columns, kinds of values for messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streamtune.errors import DataError

__all__ = ["column_names", "has_roles", "kind_of", "parsed_cell", "parsed_messages", "tools_of"]


def column_names(columns: Mapping[str, Any]) -> str:
    """Return the columns of a row, quoted, for a message."""
    return ", ".join(f"'{name}'" for name in columns) or "no column"


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value, for a message."""
    kinds = {str: "a string", dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def parsed_cell(value: Any) -> Any:
    """Return the list or object that a CSV or Parquet cell holds as JSON text; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):  # of brackets without end
            return value
    return value


def parsed_messages(value: Any) -> Any:
    """Return the list of messages that a cell holds as JSON text; a prompt that starts with a bracket stays text."""
    parsed = parsed_cell(value)
    return parsed if isinstance(parsed, list) and has_roles(parsed) else value


def has_roles(turns: Any) -> bool:
    """Return True if a cell holds a list whose first item is a message with a role."""
    turns = parsed_cell(turns)
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "role" in turns[0]


def tools_of(value: Any, origin: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row; None if it has none.

    Raises:
        DataError: They are not a list of objects.
    """
    value = parsed_cell(value)
    if value is None or value in ("", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError("'tools' must be a list of JSON schemas", where=origin)
    return value
