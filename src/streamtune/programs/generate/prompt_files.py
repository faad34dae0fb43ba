"""Prompts from a file: text, or messages in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamtune.data.reading.cells import check_message, from_sharegpt, tools_of, variables_of, with_system
from streamtune.errors import DataError


@dataclass(frozen=True)
class ToolPrompt:
    """The messages of a conversation, with tools and variables for the chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas"""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """variables of the chat template (``chat_template_kwargs``)"""


Asked = str | list[dict[str, Any]] | ToolPrompt
"""A prompt: text, or the messages of a conversation."""

MAX_BYTES = 1 << 30
"""Largest file of prompts; a million tokens are some megabytes."""


def read_prompts(path: Path) -> list[Asked]:
    """Read the prompts of a file.

    A ``.json`` file holds a list of messages, an object with ``messages`` or ``prompt``, or a list of such objects. A
    ``.jsonl`` file holds one of these per line. Any other file is one prompt. An answer at the end of a conversation is
    dropped. The columns ``system``, ``tools`` and ``chat_template_kwargs`` of an object are used as in training.

    Raises:
        DataError: The file cannot be read, or holds something other than prompts.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path} has more than 1 GiB, which is no prompt", where="--file")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", where="--file", fix="name a text or JSON file"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text", where="--file") from error
    ending = path.suffix.lower()
    if ending == ".json":
        found = list(_of_document(_parse_json(text, str(path)), str(path)))
    elif ending == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        found = [_prompt(_parse_json(line, f"{path}:{number}"), f"{path}:{number}") for number, line in lines]
    else:
        found = [text] if text.strip() else []
    if not found:
        raise DataError(f"{path} is empty", where="--file", fix="write a prompt into it")
    return found


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"this is no JSON: {error}", where=where, fix="a prompt in plain text needs a .txt file"
        ) from error


def _of_document(value: Any, where: str) -> Iterator[Asked]:
    """Yield the prompts of a JSON file: one, or a list of them."""
    if isinstance(value, list) and value and not _is_message(value[0]):
        for number, item in enumerate(value):
            yield _prompt(item, f"{where}[{number}]")
    else:
        yield _prompt(value, where)


def _prompt(value: Any, where: str) -> Asked:
    """Return one prompt, from a text, a list of messages, or an object with ``messages`` or ``prompt``."""
    if isinstance(value, Mapping) and not _is_message(value):
        for key in ("messages", "prompt", "conversations"):
            if key in value:
                return _with_columns(_prompt(value[key], f"{where}: {key}"), value, where)
        raise DataError("an object needs 'messages' or 'prompt'", where=where)
    if isinstance(value, str):
        if not value:
            raise DataError("the prompt is empty", where=where)
        return value
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise DataError(
            "this is neither text nor a list of messages", where=where, fix='write {"role": "user", "content": "..."}'
        )
    asked = [_checked(message, f"messages[{index}]", where) for index, message in enumerate(messages)]
    if asked[-1]["role"] == "assistant":
        asked = asked[:-1]
    if not asked or asked[-1]["role"] == "assistant":
        raise DataError("this asks nothing: it ends with what the assistant says", where=where)
    return asked


def _with_columns(asked: Asked, columns: Mapping[str, Any], where: str) -> Asked:
    """Add the system message, tools and variables of an object to its conversation."""
    if not isinstance(asked, list):
        return asked
    messages, _ = with_system(asked, columns, where)
    tools, variables = tools_of(columns.get("tools"), where), variables_of(columns.get("chat_template_kwargs"), where)
    return ToolPrompt(messages, tools, variables) if tools or variables else messages


def _checked(message: Mapping[str, Any], place: str, where: str) -> dict[str, Any]:
    """Return a message as in training, without its training flags."""
    own = dict(message)
    checked = check_message(from_sharegpt(own, place, where) if "from" in own else own, place, where)
    checked.pop("weight", None)
    return checked


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("role"), str) or (isinstance(value.get("from"), str) and "value" in value)
