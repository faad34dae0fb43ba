"""Row types: what the columns of a row mean, and one normal form for each kind of training text.

    messages            messages: [{role, content, ...}], tools (optional)         -> Conversation
    sharegpt            conversations: [{from, value}], system, tools (optional)   -> Conversation
    alpaca              instruction, output, input, system, history (optional)     -> Conversation
    prompt_completion   prompt, completion: each a string or a list of messages    -> PromptCompletion or Conversation
    text                text                                                       -> Document

A row of any type may have ``loss_weight``, a factor for its loss. A conversation may also have ``system`` and
``chat_template_kwargs``. ``system`` is the text of a system message, used if the messages have none.
``chat_template_kwargs`` holds variables of the chat template.

Prompts for which the model writes the completions (GRPO) are text or a list of messages:

    prompts             prompt: a string or a list of messages                     the prompt, unchanged
    messages            messages: [{role, content, ...}]                           without the last answer

In an alpaca row the user's message is ``instruction``. A non-empty ``input`` follows it, after :attr:`Row.separator`.

A row that does not fit its type raises ``DataError``, which names the row, the missing column and the columns found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamtune.data.reading.cells import (
    TextOrMessages,
    add_system,
    check_message,
    check_role_order,
    column_names,
    convert_sharegpt_turn,
    is_message_list,
    json_type_of,
    parse_cell,
    read_chat_kwargs,
    read_text_cell,
    read_text_or_messages,
    wrap_tools,
)
from streamtune.data.reading.image_cells import ImageCell, mark_images
from streamtune.data.reading.readers import Row
from streamtune.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Conversation:
    """A chat of messages, to be rendered by the tokenizer's chat template."""

    messages: list[dict[str, Any]]
    """messages with ``role``, ``content`` and any other field that the template reads, such as ``tool_calls``"""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that the model may call"""
    first_answer: int = 0
    """index of the first message that may be trained on; earlier messages are context"""
    variables: dict[str, Any] | None = None
    """variables of the chat template, such as ``enable_thinking``"""
    other_system: bool = False
    """True if the column ``system`` was ignored because the messages have a different system message"""
    wrapped_tools: bool = False
    """True if a tool was a bare function schema, without ``{"type": "function", ...}`` around it"""
    images: tuple[ImageCell, ...] = ()
    """images in the order of their marks in the messages"""


@dataclass(frozen=True)
class PromptCompletion:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    text: str


Content = Conversation | PromptCompletion | Document

REQUIRED_COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages", "conversations"),),
    "sharegpt": (("conversations", "conversation"),),
    "prompt_completion": (("prompt",), ("completion",)),
    "alpaca": (("instruction",), ("output",)),
    "text": (("text",),),
}
"""Row type -> its required columns, each with its possible names. Types are tried in this order."""

ROW_TYPES = tuple(REQUIRED_COLUMNS)
"""Values of a recipe's ``type``, besides ``auto``."""

PROMPT_TYPES = ("prompts", "messages")
"""Values of ``type`` for prompts whose completions the model writes (GRPO)."""


WEIGHT = "loss_weight"
"""Column with the factor of a row's loss."""


def count_characters(content: Content) -> int:
    """Return the number of characters of a row: of its text, or of all strings in its messages."""
    if isinstance(content, Conversation):
        return sum(len(value) for message in content.messages for value in message.values() if isinstance(value, str))
    return len(content.text) if isinstance(content, Document) else len(content.prompt) + len(content.completion)


def detect_type(row: Row) -> str:
    """Return the type of a training row, recognised by its columns.

    Raises:
        DataError: The columns match no type.
    """
    found = match_row_type(row.columns)
    if found is None:
        raise DataError(
            f"cannot recognise the row type from the columns {column_names(row.columns)}",
            where=row.origin,
            fix="rows with 'chosen' and 'rejected' are preference data: train on them with streamtune dpo"
            if {"chosen", "rejected"} <= row.columns.keys()
            else "rows need 'messages', 'conversations', 'prompt' and 'completion', 'instruction' and 'output', or "
            "'text'; rename the columns, or map them in the recipe: columns: {prompt: question}",
        )
    return found


def normalise_row(row: Row, row_type: str) -> Content:
    """Convert a training row of any type to a conversation, a pair of prompt and completion, or a document.

    Raises:
        DataError: A required column is missing or malformed.
    """
    for names in REQUIRED_COLUMNS[row_type]:
        if not any(name in row.columns for name in names):
            raise _missing_column_error(row, row_type, names[0])
    row, images = mark_images(row)
    content = _NORMALISERS[row_type](row)
    if not images:
        return content
    assert isinstance(content, Conversation), "only messages have marks of images"
    return replace(content, images=images)


def match_row_type(columns: Mapping[str, Any]) -> str | None:
    """Return the first row type whose required columns are all present; None if the columns match no type."""
    for row_type, required in REQUIRED_COLUMNS.items():
        present = [next((name for name in names if name in columns), None) for names in required]
        if None in present:
            continue
        if row_type == "messages" and present == ["conversations"] and not is_message_list(columns["conversations"]):
            continue  # the same column with from/value turns is sharegpt
        return row_type
    return None


def _missing_column_error(row: Row, row_type: str, column: str) -> DataError:
    other = match_row_type(row.columns)
    if other is not None and other != row_type:
        fix = f"this row looks like '{other}'; keep rows of different types in different files"
    else:
        fix = did_you_mean(column, row.columns) or f"add the column '{column}' or set the dataset's 'type'"
    return DataError(
        f"a '{row_type}' row needs the column '{column}', found {column_names(row.columns)}",
        where=row.origin,
        fix=fix,
    )


def _check_conversation(row: Row, messages: Sequence[Any], *, column: str, first_answer: int = 0) -> Conversation:
    """Check the messages in ``column``; return a conversation to train on from message ``first_answer`` on.

    Raises:
        DataError: A message is malformed, or there is no assistant message to train on.
    """
    checked = [check_message(item, f"{column}[{index}]", row.origin) for index, item in enumerate(messages)]
    if not any(message["role"] == "assistant" for message in checked[first_answer:]):
        raise DataError(
            "the conversation has no assistant message, so there is nothing to train on",
            where=row.origin,
            fix="add an assistant message, or remove the row",
        )
    with_it, other = add_system(checked, row.columns, row.origin)
    tools, wrapped = wrap_tools(row.columns.get("tools"), row.origin)
    return Conversation(
        with_it,
        tools,
        first_answer + len(with_it) - len(checked) if first_answer else 0,
        read_chat_kwargs(row.columns.get("chat_template_kwargs"), row.origin) or None,
        other,
        wrapped,
    )


def _read_message_list(row: Row, names: tuple[str, ...]) -> tuple[str, list[Any]]:
    column = next(name for name in names if name in row.columns)
    value = parse_cell(row.columns[column], column, row.origin)
    if not isinstance(value, list):
        raise DataError(f"'{column}' must be a list of messages, found {json_type_of(value)}", where=row.origin)
    if not value:
        raise DataError(f"'{column}' is an empty list", where=row.origin, fix="remove the row")
    return column, value


def _parse_messages_row(row: Row) -> Content:
    column, messages = _read_message_list(row, ("messages", "conversations"))
    return _check_conversation(row, messages, column=column)


def _parse_sharegpt(row: Row) -> Content:
    column, turns = _read_message_list(row, ("conversations", "conversation"))
    messages = [convert_sharegpt_turn(turn, f"{column}[{index}]", row.origin) for index, turn in enumerate(turns)]
    return _check_conversation(row, messages, column=column)


def _parse_alpaca(row: Row) -> Content:
    instruction = read_text_cell(row.columns, "instruction", row.origin)
    extra = read_text_cell(row.columns, "input", row.origin) if row.columns.get("input") else ""
    messages: list[dict[str, Any]] = []
    history = parse_cell(row.columns.get("history") or [], "history", row.origin)
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise DataError("'history' must be a list of [instruction, output] pairs", where=row.origin)
    for asked, answered in history:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    question = row.separator.join(part for part in (instruction, extra) if part)
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": read_text_cell(row.columns, "output", row.origin)})
    return _check_conversation(row, messages, column="history")


def _parse_prompt_completion(row: Row) -> Content:
    prompt, completion = (
        read_text_or_messages(row.columns, name, row.origin, allow_blank=True) for name in ("prompt", "completion")
    )
    if isinstance(prompt, str) and isinstance(completion, str):
        return PromptCompletion(prompt, completion)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": read_text_or_messages(row.columns, "prompt", row.origin)}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if completion[: len(prompt)] == prompt:
        completion = completion[len(prompt) :]
    messages = [*prompt, *completion]
    return _check_conversation(row, messages, column="prompt+completion", first_answer=len(prompt))


def _parse_text(row: Row) -> Content:
    text = read_text_cell(row.columns, "text", row.origin)
    if not text:
        raise DataError("'text' is an empty string", where=row.origin, fix="remove the row")
    return Document(text)


_NORMALISERS: dict[str, Callable[[Row], Content]] = {
    "messages": _parse_messages_row,
    "sharegpt": _parse_sharegpt,
    "prompt_completion": _parse_prompt_completion,
    "alpaca": _parse_alpaca,
    "text": _parse_text,
}


_COLUMNS_OF_TYPE: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations"),
    "sharegpt": ("conversations", "conversation"),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output", "input", "history"),
    "text": ("text",),
}


def row_columns(row_type: str, content: Content) -> tuple[str, ...]:
    chat_columns: tuple[str, ...] = ()
    if isinstance(content, Conversation):
        chat_columns = ("tools", "system", "chat_template_kwargs")
    if isinstance(content, Conversation) and content.images:
        chat_columns += ("images", "image")
    return (*_COLUMNS_OF_TYPE[row_type], WEIGHT, *chat_columns)


_LEAST_WEIGHT, _LARGEST_WEIGHT = 1e-10, 1e10
"""Limits of a row's weight: sums of weighted losses and gradients of a step stay far from the limits of float32."""


def read_loss_weight(row: Row) -> float:
    """Return the factor of a row's loss from its column ``loss_weight``; 1 if the row has none.

    Raises:
        DataError: The value is not a number from 1e-10 to 1e10.
    """
    value = row.columns.get(WEIGHT)
    if value is None or value == "":
        return 1.0
    try:
        # a cell of a CSV file is always text
        weight = math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
    except (ValueError, OverflowError):
        weight = math.nan
    if not 0 < weight < math.inf:
        shown = f"the text {value!r:.40}" if isinstance(value, str) else f"{value!r:.40}"
        raise DataError(
            f"'{WEIGHT}' must be a number above 0, found {shown}",
            where=row.origin,
            fix="to exclude a row from training, remove it" if weight == 0 else "write a number such as 0.5",
        )
    if not _LEAST_WEIGHT <= weight <= _LARGEST_WEIGHT:
        raise DataError(
            f"'{WEIGHT}' must be from {_LEAST_WEIGHT:g} to {_LARGEST_WEIGHT:g}, found {weight:g}",
            where=row.origin,
            fix="multiply the weights of all rows by the same factor: only their ratios count",
        )
    return weight


# --- prompts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptRow:
    """A row with a prompt for which the model writes the completions."""

    prompt: TextOrMessages
    columns: dict[str, Any]
    """other columns of the row, without the column of images"""
    images: tuple[ImageCell, ...] = ()
    """images in the order of their marks in the prompt"""


_PROMPT_COLUMN = {"prompts": "prompt", "messages": "messages"}


def detect_prompt_type(row: Row) -> str:
    """Return the type of a prompt row, recognised by its columns.

    Raises:
        DataError: The row has neither ``prompt`` nor ``messages``.
    """
    for row_type, column in _PROMPT_COLUMN.items():
        if column in row.columns:
            return row_type
    raise DataError(
        f"a row needs the column 'prompt' or 'messages', found {column_names(row.columns)}",
        where=row.origin,
        fix="rename the column that holds the prompt",
    )


def read_prompt(row: Row, row_type: str) -> TextOrMessages:
    """Return the prompt of a row without an answer, as text, or as messages that include the column ``system``.

    Args:
        row: Row whose images are marked (:func:`mark_images`).

    Raises:
        DataError: The prompt is missing, malformed, or ends with an assistant message.
    """
    column = _PROMPT_COLUMN[row_type]
    if row.columns.get(column) is None:
        found = "null" if column in row.columns else column_names(row.columns)
        raise DataError(
            f"a '{row_type}' row needs a prompt in the column '{column}', found {found}",
            where=row.origin,
            fix=f"add the prompt as the column '{column}', or remove the row",
        )
    prompt = read_text_or_messages(row.columns, column, row.origin)
    if isinstance(prompt, str):
        if row_type == "messages":
            raise DataError("'messages' must be a list of messages, found a string", where=row.origin)
        return prompt
    check_role_order(prompt, column, row.origin)
    prompt, _ = add_system(prompt, row.columns, row.origin)
    if row_type == "messages" and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt or prompt[-1]["role"] == "assistant":
        fix = "set type: messages, which removes the last answer" if row_type == "prompts" else "remove the row"
        raise DataError(
            f"'{column}' ends with an assistant message, so there is nothing to answer", where=row.origin, fix=fix
        )
    return prompt
