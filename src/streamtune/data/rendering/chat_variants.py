"""Render variants of one conversation, to find which characters of the full rendering each message takes.

Variants are: the first messages only, with a message replaced, and with the template's ``{% generation %}`` blocks
marked. Reasoning is in its own field of a message, or in ``content`` as ``<think> ... </think>`` before the answer.
Many chat templates drop the reasoning of earlier answers, and some the reasoning of all answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from streamtune.data.reading.cells import FLAGS
from streamtune.data.templates import (
    REASONING_FIELDS,
    ChatRequest,
    TemplateRefusalError,
    find_rendered_ahead,
    render_chat,
)
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")

_CACHED_RENDERINGS = 4
"""Number of cached renderings, as many as a turn needs: history, prompt, the turn itself, and the next prompt."""

_LONG = 1 << 20
"""Minimum number of characters of a prefix of the whole rendering of which only the length is cached."""


def special_names(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the texts of a tokenizer's special tokens, such as ``<|im_end|>``, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    return tuple(sorted(filter(None, names), key=lambda name: (-len(name), name)))


def require_template(tokenizer: PreTrainedTokenizerBase, noun: str, origin: str) -> None:
    """Raise an error unless the tokenizer has a chat template.

    Args:
        noun: Word for the conversation in the error: ``row`` or ``prompt``.
        origin: File and line of the row, for errors.

    Raises:
        DataError: The tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"the {noun} is a conversation, but the tokenizer has no chat template",
            where=origin,
            fix="set chat_template in the recipe: a name such as chatml, or the path of a Jinja file",
        )


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    request: ChatRequest,
    origin: str,
    *,
    template: str | None = None,
    explain: bool = False,
) -> str:
    """Return a conversation rendered by the chat template, which does not see the training flags of messages.

    If the template rejects messages without ``content`` (tool calls only), they are rendered with an empty string.

    Args:
        origin: File and line of the row, for errors.
        template: Chat template; None uses the tokenizer's.
        explain: Whether the error names the rejected message, which takes further renderings.

    Raises:
        DataError: The template rejects the conversation.
        TemplateLimitError: The template takes too much time or memory.
    """
    try:
        return render_chat(tokenizer, without_training_flags(request), template)
    except TemplateRefusalError as error:
        messages = request.messages
        filled = [message if "content" in message else {**message, "content": ""} for message in messages]
        if filled != messages:
            with suppress(DataError):  # the first error says more
                return render_messages(tokenizer, replace(request, messages=filled), origin, template=template)
        index = _find_rejected_message(tokenizer, request, template) if explain else None
        raise _rejection_error(messages, index, error.what, origin) from error


_MISSING = re.compile(r"has no attribute '(\w+)'")
_MOST_TRIED = 256
"""Maximum number of renderings to find the message that a template rejects."""


def _find_rejected_message(
    tokenizer: PreTrainedTokenizerBase, request: ChatRequest, template: str | None
) -> int | None:
    """Return the index of the first message that a template rejects; None if unknown."""
    messages = request.messages
    for count in range(len(messages) - 1, max(0, len(messages) - _MOST_TRIED), -1):
        with suppress(TemplateRefusalError):
            render_chat(tokenizer, without_training_flags(replace(request, messages=messages[:count])), template)
            return count
    return 0 if len(messages) == 1 else None


def _rejection_error(messages: Sequence[Mapping[str, Any]], index: int | None, reason: str, origin: str) -> DataError:
    location = "" if index is None else f" at messages[{index}], with the role '{messages[index]['role']}'"
    fix = "fix the row, or set chat_template to a template that accepts it"
    found = _MISSING.search(reason)
    if found and index is not None and found[1] not in messages[index]:
        reason = f"the template reads '{found[1]}', but the message has no '{found[1]}' ({reason})"
        hint = " (the name of the called function)" if found[1] == "name" and messages[index]["role"] == "tool" else ""
        fix = f"add '{found[1]}'{hint} to the message, or set chat_template to a template that does not need it"
    return DataError(f"the chat template rejects the conversation{location}: {reason}", where=origin, fix=fix)


def without_training_flags(request: ChatRequest) -> ChatRequest:
    messages = [{name: value for name, value in message.items() if name not in FLAGS} for message in request.messages]
    return replace(request, messages=messages)


def template_marks_answers(tokenizer: PreTrainedTokenizerBase, tools: Any) -> bool:
    try:
        return _GENERATION.search(tokenizer.get_chat_template(tools=tools)) is not None
    except ValueError:  # no template: rendering raises the error
        return False


def check_unicode(text: str, origin: str) -> str:
    """Return the text of a rendered conversation unchanged.

    Raises:
        DataError: The text has a lone surrogate, which cannot be encoded as UTF-8.
    """
    try:
        for start in range(0, len(text), _LONG):
            text[start : start + _LONG].encode()
    except UnicodeEncodeError as error:
        raise DataError(
            "the conversation has a lone surrogate (half of a UTF-16 pair)",
            where=origin,
            fix="replace or remove the character",
        ) from error
    return text


class Renderings:
    """The rendering of a conversation, and of variants that show which of its characters the assistant wrote.

    Raises:
        DataError: The template rejects the conversation.
        TemplateLimitError: The template takes too much time or memory.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, request: ChatRequest, origin: str) -> None:
        self.messages = request.messages
        self._tokenizer, self._request, self._origin = tokenizer, request, origin
        self._cache: dict[tuple[int, bool], str | int | None] = {}
        """(number of messages, with generation prompt) -> rendering, or its length if it is a long prefix"""
        self.system: Literal["printed", "late", "left out"] = "printed"
        """how the template prints a system message at the start: ``late`` means only before the user's last message,
        and only in a conversation that ends with this message"""
        ahead = find_rendered_ahead(tokenizer, without_training_flags(request))
        self._spans = None if ahead is None else ahead[1]
        text = render_messages(tokenizer, request, origin, explain=True) if ahead is None else ahead[0]
        self.text = check_unicode(text, origin)

    def answers(self) -> list[int]:
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def _render(self, messages: list[Message], *, generation: bool = False, template: str | None = None) -> str:
        is_answered = messages[-1]["role"] == "assistant" and messages[0]["role"] == "system"
        if self.system == "late" and is_answered and not generation and len(messages) > 2:
            return self._render_after_prompt(messages, template)
        return self._render_unchanged(messages, generation, template)

    def _render_unchanged(self, messages: list[Message], generation: bool, template: str | None = None) -> str:
        request = replace(self._request, messages=messages, generation=generation)
        return render_messages(self._tokenizer, request, self._origin, template=template)

    def print_system_late(self) -> None:
        """Set ``system`` if the rendering does not print the system message; render the message if possible.

        Some templates (Mistral, 2024) print the system message before the user's last message, and only if the
        conversation ends with this message, as at inference. Then the last answer is appended to that rendering.
        """
        self.system = "left out"
        if self.messages[-1]["role"] != "assistant":
            return
        system, *others = self.messages[:-1]
        with_prompt = self.try_render([system, *others], generation=True)
        changed = self.try_render([{**system, "content": self.unused_character()}, *others], generation=True)
        if with_prompt is not None and changed is not None and with_prompt != changed:
            self.system = "late"
            self._cache.clear()
            self.text = check_unicode(self._render(self.messages), self._origin)

    def _render_after_prompt(self, messages: list[Message], template: str | None) -> str:
        """Return the rendered prompt of the last answer, followed by what the template prints for this answer."""
        prompt = self._render_unchanged(messages[1:-1], True, template)
        with_answer = self._render_unchanged(messages[1:], False, template)
        if not with_answer.startswith(prompt):
            return self._render_unchanged(messages, False, template)
        return self._render_unchanged(messages[:-1], True, template) + with_answer[len(prompt) :]

    def try_render(self, messages: list[Message], *, generation: bool = False) -> str | None:
        """Return the rendering of other messages; None if the list is empty or the template rejects the messages."""
        if not messages:
            return None
        try:
            return self._render(messages, generation=generation)
        except DataError:
            return None

    def _render_prefix(self, count: int, generation: bool) -> str | None:
        if count == len(self.messages) and not generation:
            return self.text
        cached = self._cached_prefix(count, generation)
        return self.text[:cached] if isinstance(cached, int) else cached

    def _cached_prefix(self, count: int, generation: bool) -> str | int | None:
        """Return the rendering of the first ``count`` messages, or its length if it is a long prefix of ``text``."""
        if (count, generation) not in self._cache:
            if len(self._cache) >= _CACHED_RENDERINGS:
                del self._cache[next(iter(self._cache))]
            rendered = self.try_render(self.messages[:count], generation=generation)
            begins = rendered is not None and len(rendered) > _LONG and self.text.startswith(rendered)
            self._cache[count, generation] = len(rendered) if rendered is not None and begins else rendered
        return self._cache[count, generation]

    def render_history(self, index: int) -> str | None:
        """Return the rendering of the messages before ``index``; None if there are none or they are rejected."""
        return self._render_prefix(index, False)

    def render_prompt(self, index: int) -> str | None:
        """Return :meth:`render_history` with the generation prompt."""
        return self._render_prefix(index, True)

    def render_through_message(self, index: int) -> str | None:
        """Return the rendering of the messages up to and including ``index``; None if the template rejects them."""
        return self._render_prefix(index + 1, False)

    def length_before_answer(self, index: int) -> int | None:
        """Return the length of the rendered text before message ``index``, generation prompt included.

        Return None if the template rejects the earlier messages, or the full rendering does not begin with this text.
        """
        return self._prefix_length(index, True)

    def length_through_message(self, index: int) -> int | None:
        """Return the length of the rendered text up to and including message ``index``.

        Return None if the template rejects these messages, or the full rendering does not begin with this text.
        """
        return len(self.text) if index + 1 == len(self.messages) else self._prefix_length(index + 1, False)

    def _prefix_length(self, count: int, generation: bool) -> int | None:
        cached = self._cached_prefix(count, generation)
        if isinstance(cached, str):
            return len(cached) if self.text.startswith(cached) else None
        return cached

    def possible_headers(self, index: int) -> Iterator[str]:
        """Yield possible headers of an answer: the generation prompts after the earlier messages, and after all
        messages.

        A ``<think>`` that the generation prompt opens belongs to the answer, not to the header.
        """
        for count in (index, len(self.messages)):
            history, prompt = self._render_prefix(count, False), self._render_prefix(count, True)
            if history and prompt and prompt.startswith(history) and len(prompt) > len(history):
                header = prompt[len(history) :]
                yield header[: len(header) - opened_reasoning_length(header)]

    def has_generation_prompt(self, index: int) -> bool:
        return self._cached_prefix(index, True) != self._cached_prefix(index, False)

    def text_before_answer(self, index: int) -> str | None:
        """Return what a template without a generation prompt prints directly before an answer; None if unknown."""
        history, through, text_range = (
            self.render_history(index),
            self.render_through_message(index),
            self.text_range_in_prefix(index),
        )
        if history is None or through is None or text_range is None or not through.startswith(history):
            return None
        return through[len(history) : text_range[0]] if len(history) <= text_range[0] else None

    def render_short_answer(self, index: int) -> tuple[str, int]:
        """Return the rendering with one unused character as message ``index``, and its position (-1 if missing)."""
        mark = self.unused_character()
        plain = {"role": "assistant", "content": mark}
        text = self.try_render([*self.messages[:index], plain, *self.messages[index + 1 :]]) or ""
        return text, text.find(mark)

    def render_without_tools(self) -> str | None:
        """Return the rendering of the conversation without its tools; None if the template rejects it."""
        request, self._request = self._request, replace(self._request, tools=None)
        try:
            return self.try_render(self.messages)
        finally:
            self._request = request

    def unused_character(self, first: str = "\ue000") -> str:
        """Return a private-use character, from ``first`` on, that does not occur in the rendered conversation."""
        return first_unused_character(self.text, first)

    def text_range(self, index: int) -> tuple[int, int] | None:
        """Return start and end (exclusive) of the characters in the full rendering that print the text of message
        ``index``.

        Start and end are equal if the message has no text, and both 0 if the template omits the message. Return None if
        the template rejects or escapes the character that replaces the message for this comparison.
        """
        return self._find_message_range(self.messages, self.text, index)

    def text_range_in_prefix(self, index: int) -> tuple[int, int] | None:
        """Return :meth:`text_range` of message ``index`` in the rendering that ends with this message."""
        return self._find_message_range(self.messages[: index + 1], self.render_through_message(index), index)

    def _find_message_range(self, messages: list[Message], original: str | None, index: int) -> tuple[int, int] | None:
        mark = self.unused_character()
        variant = self.try_render(
            [*messages[:index], _replace_message_text(messages[index], mark), *messages[index + 1 :]]
        )
        if original is None or variant is None:
            return None
        if variant == original:
            return 0, 0
        if mark not in variant:
            return None
        start = common_prefix_length(original, variant)
        limit = min(len(original), len(variant)) - start
        return start, len(original) - _common_suffix_length(original, variant, limit)

    def spans_rendered_ahead(self) -> list[tuple[int, int]] | None:
        """Return the spans of ``{% generation %}`` blocks that the template process reported with the text, or None."""
        return None if self.system == "late" else self._spans

    def find_generation_spans(self) -> list[tuple[int, int]] | None:
        """Return the character spans of the template's ``{% generation %}`` blocks; None without blocks.

        A modified template prints an unused character at both ends of each block. If the rendering without these
        characters differs from the original, because of whitespace control, the result is None.
        """
        template: str = self._tokenizer.get_chat_template(tools=self._request.tools)
        if not _GENERATION.search(template):
            return None
        opening = self.unused_character()
        closing = self.unused_character(first=chr(ord(opening) + 1))
        marking = _GENERATION.sub(rf'{{%\1 generation %}}{{{{ "{opening}" }}}}{{% if true \2%}}', template)
        marking = _END_GENERATION.sub(rf'{{%\1 endif %}}{{{{ "{closing}" }}}}{{% endgeneration \2%}}', marking)
        pieces = re.split(f"([{opening}{closing}])", self._render(self.messages, template=marking))
        if "".join(pieces[0::2]) != self.text or pieces[1::2] != [opening, closing] * (len(pieces) // 4):
            return None
        ends, position = [], 0
        for piece in pieces[0:-1:2]:
            position += len(piece)
            ends.append(position)
        return list(zip(ends[0::2], ends[1::2], strict=True))

    def text_after_last_answer(self) -> str | None:
        """Return what the template prints between the last answer and a user message after it; None if unknown."""
        messages = [*self.messages, {"role": "user", "content": self.unused_character()}]
        text = self.try_render(messages)
        text_range = self._find_message_range(messages, text, len(self.messages) - 1)
        return None if text is None or text_range is None else text[text_range[1] :]

    def location_error(self, index: int, why: str) -> DataError:
        """Return the error for a turn whose characters cannot be found; ``why`` continues "the chat template ..."."""
        return DataError(
            f"messages[{index}] cannot be masked exactly: the chat template {why}",
            where=self._origin,
            fix="set chat_template to a template that prints the whole conversation and encloses answers in "
            "{% generation %} ... {% endgeneration %}",
        )


def first_unused_character(text: str, first: str) -> str:
    """Return the first private-use character, from ``first`` on, that does not occur in ``text``."""
    return next(chr(code) for code in range(ord(first), 0xF900) if chr(code) not in text)


_NOT_TEXT = frozenset({"role", "type", "id", "tool_call_id", "name"})
"""Fields of a message whose strings are not text."""


def _replace_message_text(message: Message, mark: str) -> Message:
    replaced = {key: _replace_nested_strings(value, key, mark) for key, value in message.items()}
    if replaced == message:  # the message has no text: the mark becomes its content
        replaced["content"] = mark
    return replaced


def _replace_nested_strings(value: Any, key: str, mark: str) -> Any:
    if isinstance(value, str):
        return value if key in _NOT_TEXT or not value else mark
    if isinstance(value, dict):
        return {name: _replace_nested_strings(item, name, mark) for name, item in value.items()}
    if isinstance(value, list):
        return [_replace_nested_strings(item, key, mark) for item in value]
    return value


def opened_reasoning_length(prompt: str) -> int:
    """Return the number of characters of ``<think>`` and whitespace at the end of ``prompt``; 0 without this tag."""
    stripped = prompt.rstrip()
    return len(prompt) - len(stripped.removesuffix("<think>")) if stripped.endswith("<think>") else 0


def common_prefix_length(first: str, second: str) -> int:
    """Return the length of the longest common prefix of two strings, by bisection, which is faster than a loop."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_suffix_length(first: str, second: str, limit: int) -> int:
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if first[len(first) - middle : len(first) - low] == second[len(second) - middle : len(second) - low]:
            low = middle
        else:
            high = middle - 1
    return low


# ---------------------------------------------------------------------------------------------------------- reasoning

_MOST_REPLACED = 1000
"""Maximum number of answers whose reasoning is replaced in one rendering, each by its own unused character."""
_SHORT = 16
"""Number of characters below which reasoning may also occur in the template's own text, such as ``<think>``."""


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a message without whitespace at its ends; an empty string if it has none."""
    for name in REASONING_FIELDS:
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
    content = message.get("content")
    if not isinstance(content, str) or "</think>" not in content:
        return ""
    before = content.rpartition("</think>")[0]
    return (before.partition("<think>")[2] if "<think>" in content else before).strip()


def answers_without_printed_reasoning(chat: Renderings, answers: Sequence[int], turns: Mapping[int, str]) -> list[int]:
    """Return the indices of answers whose reasoning the template does not print.

    Long reasoning that occurs in the text of its turn, and in nothing else of its message, is printed. Other reasoning
    may be printed in another form, or its text may belong to the answer. So it is replaced by an unused character, and
    the conversation is rendered again.

    Args:
        answers: Indices of the answers to check; all have reasoning.
        turns: Message index -> text of the answer's turn; reasoning of missing indices is always replaced.
    """
    unsure = [index for index in answers if not _is_surely_printed(chat.messages[index], turns.get(index, ""))]
    missing: list[int] = []
    for first in range(0, len(unsure), _MOST_REPLACED):
        part, marks = unsure[first : first + _MOST_REPLACED], list[str]()
        messages = list(chat.messages)
        for index in part:
            marks.append(chat.unused_character(chr(ord(marks[-1]) + 1) if marks else "\ue000"))
            messages[index] = _with_marked_reasoning(messages[index], marks[-1])
        changed = chat.try_render(messages)
        missing += [index for index, mark in zip(part, marks, strict=True) if changed is None or mark not in changed]
    return missing


def _is_surely_printed(message: Message, turn: str) -> bool:
    reasoning = reasoning_of(message)
    if len(reasoning) < _SHORT or reasoning not in turn:
        return False
    return not any(reasoning in text for text in _nested_strings(_with_marked_reasoning(message, "")))


def _nested_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _nested_strings(item)


def _with_marked_reasoning(message: Message, mark: str) -> Message:
    content = message.get("content")
    if any(isinstance(value := message.get(name), str) and value.strip() for name in REASONING_FIELDS):
        return {**message, **{name: mark for name in REASONING_FIELDS if isinstance(message.get(name), str)}}
    assert isinstance(content, str), "without a field, the reasoning is in the content"
    before, end, after = content.rpartition("</think>")
    lead, start, thought = before.partition("<think>") if "<think>" in before else ("", "", before)
    return {**message, "content": f"{lead}{start}{thought.replace(reasoning_of(message), mark, 1)}{end}{after}"}


def forms_as_last_answer(chat: Renderings, index: int) -> list[list[Message]]:
    """Return two lists of messages that end with an answer, because templates print the reasoning of a last answer.

    In the second list, the answer has its reasoning in every field that templates may read.
    """
    message, before = chat.messages[index], chat.messages[:index]
    named = {**message, **dict.fromkeys(REASONING_FIELDS, reasoning_of(message))}
    named["content"] = message.get("content", "").rpartition("</think>")[2].lstrip()
    return [[*before, message], [*before, named]]
