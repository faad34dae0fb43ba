"""Reasoning of answers: where a row has it, whether a rendering has it, and how it is put back.

A row has reasoning in a field of its own, or as ``<think> ... </think>`` before the answer in ``content``. Many chat
templates drop it from earlier answers, some from all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamtune.data.rendering.renderings import Message, Renderings

FIELDS = ("reasoning_content", "reasoning", "thinking")
_LOOKED_AT = 1000
"""Answers of one chat that are looked at a second time: each takes a character that occurs nowhere."""


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a message without blanks around it; an empty string if it has none."""
    for name in FIELDS:
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
    content = message.get("content")
    if not isinstance(content, str) or "</think>" not in content:
        return ""
    return content.rpartition("</think>")[0].partition("<think>")[2].strip() or _unopened(content)


def _unopened(content: str) -> str:
    """Return reasoning that a prompt opened, so that the content only closes it."""
    return "" if "<think>" in content else content.rpartition("</think>")[0].strip()


def dropped_answers(chat: Renderings, answers: Sequence[int], turns: Mapping[int, str]) -> list[int]:
    """Return those of ``answers`` whose reasoning the rendering does not hold.

    Where the text of a turn does not hold it as it is, it is replaced, and the rendering looked at again: a template
    may print it in another form.

    Args:
        chat: The conversation.
        answers: Indices of messages that have reasoning.
        turns: The texts of turns by the index of their message; the whole rendering stands for one that is not there.
    """
    missing = [index for index in answers if reasoning_of(chat.messages[index]) not in turns.get(index, chat.text)]
    marks: dict[int, str] = {}
    after, messages = "\ue000", list(chat.messages)
    for index in missing[:_LOOKED_AT]:
        marks[index] = chat.unused_character(after)
        after = chr(ord(marks[index]) + 1)
        messages[index] = _marked(messages[index], marks[index])
    changed = chat.try_render(messages) if missing else None
    return [index for index in missing if changed is None or index not in marks or marks[index] not in changed]


def _marked(message: Message, mark: str) -> Message:
    """Return the message with its reasoning replaced by ``mark``."""
    text = reasoning_of(message)
    if isinstance(message.get("content"), str) and not any(message.get(name) for name in FIELDS):
        return {**message, "content": message["content"].replace(text, mark, 1)}
    return {**message, **{name: mark for name in FIELDS if isinstance(message.get(name), str)}}


def as_last_answer(chat: Renderings, index: int) -> list[list[Message]]:
    """Return conversations that end with an answer, for a template that prints the reasoning of the last one.

    The second has the reasoning under every name that templates read.
    """
    message, before = chat.messages[index], chat.messages[:index]
    named = {**message, **dict.fromkeys(FIELDS, reasoning_of(message))}
    named["content"] = message.get("content", "").rpartition("</think>")[2].lstrip()
    return [[*before, message], [*before, named]]
