"""Cells of a row of any type: JSON text in a cell, names of columns, kinds of values; prompts and answers in a cell."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from streamtune.data.messages import check_message, from_sharegpt, text_field
from streamtune.errors import DataError

__all__ = [
    "TextOrMessages",
    "check_order",
    "column_names",
    "has_roles",
    "kind_of",
    "parsed_cell",
    "parsed_messages",
    "prompt_digest",
    "text_or_messages",
    "texts_of",
    "tools_of",
]


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


TextOrMessages = str | list[dict[str, Any]]
"""Text, or checked messages."""


def text_or_messages(columns: Mapping[str, Any], name: str, origin: str) -> TextOrMessages:
    """Return the content of a column: its text, or its messages, checked. A single message needs no list around it.

    Args:
        columns: The columns of the row.
        name: The column, which must be there.
        origin: The row, for errors.

    Raises:
        DataError: It is neither, a message is wrong, or it is empty.
    """
    value = parsed_cell(columns[name])
    value = [value] if isinstance(value, dict) and ("role" in value or "from" in value) else value
    if isinstance(columns[name], str) and not (isinstance(value, list) and (has_roles(value) or _has_speakers(value))):
        value = text_field(columns, name, origin)  # text that merely starts with a bracket stays text
        if not value.strip():
            raise DataError(f"'{name}' is empty", where=origin, mend="remove the row")
        return value
    if not isinstance(value, list):
        raise DataError(f"'{name}' must be a string or a list of messages, it is {kind_of(value)}", where=origin)
    if not value:
        raise DataError(f"'{name}' is empty", where=origin, mend="remove the row")
    messages = []
    for index, item in enumerate(value):
        place = f"{name}[{index}]"
        item = from_sharegpt(item, place, origin) if isinstance(item, dict) and "from" in item else item
        messages.append(check_message(item, place, origin))
    return messages


def _has_speakers(turns: list[Any]) -> bool:
    return bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]


def check_order(messages: Sequence[Mapping[str, Any]], name: str, origin: str) -> None:
    """Raise if two messages of the user, or of the assistant, follow each other.

    Args:
        messages: Checked messages.
        name: The column, for the error.
        origin: The row, for the error.

    Raises:
        DataError: They do not alternate.
    """
    after = None
    for index, message in enumerate(messages):
        role = message["role"]
        if role == after and role in ("user", "assistant"):
            raise DataError(
                f"{name}[{index}] is a second '{role}' message in a row: user and assistant must alternate",
                where=origin,
                mend="join the two messages, or remove one",
            )
        after = role


def texts_of(value: TextOrMessages) -> list[str]:
    """Return the text of a prompt or an answer, message by message."""
    if isinstance(value, str):
        return [value]
    return [message["content"] for message in value if message.get("content")]


def prompt_digest(prompt: TextOrMessages, tools: Any) -> bytes:
    """Return a hash of a prompt: rows with the same one are held out together."""
    return blake2b(json.dumps([prompt, tools], sort_keys=True, default=repr).encode(), digest_size=16).digest()
