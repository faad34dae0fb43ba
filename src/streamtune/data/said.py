"""Prompts and answers in a cell, in either form: text, or a list of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from streamtune.data.cells import has_roles, kind_of, parsed_cell
from streamtune.data.messages import check_message, from_sharegpt, text_field
from streamtune.errors import DataError

__all__ = ["Said", "check_order", "prompt_digest", "said", "texts_of"]

Said = str | list[dict[str, Any]]
"""Text, or checked messages."""


def said(columns: Mapping[str, Any], name: str, origin: str) -> Said:
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


def texts_of(value: Said) -> list[str]:
    """Return the text of a prompt or an answer, message by message."""
    if isinstance(value, str):
        return [value]
    return [message["content"] for message in value if message.get("content")]


def prompt_digest(prompt: Said, tools: Any) -> bytes:
    """Return a hash of a prompt: rows with the same one are held out together."""
    return blake2b(json.dumps([prompt, tools], sort_keys=True, default=repr).encode(), digest_size=16).digest()
