"""Chat messages: checked one by one, in the form chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streamtune.errors import DataError, did_you_mean

__all__ = ["ROLES", "SHAREGPT_ROLES", "check_message", "from_sharegpt", "text_field"]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles a message may have; ``assistant`` is the one that is trained."""

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Speaker of a sharegpt turn -> role in chat templates."""

_ANSWER_FIELDS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields that stand in for an assistant's content."""


def text_field(columns: Mapping[str, Any], name: str, origin: str) -> str:
    """Return the string in a column.

    Raises:
        DataError: It is missing, no string, or no valid Unicode.
    """
    value = columns.get(name)
    if not isinstance(value, str):
        kind = "missing" if value is None else f"of type {type(value).__name__}"
        raise DataError(f"'{name}' must be a string, it is {kind}", where=origin)
    return _unicode(value, name, origin)


def check_message(message: Any, place: str, origin: str) -> dict[str, Any]:
    """Check a message and return it in the form templates expect: content a string, tool arguments an object.

    Args:
        message: A message as the row has it.
        place: Where in the row, ``messages[2]``.
        origin: The row, for errors.

    Raises:
        DataError: It is no object, its role is unknown, or its content is missing or no text.
    """
    if not isinstance(message, dict):
        raise DataError(f"{place} must be an object with 'role' and 'content'", where=origin)
    role = message.get("role")
    if role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        what = f"{place} has the unknown role '{role}'" if role is not None else f"{place} has no 'role'"
        known = f"roles are {', '.join(ROLES)}"
        raise DataError(what, where=origin, mend=f"{known}; {hint}" if hint else known)
    checked = {key: value for key, value in message.items() if value is not None}
    stands_in = role == "assistant" and any(checked.get(field) for field in _ANSWER_FIELDS)
    if "content" in checked or not stands_in:
        checked["content"] = _content(checked.get("content"), f"{place}.content", origin)
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], f"{place}.tool_calls", origin)
    if checked.get("weight", 1) not in (0, 1):
        raise DataError(f"{place}.weight must be 0 (not trained) or 1", where=origin)
    return checked


def from_sharegpt(turn: Any, place: str, origin: str) -> dict[str, Any]:
    """Convert ``{"from": "human", "value": "..."}`` to a message.

    Raises:
        DataError: It is no such object, or the speaker is unknown.
    """
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise DataError(f"{place} must be an object with 'from' and 'value'", where=origin)
    speaker, value = turn["from"], turn["value"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        known = f"known are {', '.join(SHAREGPT_ROLES)}"
        hint = did_you_mean(speaker, SHAREGPT_ROLES) if isinstance(speaker, str) else ""
        mend = f"{known}; {hint}" if hint else known
        raise DataError(f"{place} is from an unknown speaker '{speaker}'", where=origin, mend=mend)
    if speaker == "function_call":
        return {"role": "assistant", "tool_calls": _sharegpt_calls(value, f"{place}.value", origin)}
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    return {**rest, "role": SHAREGPT_ROLES[speaker], "content": value}


def _sharegpt_calls(value: Any, place: str, origin: str) -> list[dict[str, Any]]:
    """Return the calls in a ``function_call`` turn, whose value is JSON: one call or a list of them."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{place} must be a tool call in JSON: {error}", where=origin) from error
    return [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]


def _content(content: Any, place: str, origin: str) -> str:
    """Return the text of a message; a list of text parts is joined."""
    if isinstance(content, str):
        return _unicode(content, place, origin)
    if content is None:
        raise DataError(f"{place} is missing", where=origin, mend="an empty string is allowed")
    if not isinstance(content, list):
        raise DataError(f"{place} must be a string, it is of type {type(content).__name__}", where=origin)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{place}[{index}] is no text part; only text is trained on", where=origin)
        texts.append(_unicode(part["text"], place, origin))
    return "".join(texts)


def _tool_calls(calls: Any, place: str, origin: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise DataError(f"{place} must be a list", where=origin)
    return [_tool_call(call, f"{place}[{index}]", origin) for index, call in enumerate(calls)]


def _tool_call(call: Any, place: str, origin: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object: templates write JSON, and would quote a string twice."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{place} must be an object with a function 'name' and 'arguments'", where=origin)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise DataError(f"{place}: the arguments are malformed JSON: {error}", where=origin) from error
    checked = {**function, "arguments": {} if arguments is None else arguments}
    return {**call, "function": checked} if "function" in call else checked


def _unicode(text: str, place: str, origin: str) -> str:
    """Return the text; raise if it holds half a surrogate pair, which is no character and no tokenizer takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"'{place}' holds half a surrogate pair at character {error.start}", where=origin
            ) from error
    return text
