"""Find messages and tools of a conversation that the chat template does not print.

Text that occurs in the rendering need not be printed for its message: a short text may occur in another message too. So
the text is replaced, and the conversation is rendered again. What a template prints depends on roles, fields and
positions of messages, not on their text. So one rendering serves all messages in the same situation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from streamtune.data.reading.cells import FLAGS
from streamtune.data.rendering.chat_variants import Message, first_unused_character
from streamtune.data.templates import ChatRequest

_MOST_KNOWN = 10_000
"""Number of remembered situations above which all are forgotten."""

Render = Callable[[list[Message]], str | None]
"""Function that renders other messages in place of a conversation's; None if the template rejects them."""


class LeftOutFinder:
    """Finds the messages and tools that one chat template does not print."""

    def __init__(self) -> None:
        self._known: dict[Hashable, bool] = {}
        """situation of a message or of tools -> True if the template does not print them"""

    def find_messages(self, request: ChatRequest, text: str, render: Render) -> list[int]:
        """Return the indices of the messages with a text that the template does not print.

        Args:
            text: The rendered conversation.
        """
        self._forget_too_many()
        shared, kinds = _describe_request(request), [_describe_message(message) for message in request.messages]
        around = [None, *kinds, None]
        situations = {
            index: (shared, tuple(around[index : index + 3]))
            for index, message in enumerate(request.messages)
            if _has_text(message)
        }
        unknown = {situation: index for index, situation in situations.items() if situation not in self._known}
        if unknown:
            left_out = set(_find_left_out(request.messages, list(unknown.values()), text, render))
            self._known.update({situation: index in left_out for situation, index in unknown.items()})
        return [index for index, situation in situations.items() if self._known[situation]]

    def omits_tools(
        self, request: ChatRequest, text: str, render_without_tools: Callable[[], str | None], state: str = ""
    ) -> bool:
        """Return True if the conversation has tools that the template does not print.

        Args:
            text: The rendered conversation.
            state: Treatment of the system message, on which the rendering depends.
        """
        if not request.tools:
            return False
        self._forget_too_many()
        forms = frozenset(frozenset(tool) for tool in request.tools)
        situation = ("tools", state, _describe_request(request), forms)
        if situation not in self._known:
            self._known[situation] = render_without_tools() == text
        return self._known[situation]

    def _forget_too_many(self) -> None:
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()


def _describe_request(request: ChatRequest) -> Hashable:
    roles = Counter(message["role"] for message in request.messages)
    return (
        bool(request.tools),
        request.generation,
        repr(sorted((request.variables or {}).items())),
        request.messages[0]["role"],
        request.messages[-1]["role"],
        frozenset((role, min(count, 2)) for role, count in roles.items()),
    )


def _describe_message(message: Message) -> Hashable:
    return message["role"], frozenset(name for name, value in message.items() if value and name not in FLAGS)


def _has_text(message: Message) -> bool:
    return isinstance(content := message.get("content"), str) and bool(content.strip())


def _find_left_out(messages: Sequence[Message], indices: Sequence[int], text: str, render: Render) -> list[int]:
    """Return the indices of messages that can have another text without a change of the rendering."""
    marks: dict[int, str] = {}
    for index in indices:
        after = chr(ord(marks[next(reversed(marks))]) + 1) if marks else "\ue000"
        marks[index] = first_unused_character(text, after)
    changed = render([_with_content(message, marks.get(index)) for index, message in enumerate(messages)])
    missing = [index for index in indices if changed is None or marks[index] not in changed]
    # A template may also print a text in another form, such as JSON, or reject the replaced text.
    return [
        index
        for index in missing
        if render([*messages[:index], _with_content(messages[index], marks[index]), *messages[index + 1 :]]) == text
    ]


def _with_content(message: Message, content: str | None) -> Message:
    return message if content is None else {**message, "content": content}
