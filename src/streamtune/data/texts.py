"""The texts of all rows, for training a tokenizer; and the system message and tools of the first conversation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from streamtune.data.bad_rows import ON_BAD_ROW, BadRows
from streamtune.data.options import ChatOptions, check_choice
from streamtune.data.preferences import PREFERENCE_TYPES, normalise_preference
from streamtune.data.reading.cells import TextOrMessages, has_system, message_texts, read_chat_kwargs, read_tools
from streamtune.data.reading.image_cells import MARK, mark_images
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import Source, typed_rows
from streamtune.data.row_types import (
    PROMPT_TYPES,
    ROW_TYPES,
    Conversation,
    PromptCompletion,
    detect_type,
    match_row_type,
    normalise_row,
    read_prompt,
)
from streamtune.data.templates import REASONING_FIELDS
from streamtune.errors import DataError

_KNOWN = tuple(dict.fromkeys((*ROW_TYPES, *PREFERENCE_TYPES, *PROMPT_TYPES)))


def iter_texts(
    sources: Sequence[Source],
    *,
    on_bad_row: str = "error",
    max_bad_rows: int = 100,
    notify: Callable[[str], None] = lambda message: None,
    calls: bool = False,
) -> Iterator[str]:
    """Yield the texts of all rows (message contents, prompts, completions, documents), without a chat template.

    Args:
        on_bad_row: ``error`` raises the errors of bad rows, ``skip`` skips bad rows.
        max_bad_rows: Maximum number of rows that ``skip`` may leave out.
        calls: Whether to yield reasoning too, and tools and tool calls as JSON.

    Raises:
        DataError: A file is missing, or a row is malformed.
    """
    check_choice("on_bad_row", on_bad_row, ON_BAD_ROW)
    bad = BadRows(on_bad_row, max_bad_rows, notify)
    for row, row_type in typed_rows(sources, _KNOWN, _detect_type, bad):
        texts: list[str] = []
        with bad:
            texts = _row_texts(row, row_type)
            if calls:
                texts += _tool_texts(row, row_type)
        yield from (text.replace(MARK, "") for text in texts)
    bad.raise_or_notify()


def has_chat_messages(sources: Sequence[Source]) -> bool:
    """Return True if the first valid row of the first source is a conversation, or a prompt made of messages.

    Raises:
        DataError: A file is missing.
    """
    for row, row_type in typed_rows(sources[:1], _KNOWN, _detect_type, BadRows("skip", sys.maxsize)):
        with suppress(DataError):  # the next row may be sound
            return not isinstance(_prompt_or_messages(row, row_type), str)
    return False


@dataclass(frozen=True)
class ChatContext:
    """System message, tools and template variables: what a chat template needs besides the user's question."""

    system: tuple[dict[str, Any], ...] = ()
    """the system message; an empty tuple without one"""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools; None without tools"""
    variables: Mapping[str, Any] = field(default_factory=dict)


def first_chat_context(sources: Sequence[Source], chat: ChatOptions) -> ChatContext:
    """Return the system message, tools and template variables of the first conversation of the first source.

    Args:
        sources: Sources of the recipe; only the first is read.
        chat: Options with the default system message and the default template variables.

    Raises:
        DataError: A file is missing.
    """
    for row, row_type in typed_rows(sources[:1], _KNOWN, _detect_type, BadRows("skip", sys.maxsize)):
        messages: TextOrMessages = ""
        row_variables: dict[str, Any] = {}
        tools: list[dict[str, Any]] | None = None
        with suppress(DataError):  # the next row may be sound
            messages = _prompt_or_messages(row, row_type)
            row_variables = read_chat_kwargs(row.columns.get("chat_template_kwargs"), row.origin)
            tools = read_tools(row.columns.get("tools"), row.origin)
        if isinstance(messages, str):
            continue
        default = () if chat.default_system is None else ({"role": "system", "content": chat.default_system},)
        system = tuple(each for each in messages[:1] if has_system([each])) or default
        return ChatContext(system, tools, {**chat.variables, **row_variables})
    return ChatContext(variables=chat.variables)


def _prompt_or_messages(row: Row, row_type: str) -> TextOrMessages:
    """Return the prompt of a preference or prompt row, or the messages of a conversation; "" for plain text."""
    if row_type in PREFERENCE_TYPES:
        return normalise_preference(row, row_type).prompt
    if row_type == "prompts":
        return read_prompt(mark_images(row)[0], row_type)
    content = normalise_row(row, row_type)
    return content.messages if isinstance(content, Conversation) else ""


def _detect_type(row: Row) -> str:
    if match_row_type(row.columns) is None:
        if {"chosen", "rejected"} <= row.columns.keys():
            return "preference"
        if "prompt" in row.columns:
            return "prompts"
    return detect_type(row)


def _row_texts(row: Row, row_type: str) -> list[str]:
    if row_type in PREFERENCE_TYPES:
        return normalise_preference(row, row_type).all_texts()
    if row_type == "prompts":
        return message_texts(read_prompt(mark_images(row)[0], row_type))
    content = normalise_row(row, row_type)
    if isinstance(content, Conversation):
        return message_texts(content.messages)
    return [content.prompt + content.completion] if isinstance(content, PromptCompletion) else [content.text]


def _tool_texts(row: Row, row_type: str) -> list[str]:
    """Return the reasoning, tool calls and tools of a conversation as texts; an empty list for other rows.

    Raises:
        DataError: A tool or a tool call has a value that JSON cannot represent, such as a date.
    """
    content = None if row_type in (*PREFERENCE_TYPES, "prompts") else normalise_row(row, row_type)
    if not isinstance(content, Conversation):
        return []
    texts = [message[name] for message in content.messages for name in REASONING_FIELDS if message.get(name)]
    try:
        calls = [message.get("tool_calls") for message in content.messages]
        texts += [json.dumps(each, ensure_ascii=False) for each in (*calls, content.tools) if each]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a tool or a tool call cannot be written as JSON: {error}",
            where=row.origin,
            fix="use only strings, numbers, booleans, null, lists and objects",
        ) from error
    return [text for text in texts if isinstance(text, str)]
