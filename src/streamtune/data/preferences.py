"""Rows of preference data: a prompt with two answers to compare, or with one labelled answer.

    preference    prompt, chosen, rejected                    each a string or a list of messages
                  chosen, rejected                            without prompt: their common beginning is the prompt
                  score_chosen, score_rejected; or margin     optional numbers, stored as the pair's margin
    unpaired      prompt, completion, label                   label: true (desirable) or false

Optional columns: ``tools`` and ``chat_template_kwargs`` go to the chat template. ``system`` is put before messages that
have no system message. Other columns are not read. A prompt may be text and its answers messages, or the reverse. If
answers begin with the messages of the prompt, these messages are removed.

A row without ``prompt`` takes as prompt what ``chosen`` and ``rejected`` have in common. For lists, these are their
first equal messages. For strings, these are their first equal characters up to the last whole word; spaces after this
word belong to the answers. For example, the prompt is ``"... Assistant:"``, the answer ``" Yes"``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamtune.data.reading.cells import (
    TextOrMessages,
    add_system,
    check_role_order,
    column_names,
    message_texts,
    read_chat_kwargs,
    read_text_or_messages,
    read_tools,
    wrap_tools,
)
from streamtune.data.reading.image_cells import MARK, mark_images
from streamtune.data.reading.readers import Row
from streamtune.data.rendering.chat_variants import common_prefix_length
from streamtune.data.row_types import Conversation, PromptCompletion
from streamtune.errors import DataError, did_you_mean

PREFERENCE_TYPES = ("preference", "unpaired")
"""Values of ``type`` for preference data, besides ``auto``."""

_REQUIRED = {"preference": ("chosen", "rejected"), "unpaired": ("prompt", "completion", "label")}

_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))
"""Columns with the scores of both answers, as public datasets name them."""

_PROMPT_LIKE = ("question", "instruction", "input", "query", "context", "problem")
"""Columns that probably hold the prompt. If a row has one of them, the common beginning of the answers is not used as
the prompt."""


@dataclass(frozen=True)
class Answers:
    """A prompt with one or two answers; each answer is stored as a training row that begins with the prompt."""

    prompt: TextOrMessages
    contents: Sequence[PromptCompletion | Conversation]
    """``(chosen, rejected)``, or the one labelled answer; empty if the answers are identical"""
    labels: tuple[bool, ...] | None = None
    """True for each desirable answer; None for pairs"""
    margin: float | None = None
    """chosen score minus rejected score, or the column ``margin``; None if the row has neither"""
    identical: bool = False
    """True if both answers are the same"""
    tools: list[dict[str, Any]] | None = None

    def all_texts(self) -> list[str]:
        """Return the texts of the prompt and of all answers, without the chat template."""
        return [*message_texts(self.prompt), *(text for content in self.contents for text in _texts_of_answer(content))]


def _texts_of_answer(content: PromptCompletion | Conversation) -> list[str]:
    if isinstance(content, PromptCompletion):
        return [content.completion]
    return message_texts(content.messages[content.first_answer :])


def detect_preference_type(row: Row) -> str:
    for row_type, required in _REQUIRED.items():
        if all(name in row.columns for name in required):
            return row_type
    raise DataError(
        f"cannot recognise preference data from the columns {column_names(row.columns)}",
        where=row.origin,
        fix="preference data needs 'prompt', 'chosen' and 'rejected', or 'prompt', 'completion' and 'label'; "
        "rename the columns, or map them in the recipe: columns: {chosen: better}",
    )


def preference_columns(row_type: str, answers: Answers) -> tuple[str, ...]:
    columns = ("prompt", *_REQUIRED[row_type])
    if row_type == "preference":
        columns = (*columns, *(name for names in _SCORES for name in names), "margin")
    if any(isinstance(each, Conversation) and each.images for each in answers.contents):
        columns = (*columns, "images", "image")
    return columns if isinstance(answers.prompt, str) else (*columns, "tools", "system", "chat_template_kwargs")


def normalise_preference(row: Row, row_type: str) -> Answers:
    """Return the prompt and the answers of a row of type ``preference`` or ``unpaired``.

    Raises:
        DataError: A required column is missing or malformed.
    """
    for name in _REQUIRED[row_type]:
        if name not in row.columns:
            raise DataError(
                f"a '{row_type}' row needs the column '{name}', found {column_names(row.columns)}",
                where=row.origin,
                fix=did_you_mean(name, row.columns) or f"add the column '{name}' or set the dataset's 'type'",
            )
    row, images = mark_images(row)
    if images and "prompt" in row.columns:
        for name in ("completion", "chosen"):
            if MARK in json.dumps(row.columns.get(name), ensure_ascii=False, default=str):
                raise DataError(
                    f"'{name}' has an image, and images belong to the prompt",
                    where=row.origin,
                    fix="put the turns with images into 'prompt'",
                )
    answers = _NORMALISERS[row_type](row)
    if not images:
        return answers
    contents = [replace(each, images=images) for each in answers.contents if isinstance(each, Conversation)]
    assert len(contents) == len(answers.contents), "only messages have marks of images"
    return replace(answers, contents=contents)


# ------------------------------------------------------------------------------------------------------------- pairs


def _parse_pair(row: Row) -> Answers:
    chosen, rejected = (read_text_or_messages(row.columns, name, row.origin) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        kinds = {True: "text", False: "a list of messages"}
        raise DataError(
            "'chosen' and 'rejected' must both be text or both be messages, "
            f"found {kinds[isinstance(chosen, str)]} and {kinds[isinstance(rejected, str)]}",
            where=row.origin,
            fix="write both as text, or both as messages",
        )
    identical = chosen == rejected
    margin, tools = _read_margin(row), read_tools(row.columns.get("tools"), row.origin)
    if identical:
        return Answers(chosen, (), margin=margin, identical=True, tools=tools)
    prompt: TextOrMessages
    if row.columns.get("prompt") is not None:
        prompt = read_text_or_messages(row.columns, "prompt", row.origin)
        prompt, (chosen, rejected) = _convert_to_one_form(row, prompt, {"chosen": chosen, "rejected": rejected})
    else:
        _refuse_differing_prompt(row, is_text=isinstance(chosen, str))
        if isinstance(chosen, str) and isinstance(rejected, str):
            start = _common_prompt_length(chosen, rejected)
        else:
            pairs = enumerate(zip(chosen, rejected, strict=False))
            start = next((index for index, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
        prompt, chosen, rejected = _split_prompt(row, chosen, rejected, start)
    contents = tuple(
        _join_answer(row, prompt, answer, name, tools) for name, answer in (("chosen", chosen), ("rejected", rejected))
    )
    return Answers(prompt, contents, margin=margin, tools=tools)


def _refuse_differing_prompt(row: Row, *, is_text: bool) -> None:
    names = (*_PROMPT_LIKE, "system") if is_text else _PROMPT_LIKE
    other = next((name for name in names if row.columns.get(name)), None)
    if other is not None:
        raise DataError(
            f"the row has no column 'prompt', and the column '{other}' would be ignored",
            where=row.origin,
            fix=f"rename '{other}' to 'prompt'; or remove it, and the prompt is the common beginning of both answers",
        )


def _split_prompt(
    row: Row, chosen: TextOrMessages, rejected: TextOrMessages, prompt_length: int
) -> tuple[TextOrMessages, TextOrMessages, TextOrMessages]:
    if prompt_length == 0:
        raise DataError(
            "the row has no column 'prompt', and 'chosen' and 'rejected' have no common beginning to use as prompt",
            where=row.origin,
            fix="add the column 'prompt'",
        )
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        left = answer[prompt_length:]
        if not (left.strip() if isinstance(left, str) else left):
            raise DataError(
                f"'{name}' is empty after the prompt, which is the common beginning of both answers",
                where=row.origin,
                fix="add the column 'prompt', or remove the row",
            )
    return chosen[:prompt_length], chosen[prompt_length:], rejected[prompt_length:]


def _common_prompt_length(chosen: str, rejected: str) -> int:
    """Return the length of the common prefix of both answers, up to a whole word and without whitespace at its end."""
    start = common_prefix_length(chosen, rejected)
    following = (chosen[start : start + 1], rejected[start : start + 1])
    if "" in following or any(_is_word_character(character) for character in following):
        while start and _is_word_character(chosen[start - 1]):
            start -= 1
    return len(chosen[:start].rstrip())


def _is_word_character(character: str) -> bool:
    return character.isalnum() or character == "_"


def _convert_to_one_form(
    row: Row, prompt: TextOrMessages, answers: dict[str, TextOrMessages]
) -> tuple[TextOrMessages, list[TextOrMessages]]:
    """Return prompt and answers, all as text or all as messages.

    If an answer begins with the messages of the prompt, these are removed from the answer.
    """
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers.values()):
        return prompt, list(answers.values())
    if isinstance(prompt, str):
        prompt = _prompt_as_messages(row, prompt, answers)
    agreed: list[TextOrMessages] = []
    for name, answer in answers.items():
        turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        if turns[: len(prompt)] == prompt:
            turns = turns[len(prompt) :]
        elif turns[0]["role"] != "assistant":
            raise DataError(
                f"'{name}' must begin with an assistant message or with the messages of 'prompt', "
                f"found a '{turns[0]['role']}' message",
                where=row.origin,
                fix="remove the messages before the answer, or make them equal to 'prompt'",
            )
        agreed.append(turns)
    return prompt, agreed


def _prompt_as_messages(row: Row, prompt: str, answers: dict[str, TextOrMessages]) -> list[dict[str, Any]]:
    """Return a text prompt as messages: one user message, or the first messages of an answer, if the prompt is one of
    them.

    These are the messages before the first assistant message. If an answer begins with an assistant message, such as a
    greeting, they are the messages before its second assistant message that all answers share.

    Raises:
        DataError: An answer begins with other messages, and the prompt is not one of their user messages.
    """
    chats = [answer for answer in answers.values() if not isinstance(answer, str)]
    first = chats[0]
    starts = [index for index, message in enumerate(first) if message["role"] == "assistant"] or [len(first)]
    start = starts[0] or (starts[1] if len(starts) > 1 else len(first))
    repeats = any(message["role"] == "user" and message.get("content") == prompt for message in first[:start])
    if starts[0] == 0:
        repeats = repeats and all(chat[:start] == first[:start] for chat in chats)
        return first[:start] if repeats else [{"role": "user", "content": prompt}]
    if not repeats:
        raise DataError(
            "'prompt' must equal one of the user messages before the answer",
            where=row.origin,
            fix="let every answer begin with an assistant message, or with the prompt",
        )
    return first[:start]


def _read_margin(row: Row) -> float | None:
    """Return the chosen score minus the rejected score, else the column ``margin``; None if the row has neither."""
    for names in _SCORES:
        if any(_has_value(row, name) for name in names):
            chosen, rejected = (_read_number(row, name) for name in names)
            return chosen - rejected
    return _read_number(row, "margin") if _has_value(row, "margin") else None


def _has_value(row: Row, column: str) -> bool:
    return row.columns.get(column) not in (None, "")


def _read_number(row: Row, column: str) -> float:
    value = row.columns.get(column)
    try:
        # a cell of a CSV file is always text
        number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float, str)) else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        shown = "no value" if value is None else repr(value)[:40]
        raise DataError(f"'{column}' must be a finite number, found {shown}", where=row.origin)
    return number


# ---------------------------------------------------------------------------------------------------------- unpaired


def _parse_unpaired(row: Row) -> Answers:
    label = row.columns["label"]
    if isinstance(label, str) and label.strip().lower() in ("true", "false"):  # a cell of a CSV file is always text
        label = label.strip().lower() == "true"
    if not isinstance(label, bool):
        raise DataError(
            f"'label' must be true (desirable) or false, found {label!r:.40}",
            where=row.origin,
            fix="write true or false",
        )
    prompt = read_text_or_messages(row.columns, "prompt", row.origin)
    prompt, (answer,) = _convert_to_one_form(
        row, prompt, {"completion": read_text_or_messages(row.columns, "completion", row.origin)}
    )
    tools = read_tools(row.columns.get("tools"), row.origin)
    return Answers(prompt, (_join_answer(row, prompt, answer, "completion", tools),), labels=(label,), tools=tools)


def _join_answer(
    row: Row, prompt: TextOrMessages, answer: TextOrMessages, name: str, tools: list[dict[str, Any]] | None
) -> PromptCompletion | Conversation:
    """Return prompt and answer together as a training row.

    Raises:
        DataError: The answer does not follow the prompt as an assistant message, or is empty.
    """
    if isinstance(prompt, str) or isinstance(answer, str):
        assert isinstance(prompt, str) is isinstance(answer, str), (
            "the prompt and the answer must both be text or both be messages"
        )
        return PromptCompletion(str(prompt), str(answer))
    check_role_order(prompt, "prompt", row.origin)
    prompt, other_system = add_system(prompt, row.columns, row.origin)
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"the prompt of '{name}' must end with a user or tool message, found an assistant message",
            where=row.origin,
            fix="remove the last message of the prompt, or add a user message",
        )
    if not answer or answer[0]["role"] != "assistant":
        role = f"a '{answer[0]['role']}' message" if answer else "nothing"
        raise DataError(
            f"'{name}' must continue with an assistant message after the prompt, found {role}",
            where=row.origin,
            fix=f"write in '{name}' the assistant's answer to the prompt",
        )
    check_role_order(answer, name, row.origin)
    if not any(_has_content(message) for message in answer):
        raise DataError(f"the assistant messages of '{name}' are empty", where=row.origin, fix="remove the row")
    variables = read_chat_kwargs(row.columns.get("chat_template_kwargs"), row.origin) or None
    wrapped = wrap_tools(row.columns.get("tools"), row.origin)[1]
    return Conversation([*prompt, *answer], tools, len(prompt), variables, other_system, wrapped)


def _has_content(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and any(
        value.strip() if isinstance(value, str) else value for key, value in message.items() if key not in _NOT_CONTENT
    )


_NOT_CONTENT = ("role", "name", "weight")
"""Fields of a message that do not count as content."""

_NORMALISERS: dict[str, Callable[[Row], Answers]] = {"preference": _parse_pair, "unpaired": _parse_unpaired}
