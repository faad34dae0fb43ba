"""Validate the fields of a row: text, chat messages, JSON text, prompts and answers. A fault raises ``DataError``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from streamtune.errors import DataError, did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages; only ``assistant`` is trained unless ``roles_to_train`` names others."""

FLAGS = ("train", "training", "loss", "weight")
"""Synonymous fields of a message that say if it is trained. A checked message has ``weight`` alone."""

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
"""Fields that may take the place of an assistant's content."""


def text_field(columns: Mapping[str, Any], name: str, origin: str) -> str:
    value = columns.get(name)
    if not isinstance(value, str):
        kind = "missing" if value is None else f"of type {type(value).__name__}"
        raise DataError(f"'{name}' must be a string, it is {kind}", where=origin)
    return _unicode(value, name, origin)


def check_message(message: Any, place: str, origin: str) -> dict[str, Any]:
    """Check a message and return it in the form that templates expect: content a string, tool arguments an object.

    Args:
        place: Place in the row, ``messages[2]``.
    """
    if not isinstance(message, dict):
        pairs = isinstance(message, (list, tuple)) and all(isinstance(each, (list, tuple)) for each in message)
        raise DataError(
            f"{place} must be an object with 'role' and 'content', it is {kind_of(message)}",
            where=origin,
            fix='a list of pairs is how a map is written: write {"role": "user", "content": "..."}' if pairs else "",
        )
    role = message.get("role")
    if role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        what = f"{place} has the unknown role '{role}'" if role is not None else f"{place} has no 'role'"
        known = f"roles are {', '.join(ROLES)}"
        raise DataError(what, where=origin, fix=f"{known}; {hint}" if hint else known)
    checked = {key: value for key, value in _filled(message).items() if key not in FLAGS}
    stands_in = role == "assistant" and any(checked.get(field) for field in _ANSWER_FIELDS)
    if "content" in checked or not stands_in:
        checked["content"] = _content(checked.get("content"), f"{place}.content", origin)
    if "tool_calls" in checked:
        calls, where = checked["tool_calls"], f"{place}.tool_calls"
        if not isinstance(calls, list):
            raise DataError(f"{where} must be a list", where=origin)
        checked["tool_calls"] = [_tool_call(call, f"{where}[{index}]", origin) for index, call in enumerate(calls)]
    flag = _trained_flag(message, place, origin)
    return checked if flag is None else {**checked, "weight": int(flag)}


def _trained_flag(message: Mapping[str, Any], place: str, origin: str) -> bool | None:
    """Return True or False if a message says that it is trained or not; None if it does not say."""
    if message.keys().isdisjoint(FLAGS):
        return None
    given: dict[str, bool] = {}
    for name in FLAGS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            known = "0 (not trained) or 1" if name == "weight" else "true or false"
            shown = f"the text {value!r}" if isinstance(value, str) else repr(value)
            part = "a message is trained or not: a part of its loss is not" if isinstance(value, float) else ""
            raise DataError(f"{place}.{name} must be {known}, it is {shown}", where=origin, fix=part)
        given[name] = bool(value)
    if len(set(given.values())) > 1:
        both = " and ".join(f"'{name}: {json.dumps(message[name])}'" for name in given)
        raise DataError(f"{place} has {both}, which contradict each other", where=origin, fix="keep one of them")
    return next(iter(given.values()), None)


def from_sharegpt(turn: Any, place: str, origin: str) -> dict[str, Any]:
    """Convert ``{"from": "human", "value": "..."}`` to a message."""
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise DataError(f"{place} must be an object with 'from' and 'value'", where=origin)
    speaker, value = turn["from"], turn["value"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        known = f"known are {', '.join(SHAREGPT_ROLES)}"
        hint = did_you_mean(speaker, SHAREGPT_ROLES) if isinstance(speaker, str) else ""
        fix = f"{known}; {hint}" if hint else known
        raise DataError(f"{place} is from an unknown speaker '{speaker}'", where=origin, fix=fix)
    if speaker == "function_call":
        flags = {name: turn[name] for name in FLAGS if name in turn}
        return {"role": "assistant", "tool_calls": _sharegpt_calls(value, f"{place}.value", origin), **flags}
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    return {**rest, "role": SHAREGPT_ROLES[speaker], "content": value}


def _sharegpt_calls(value: Any, place: str, origin: str) -> list[dict[str, Any]]:
    """Return the calls in a ``function_call`` turn, whose value is JSON: a call or a list of calls."""
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
        raise DataError(f"{place} is missing", where=origin, fix="an empty string is allowed")
    if not isinstance(content, list):
        raise DataError(f"{place} must be a string, it is of type {type(content).__name__}", where=origin)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{place}[{index}] is no text part; only text is trained on", where=origin)
        texts.append(_unicode(part["text"], place, origin))
    return "".join(texts)


def _tool_call(call: Any, place: str, origin: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object: templates write JSON, and would quote a string twice."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{place} must be an object with a function 'name' and 'arguments'", where=origin)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise DataError(f"{place}: the arguments are malformed JSON: {error}", where=origin) from error
    checked = {**_filled(function), "arguments": {} if arguments is None else arguments}
    return checked if function is call else {**_filled(call), "function": checked}


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def without_nulls(value: Any) -> Any:
    """Drop keys whose value is None, at every depth.

    Arrow gives every struct of a column the same keys and fills missing ones with nulls, which a template would print.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _unicode(text: str, place: str, origin: str) -> str:
    """Return the text; raise if it holds half a surrogate pair, which no tokenizer takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"'{place}' holds half a surrogate pair at character {error.start}", where=origin
            ) from error
    return text


def column_names(columns: Mapping[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in columns) or "no column"


def kind_of(value: Any) -> str:
    kinds = {str: "a string", dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def parsed_cell(value: Any) -> Any:
    """Return the list or object that a CSV or Parquet cell holds as JSON text; any other value unchanged."""
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
    return _first_has("role", parsed_cell(turns))


def tools_of(value: Any, origin: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row in the form that chat templates read; None without tools."""
    return tools_and_form(value, origin)[0]


def tools_and_form(value: Any, origin: str) -> tuple[list[dict[str, Any]] | None, bool]:
    """Return the tools of a row as ``{"type": "function", "function": {...}}``, and True if a tool was a bare schema.

    ``apply_chat_template`` documents that form, and servers pass tools on in it. Without tools the list is None.
    """
    value = parsed_cell(value)
    if value is None or value in ("", []):
        return None, False
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError("'tools' must be a list of JSON schemas", where=origin)
    found: list[dict[str, Any]] = without_nulls(value) if _has_filler(value) else value
    wrapped = [_wrapped(tool) for tool in found]
    return wrapped, wrapped != found


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form ``{"type": "function", ...}``, also if it is the schema of a function alone."""
    bare = isinstance(tool.get("name"), str) and "parameters" in tool and tool.get("type", "function") == "function"
    if not bare or "function" in tool:
        return tool
    return {"type": "function", "function": {name: item for name, item in tool.items() if name != "type"}}


_MAY_BE_NULL = ("default", "const", "example")
"""Keys of a JSON schema that may be null."""


def _has_filler(schema: Any) -> bool:
    """Return True if a key is null that cannot be null in a schema: a table filled it, and perhaps other keys."""
    if isinstance(schema, dict):
        return any(name not in _MAY_BE_NULL if value is None else _has_filler(value) for name, value in schema.items())
    return isinstance(schema, list) and any(map(_has_filler, schema))


def variables_of(value: Any, origin: str) -> dict[str, Any]:
    """Return the chat template variables of a row, without nulls."""
    value = parsed_cell(value)
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise DataError(
            f"'chat_template_kwargs' must be an object, it is {kind_of(value)}",
            where=origin,
            fix='write it as {"enable_thinking": false}',
        )
    return _filled(value)


def has_system(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("role") in ("system", "developer") for message in messages)


def with_system(
    messages: list[dict[str, Any]], columns: Mapping[str, Any], origin: str
) -> tuple[list[dict[str, Any]], bool]:
    """Put the text of a row's column ``system`` before its messages, unless they have a system message.

    Returns:
        The messages, and True if the column differs from the system message that they have.
    """
    if not columns.get("system"):
        return messages, False
    text = text_field(columns, "system", origin)
    if has_system(messages):
        return messages, not any(message.get("content") == text for message in messages)
    return [{"role": "system", "content": text}, *messages], False


TextOrMessages = str | list[dict[str, Any]]
"""Text, or checked messages."""


def text_or_messages(columns: Mapping[str, Any], name: str, origin: str) -> TextOrMessages:
    """Return a column's text, or its checked messages. A single message needs no list around it."""
    value = parsed_cell(columns[name])
    value = [value] if isinstance(value, dict) and ("role" in value or "from" in value) else value
    if isinstance(columns[name], str) and not (_first_has("role", value) or _first_has("from", value)):
        value = text_field(columns, name, origin)  # text that merely starts with a bracket stays text
        if not value.strip():
            raise DataError(f"'{name}' is empty", where=origin, fix="remove the row")
        return value
    if not isinstance(value, list):
        raise DataError(f"'{name}' must be a string or a list of messages, it is {kind_of(value)}", where=origin)
    if not value:
        raise DataError(f"'{name}' is empty", where=origin, fix="remove the row")
    messages = []
    for index, item in enumerate(value):
        place = f"{name}[{index}]"
        item = from_sharegpt(item, place, origin) if isinstance(item, dict) and "from" in item else item
        messages.append(check_message(item, place, origin))
    return messages


def _first_has(key: str, turns: Any) -> bool:
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and key in turns[0]


def check_order(messages: Sequence[Mapping[str, Any]], name: str, origin: str) -> None:
    """Raise if two messages of the user, or of the assistant, follow each other; ``name`` is their column."""
    for index, (before, message) in enumerate(pairwise(messages), start=1):
        role = message["role"]
        if role == before["role"] and role in ("user", "assistant"):
            raise DataError(
                f"{name}[{index}] is a second '{role}' message in a row: user and assistant must alternate",
                where=origin,
                fix="join the two messages, or remove one",
            )


def texts_of(value: TextOrMessages) -> list[str]:
    """Return the texts of a prompt or an answer, message by message."""
    if isinstance(value, str):
        return [value]
    return [message["content"] for message in value if message.get("content")]


def prompt_digest(prompt: TextOrMessages, tools: Any) -> bytes:
    """Return a 16-byte hash of a prompt: rows with the same prompt are held out together."""
    return blake2b(json.dumps([prompt, tools], sort_keys=True, default=repr).encode(), digest_size=16).digest()
