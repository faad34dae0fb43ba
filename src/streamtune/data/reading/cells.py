"""Check the fields of a row: text, chat messages, JSON text, prompts and answers. A bad field raises ``DataError``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NoReturn

from streamtune.errors import DataError, did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages; only ``assistant`` is trained on unless ``roles_to_train`` names other roles."""

FLAGS = ("train", "training", "loss", "weight")
"""Names of the field that selects whether to train on a message. :func:`check_message` keeps only ``weight``."""

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
"""Speaker (``from``) of a ShareGPT turn -> role in chat templates."""

_ANSWER_FIELDS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields of an assistant message that make ``content`` optional."""


class DuplicateKeyError(ValueError):
    """A JSON object has a key twice; JSON parsers differ in which of the two values they use."""


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKeyError(next(name for name in names if names.count(name) > 1))
    return columns


def _refuse_json_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON does not allow {name}")


STRICT_JSON = json.JSONDecoder(object_pairs_hook=_reject_duplicate_keys, parse_constant=_refuse_json_constant)
"""Decoder that raises ``ValueError`` for a key that an object has twice, and for NaN and infinity."""


def _decode_json(text: str, subject: str, origin: str) -> Any:
    """Decode JSON text that is a part of a row.

    Args:
        subject: Beginning of the error message, such as ``"'tools' is"``.

    Raises:
        DataError: The text is malformed, nested too deeply, or has a key twice in one object.
    """
    try:
        return STRICT_JSON.decode(text)
    except DuplicateKeyError as error:
        what = f"{subject} JSON with the key '{error}' twice in one object"
        raise DataError(what, where=origin, fix="keep one of the two") from error
    except RecursionError as error:
        raise DataError(f"{subject} JSON that is nested too deeply", where=origin, fix=_FIX_ROW) from error
    except ValueError as error:
        raise DataError(f"{subject} malformed JSON: {error}", where=origin, fix=_FIX_ROW) from error


_FIX_ROW = "fix the row or remove it"


def read_text_cell(columns: Mapping[str, Any], name: str, origin: str) -> str:
    """Return the text of a column.

    Raises:
        DataError: The value is not a string, or is not valid Unicode.
    """
    value = columns.get(name)
    if not isinstance(value, str):
        kind = "no value" if value is None else f"type {type(value).__name__}"
        raise DataError(f"'{name}' must be a string, found {kind}", where=origin)
    return _check_unicode(value, name, origin)


def check_message(message: Any, location: str, origin: str) -> dict[str, Any]:
    """Check a message and return it as chat templates expect it: ``content`` a string, arguments of calls an object.

    Args:
        location: Place in the row, such as ``messages[2]``, for errors.
        origin: File and line of the row, for errors.

    Raises:
        DataError: The role, the content, a tool call or a training flag is malformed.
    """
    if not isinstance(message, dict):
        pairs = isinstance(message, (list, tuple)) and all(isinstance(each, (list, tuple)) for each in message)
        raise DataError(
            f"{location} must be an object with 'role' and 'content', found {json_type_of(message)}",
            where=origin,
            fix='write an object, not a list of pairs: {"role": "user", "content": "..."}' if pairs else "",
        )
    role = message.get("role")
    if role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        what = f"{location} has the unknown role '{role}'" if role is not None else f"{location} has no 'role'"
        known = f"use {', '.join(ROLES)}"
        raise DataError(what, where=origin, fix=f"{known}; {hint}" if hint else known)
    checked = {key: value for key, value in _drop_none_values(message).items() if key not in FLAGS}
    stands_in = role == "assistant" and any(checked.get(field) for field in _ANSWER_FIELDS)
    if "content" in checked or not stands_in:
        checked["content"] = _message_text(checked.get("content"), f"{location}.content", origin)
    if "tool_calls" in checked:
        calls, where = checked["tool_calls"], f"{location}.tool_calls"
        if not isinstance(calls, list):
            raise DataError(f"{where} must be a list, found {json_type_of(calls)}", where=origin)
        checked["tool_calls"] = [
            _parse_tool_call(call, f"{where}[{index}]", origin) for index, call in enumerate(calls)
        ]
    flag = _trained_flag(message, location, origin)
    return checked if flag is None else {**checked, "weight": int(flag)}


def _trained_flag(message: Mapping[str, Any], location: str, origin: str) -> bool | None:
    """Return True if a flag includes the message in training, False if a flag excludes it; None without a flag.

    Raises:
        DataError: A flag has an unknown value, or two flags contradict each other.
    """
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
            part = "fractions are not supported: write 0 or 1" if isinstance(value, float) else ""
            raise DataError(f"{location}.{name} must be {known}, found {shown}", where=origin, fix=part)
        given[name] = bool(value)
    if len(set(given.values())) > 1:
        both = " and ".join(f"'{name}: {json.dumps(message[name])}'" for name in given)
        raise DataError(f"{location}: {both} contradict each other", where=origin, fix="keep one of them")
    return next(iter(given.values()), None)


def convert_sharegpt_turn(turn: Any, location: str, origin: str) -> dict[str, Any]:
    """Convert ``{"from": "human", "value": "..."}`` to a message with ``role`` and ``content``.

    Raises:
        DataError: A key is missing, the speaker is unknown, or a function call is not JSON.
    """
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise DataError(f"{location} must be an object with 'from' and 'value'", where=origin)
    speaker, value = turn["from"], turn["value"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        known = f"use {', '.join(SHAREGPT_ROLES)}"
        hint = did_you_mean(speaker, SHAREGPT_ROLES) if isinstance(speaker, str) else ""
        fix = f"{known}; {hint}" if hint else known
        raise DataError(f"{location} has the unknown speaker '{speaker}' in 'from'", where=origin, fix=fix)
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    if speaker == "function_call":
        calls = _parse_sharegpt_calls(value, f"{location}.value", origin)
        return {**rest, "role": SHAREGPT_ROLES[speaker], "tool_calls": calls}
    return {**rest, "role": SHAREGPT_ROLES[speaker], "content": value}


def _parse_sharegpt_calls(value: Any, location: str, origin: str) -> list[dict[str, Any]]:
    calls = value
    if isinstance(value, str):
        calls = _decode_json(value, f"{location} must be a tool call in JSON, but is", origin)
    return [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]


def _message_text(content: Any, location: str, origin: str) -> str:
    """Return the text of a message; a list of text parts is joined.

    Raises:
        DataError: The content is missing, of another type, or has a part that is not text.
    """
    if isinstance(content, str):
        return _check_unicode(content, location, origin)
    if content is None:
        raise DataError(f"{location} must be a string, found no value", where=origin, fix="an empty string is allowed")
    if not isinstance(content, list):
        raise DataError(f"{location} must be a string, found type {type(content).__name__}", where=origin)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{location}[{index}] must be a text part; other parts are not supported here",
                where=origin,
                fix='write it as {"type": "text", "text": "..."}',
            )
        texts.append(_check_unicode(part["text"], location, origin))
    return "".join(texts)


def _parse_tool_call(call: Any, location: str, origin: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, because a chat template would quote a JSON string again.

    Raises:
        DataError: The call has no function name, or its arguments are malformed JSON.
    """
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{location} must be an object with a function 'name' and 'arguments'", where=origin)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _decode_json(arguments or "{}", f"{location}: the arguments are", origin)
    checked = {**_drop_none_values(function), "arguments": {} if arguments is None else arguments}
    return checked if function is call else {**_drop_none_values(call), "function": checked}


def _drop_none_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def remove_nulls(value: Any) -> Any:
    """Return a value without the dictionary entries that are None, at every depth.

    Arrow stores all structs of a column with the same keys, and fills missing keys with nulls. A chat template would
    print these nulls.
    """
    if isinstance(value, dict):
        return {key: remove_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [remove_nulls(item) for item in value]
    return value


def _check_unicode(text: str, location: str, origin: str) -> str:
    """Return the text unchanged.

    Raises:
        DataError: The text has a lone surrogate, which cannot be encoded as UTF-8.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"'{location}' has a lone surrogate (half of a UTF-16 pair) at character {error.start}",
                where=origin,
                fix="replace or remove the character",
            ) from error
    return text


def column_names(columns: Mapping[str, Any]) -> str:
    """Return the names of the columns in quotes, joined by commas, for a message."""
    return ", ".join(f"'{name}'" for name in columns) or "no column"


def json_type_of(value: Any) -> str:
    """Return the JSON type of a value with an article, such as ``"a string"``, for a message."""
    kinds = {str: "a string", dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def parse_cell(value: Any, name: str, origin: str) -> Any:
    """Parse a CSV or Parquet cell that holds a list or an object as JSON text; return any other value unchanged.

    Raises:
        DataError: The JSON has a key twice in one object, or NaN or infinity.
    """
    if not _begins_like_json(value):
        return value
    try:
        return STRICT_JSON.decode(value)
    except (ValueError, RecursionError):
        return value if _parse_leniently(value) is value else _decode_json(value, f"'{name}' is", origin)


def _begins_like_json(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip()[:1] in ("[", "{")


def _parse_leniently(value: Any) -> Any:
    if _begins_like_json(value):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):  # RecursionError: too many nested brackets
            return value
    return value


def is_message_list(turns: Any) -> bool:
    """Return True if the cell is a list, or JSON text of a list, whose first item has a ``role``."""
    return _first_item_has_key("role", _parse_leniently(turns))


def read_tools(value: Any, origin: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row as a list of ``{"type": "function", "function": {...}}``; None without tools.

    Raises:
        DataError: The value is not a list of objects.
    """
    return wrap_tools(value, origin)[0]


def wrap_tools(value: Any, origin: str) -> tuple[list[dict[str, Any]] | None, bool]:
    """Return the tools of a row as ``{"type": "function", "function": {...}}``, and True if a tool lacked this wrapper.

    ``apply_chat_template`` documents this form, and inference servers use it. Without tools the list is None.

    Raises:
        DataError: The value is not a list of objects.
    """
    value = parse_cell(value, "tools", origin)
    if value is None or value in ("", []):
        return None, False
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        kind = "a list with other items" if isinstance(value, list) else json_type_of(value)
        raise DataError(f"'tools' must be a list of JSON schemas, found {kind}", where=origin)
    found: list[dict[str, Any]] = remove_nulls(value) if _has_added_nulls(value) else value
    wrapped = [_wrap_tool(tool) for tool in found]
    return wrapped, wrapped != found


def _wrap_tool(tool: dict[str, Any]) -> dict[str, Any]:
    bare = isinstance(tool.get("name"), str) and "parameters" in tool and tool.get("type", "function") == "function"
    if not bare or "function" in tool:
        return tool
    return {"type": "function", "function": {name: item for name, item in tool.items() if name != "type"}}


_MAY_BE_NULL = ("default", "const", "example")
"""Keys of a JSON schema for which null is a valid value."""


def _has_added_nulls(schema: Any) -> bool:
    """Return True if a tool has a null where JSON Schema allows none, because Arrow added the key."""
    if isinstance(schema, dict):
        return any(
            name not in _MAY_BE_NULL if value is None else _has_added_nulls(value) for name, value in schema.items()
        )
    return isinstance(schema, list) and any(map(_has_added_nulls, schema))


def read_chat_kwargs(value: Any, origin: str) -> dict[str, Any]:
    """Return the chat template variables in a row's ``chat_template_kwargs``, without nulls.

    Raises:
        DataError: The value is not an object.
    """
    value = parse_cell(value, "chat_template_kwargs", origin)
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise DataError(
            f"'chat_template_kwargs' must be an object, found {json_type_of(value)}",
            where=origin,
            fix='write it as {"enable_thinking": false}',
        )
    return _drop_none_values(value)


def has_system(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("role") in ("system", "developer") for message in messages)


def add_system(
    messages: list[dict[str, Any]], columns: Mapping[str, Any], origin: str
) -> tuple[list[dict[str, Any]], bool]:
    """Add a row's column ``system`` as the first message, unless the messages already have a system message.

    Returns:
        The messages, and True if they have a system message with another text than the column.

    Raises:
        DataError: The column is not text.
    """
    if not columns.get("system"):
        return messages, False
    text = read_text_cell(columns, "system", origin)
    if has_system(messages):
        return messages, not any(message.get("content") == text for message in messages)
    return [{"role": "system", "content": text}, *messages], False


TextOrMessages = str | list[dict[str, Any]]
"""A text, or a list of messages that :func:`check_message` returned."""


def read_text_or_messages(
    columns: Mapping[str, Any], name: str, origin: str, *, allow_blank: bool = False
) -> TextOrMessages:
    """Return the text of a column, or its messages after a check. A single message need not be in a list.

    Args:
        allow_blank: Whether a text may be empty or only whitespace.

    Raises:
        DataError: The value is empty, of another type, or a message is malformed.
    """
    if isinstance(columns[name], str) and not _looks_like_messages(_parse_leniently(columns[name])):
        text = read_text_cell(columns, name, origin)  # text that merely starts with a bracket stays text
        if not text.strip() and not allow_blank:
            raise DataError(f"'{name}' is empty or only whitespace", where=origin, fix="remove the row")
        return text
    value = parse_cell(columns[name], name, origin)
    value = [value] if _is_message(value) else value
    if not isinstance(value, list):
        raise DataError(f"'{name}' must be a string or a list of messages, found {json_type_of(value)}", where=origin)
    if not value:
        raise DataError(f"'{name}' is an empty list", where=origin, fix="remove the row")
    messages = []
    for index, item in enumerate(value):
        place = f"{name}[{index}]"
        item = convert_sharegpt_turn(item, place, origin) if isinstance(item, dict) and "from" in item else item
        messages.append(check_message(item, place, origin))
    return messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def _looks_like_messages(value: Any) -> bool:
    """Return True if parsed JSON text is a message or a list of messages, and not any JSON with such a key."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and (
        ("role" in first and ("content" in first or first["role"] in ROLES))
        or ("from" in first and ("value" in first or first["from"] in tuple(SHAREGPT_ROLES)))
    )


def _first_item_has_key(key: str, turns: Any) -> bool:
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and key in turns[0]


def check_role_order(messages: Sequence[Mapping[str, Any]], name: str, origin: str) -> None:
    """Check that no two user messages, and no two assistant messages, are adjacent.

    Args:
        name: Column of the messages, for errors.
        origin: File and line of the row, for errors.

    Raises:
        DataError: Two messages of one of these roles are adjacent.
    """
    for index, (before, message) in enumerate(pairwise(messages), start=1):
        role = message["role"]
        if role == before["role"] and role in ("user", "assistant"):
            raise DataError(
                f"{name}[{index}] is the second '{role}' message in succession: user and assistant must alternate",
                where=origin,
                fix="join the two messages, or remove one",
            )


def message_texts(value: TextOrMessages) -> list[str]:
    """Return the texts of a prompt or an answer: the text itself, or the content of each message."""
    if isinstance(value, str):
        return [value]
    return [message["content"] for message in value if message.get("content")]


def prompt_digest(prompt: TextOrMessages, tools: Any) -> bytes:
    """Return a 16-byte hash of a prompt with its tools. Rows with the same hash are held out together."""
    return blake2b(json.dumps([prompt, tools], sort_keys=True, default=repr).encode(), digest_size=16).digest()
