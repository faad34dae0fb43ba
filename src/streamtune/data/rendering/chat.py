"""The characters of a rendered conversation that the assistant wrote.

A :class:`ChatTurn` is what the model must generate in one assistant turn: from the end of the generation prompt to the
end of the turn's terminator (``<|im_end|>``, ``<|eot_id|>``, the end-of-text token ...), without the line break that
most templates put behind it. A ``<think>`` that the generation prompt opens belongs to the turn, as the rest of the
reasoning does.

All turns are positions in **one** rendering of the whole conversation, because this text is trained on. The
first of these methods that applies finds them:

1. Marks. The template marks turns itself, with ``{% generation %}``.
2. Prefixes. The messages before a turn, the messages up to it, and all messages are rendered. If each rendering is a
   prefix of the next, the turn is the difference of the first two.
3. Changes. Templates that rewrite history (they drop the reasoning of earlier turns, or end the last turn with another
   token) break the prefixes. Then each message is replaced by a character that occurs nowhere, and the full rendering
   changes where that message stands. The header before it and the terminator after it come from renderings that stop at
   the turn. A turn may touch no text of another message; otherwise the row is refused.

Messages of users, tools and the system are trained if ``roles_to_train`` names their role: their text, as changes find
it, and the terminator right behind it if answers end with it too.

With ``reasoning: keep``, reasoning that the template dropped is then put back: a turn is replaced by its text in a
conversation that ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from streamtune.data.options import DEFAULT_CHAT, ChatOptions
from streamtune.data.rendering.renderings import (
    Message,
    Renderings,
    as_last_answer,
    common_prefix,
    dropped_answers,
    has_marks,
    opened_reasoning,
    reasoning_of,
    render_messages,
    special_names,
    without_flags,
)
from streamtune.data.templates import ChatRequest
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChatTurn:
    """Characters ``start`` to ``end`` (exclusive) of the rendering: one assistant turn."""

    start: int
    end: int


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation and the turns to train on, in order."""

    text: str
    turns: list[ChatTurn]
    ends: bool
    """True if every turn ends with a special token, from which the model learns to stop"""
    system: str = "printed"
    """place of the system message, as :attr:`Renderings.system`"""
    reasoned: int = 0
    """trained answers with reasoning"""
    dropped: list[int] = field(default_factory=list)
    """indices of trained answers whose reasoning the template leaves out"""
    exchanges: list[int] = field(default_factory=list)
    """characters where an exchange begins: a message of a user or the system, behind an answer"""
    closed: int = 0
    """answers trained with reasoning although the generation prompt says they have none"""


_COMPARED, _DISAGREED = 8, -1
"""Conversations whose spans are found in both ways, and the mark of a template for which these differ."""


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template and finds the assistant's turns in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ChatOptions = DEFAULT_CHAT) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._end = tokenizer.eos_token
        self._special_tokens = special_names(tokenizer)
        self._agreed = 0
        """conversations whose spans agree in both ways; :data:`_DISAGREED` once they differ"""
        self._special = re.compile("|".join(map(re.escape, self._special_tokens)) or r"(?!)")

    def render(
        self,
        request: ChatRequest,
        trained: Sequence[int],
        origin: str,
        *,
        reasoned: Sequence[int] | None = None,
        find_exchanges: bool = False,
    ) -> RenderedChat:
        """Render a conversation.

        Args:
            reasoned: Indices of the answers whose reasoning matters; by default ``trained``.
        """
        messages = request.messages
        chat = Renderings(self._tokenizer, request, origin)
        answers = [index for index in trained if messages[index]["role"] == "assistant"]
        turns = self._marked_turns(chat, answers)
        if turns is None:
            turns = self._located_turns(chat, answers)
        texts = [chat.text[turn.start : turn.end] for turn in turns]
        for index in answers:
            self._check_printed(chat, index, texts)
        reasoned = [index for index in (trained if reasoned is None else reasoned) if reasoning_of(messages[index])]
        own = dict(zip(answers, turns, strict=True)) if len(answers) == len(turns) else {}
        found = {index: chat.text[turn.start : turn.end] for index, turn in own.items()}
        dropped = dropped_answers(chat, reasoned, found)
        ends = all(map(self._ends_with_special, texts))
        closed = self._closed(chat, reasoned, dropped)
        turns = self._other_turns(chat, turns, [index for index in trained if index not in answers])
        text, answered = chat.text, self._answered(chat, own) if find_exchanges else []
        if dropped and self._options.reasoning == "keep":
            if not own.keys() >= set(dropped):
                own = dict(zip(dropped, self._located_turns(chat, dropped), strict=True))
            put_back = {index: own[index] for index in dropped}
            text, moved = self._with_reasoning(chat, [*turns, *answered], put_back)
            turns, answered = moved[: len(turns)], moved[len(turns) :]
        exchanges = [_skip_blanks(text, turn.end) for turn in answered]
        return RenderedChat(text, turns, ends, chat.system, len(reasoned), dropped, exchanges, closed)

    def _closed(self, chat: Renderings, reasoned: Sequence[int], dropped: Sequence[int]) -> int:
        """Return how many answers are trained with reasoning behind a generation prompt that leaves no room for it."""
        printed = [index for index in reasoned if self._options.reasoning == "keep" or index not in dropped]
        prompt = chat.prompt(printed[-1]) if printed else None
        return len(printed) if prompt is not None and _CLOSED_REASONING.search(prompt[-_NEAR:]) else 0

    def head(self, request: ChatRequest, text: str, origin: str) -> int:
        """Return how many characters of a rendered conversation (``text``) its system messages take.

        ``request`` has the system messages alone. 0 unless the template prints them alone as in the conversation.
        """
        try:
            alone = render_messages(self._tokenizer, request, origin)
        except DataError:  # some templates refuse a conversation without a user
            return 0
        content = request.messages[0].get("content", "").strip()
        return len(alone) if text.startswith(alone) and content in alone else 0

    def _answered(self, chat: Renderings, own: Mapping[int, ChatTurn]) -> list[ChatTurn]:
        """Return the answers that end an exchange, without untrained ones that cannot be located."""
        answers = [index for index in chat.answers() if _ends_exchange(chat.messages, index)]
        if not own.keys() >= set(answers):
            try:
                own = dict(zip(answers, self._located_turns(chat, answers), strict=True))
            except DataError:
                answers = [index for index in answers if index in own]
        return [own[index] for index in answers]

    def requests(self, request: ChatRequest, trained: Sequence[int]) -> list[ChatRequest]:
        """Return the renderings that :meth:`render` is going to ask for, except in special cases."""
        shown = without_flags(request)
        wanted = [shown]
        if not has_marks(self._tokenizer, request.tools):
            for index in trained:
                wanted.append(replace(shown, messages=shown.messages[: index + 1]))
                if index:
                    before = replace(shown, messages=shown.messages[:index])
                    wanted += [replace(before, generation=True), before]
        return wanted

    def _located_turns(self, chat: Renderings, answers: Sequence[int]) -> list[ChatTurn]:
        turns = self._prefix_turns(chat, answers)
        return self._changed_turns(chat, answers) if turns is None else turns

    def _check_printed(self, chat: Renderings, index: int, turns: Sequence[str]) -> None:
        """Raise unless an answer is in one of the turns: some templates leave out fields that they do not know."""
        message = chat.messages[index]
        # Reasoning is what templates leave out for good reason; the answer proper follows it.
        words = [message.get("content", "").rpartition("</think>")[2].strip()]
        words += [call.get("function", call)["name"] for call in message.get("tool_calls", [])]
        for text in words:
            if not any(text in turn for turn in turns):
                raise chat.refusal(index, f"leaves out {text[:60]!r}")

    # ------------------------------------------------------------------ 1. the template's own marks

    def _marked_turns(self, chat: Renderings, trained: Sequence[int]) -> list[ChatTurn] | None:
        """Return the turns that ``{% generation %}`` marks; None without marks, or if they fit several turns."""
        spans = self._spans(chat)
        if spans is None:
            return None
        answers = chat.answers()
        if len(spans) == len(answers):
            spans = [span for span, index in zip(spans, answers, strict=True) if index in trained]
        elif len(trained) != len(answers):
            return None  # only some turns are trained, and the marks do not say which span is which turn
        # What ends a turn: the end token, and what a chat ends with whose last message is an answer.
        terminators = {self._end}
        if answers and answers[-1] == len(chat.messages) - 1:
            terminators.update(token for token in self._special_tokens if chat.text.rstrip().endswith(token))
        return [self._with_terminator(chat.text, start, end, terminators) for start, end in spans]

    def _spans(self, chat: Renderings) -> list[tuple[int, int]] | None:
        """Return the spans of marks: of the rendering itself, once some agree with the spans of another rendering."""
        ahead = chat.spans_ahead() if self._agreed >= 0 else None
        if ahead is not None and self._agreed >= _COMPARED:
            return ahead
        spans = chat.marked_spans()
        if ahead is not None:
            self._agreed = self._agreed + 1 if ahead == spans else _DISAGREED
        return spans

    def _with_terminator(self, text: str, start: int, end: int, terminators: set[str]) -> ChatTurn:
        """Return a marked span up to its terminator: some templates mark too little, some a line break too much."""
        marked = text[start:end].rstrip()
        if self._ends_with_special(marked):
            return ChatTurn(start, start + len(marked))
        following = self._special.match(text, _skip_blanks(text, end))
        return ChatTurn(start, following.end() if following and following.group() in terminators else end)

    def _ends_with_special(self, text: str) -> bool:
        return text.endswith(self._special_tokens)

    # ------------------------------------------------------------------ 2. prefixes

    def _prefix_turns(self, chat: Renderings, trained: Sequence[int]) -> list[ChatTurn] | None:
        """Return the turns between prefixes of the full rendering; None if one is not a prefix."""
        turns = []
        for index in trained:
            before, through = chat.prompt_length(index), chat.through_length(index)
            if before is None or through is None or before > through:
                return None
            start = self._start_behind(chat, index, before, chat.text, through)
            turns.append(ChatTurn(start, self._end_of_turn(chat, index, start, chat.text[start:through])))
        return turns

    def _start_behind(self, chat: Renderings, index: int, before: int, text: str, through: int | None = None) -> int:
        """Return the start of the turn in ``text``, usually the end of the prompt before it, at ``before``.

        Without a generation prompt the text up to ``through`` is searched for the header.
        """
        if not chat.has_generation_prompt(index):
            return before + self._plain_header_length(chat, index, text[before:through])
        near = text[max(0, before - _NEAR) : before]
        return before - opened_reasoning(text[:before] if near.isspace() else near)

    def _plain_header_length(self, chat: Renderings, index: int, turn: str) -> int:
        """Return the length of the header that ``turn`` starts with if the template ignores the generation prompt.

        The header of such a template is the text between the history and an answer of plain content.
        """
        mark = chat.unused_character()
        history = chat.history(index) or ""
        answer = chat.try_render([*chat.messages[:index], {"role": "assistant", "content": mark}])
        if answer is None or not answer.startswith(history) or mark not in answer:
            return 0
        header = answer[len(history) : answer.index(mark)]
        # Blanks alone are no header: a model that is asked writes them itself.
        return len(header) if header.strip() and turn.startswith(header) else 0

    def _end_of_turn(self, chat: Renderings, index: int, start: int, turn: str) -> int:
        """Return the end of the last turn of a rendering, which starts at ``start``: behind its terminator."""
        turn = turn.rstrip()
        if self._ends_with_special(turn) and not self._ends_twice(turn):
            return start + len(turn)
        place = chat.place_in_prefix(index)
        if place is None:
            return start + len(turn)
        return place[1] + self._terminator_length(chat, index, (chat.through(index) or "")[place[1] :])

    def _ends_twice(self, text: str) -> bool:
        """Return True if only blanks separate the last two special tokens: one may end the turn, the other the text."""
        specials = list(self._special.finditer(text))
        return len(specials) > 1 and text[specials[-2].end() : specials[-1].start()].isspace()

    def _terminator_length(self, chat: Renderings, index: int, tail: str) -> int:
        """Return the length of ``tail``, the text after an answer, up to the end of its terminator.

        The terminator ends with the last special token (some templates close a tool call first), or else with the last
        character that is not blank. A token that only ends the whole conversation does not belong to the turn.
        """
        if self._ends_twice(tail.rstrip()) and index == len(chat.messages) - 1:
            shared = tail[: common_prefix(tail, chat.after_answer() or tail)]
            tail = shared if self._special.search(shared) else tail
        specials = list(self._special.finditer(tail))
        return specials[-1].end() if specials else len(tail.rstrip())

    # ------------------------------------------------------------------ 3. changes

    def _changed_turns(self, chat: Renderings, trained: Sequence[int]) -> list[ChatTurn]:
        """Return the turns around the text that changes with each answer, checked against every other message."""
        places = [chat.place(index) for index in range(len(chat.messages))]
        turns: list[ChatTurn] = []
        for index in trained:
            place = _printed(chat, places, index)
            earlier = (each[1] for each in places[:index] if each is not None and each[1] <= place[0])
            floor = max(turns[-1].end if turns else 0, *earlier, 0)
            turn = ChatTurn(self._rewritten_start(chat, index, place, floor), self._rewritten_end(chat, index, place))
            _refuse_shared(chat, places, index, turn)
            turns.append(turn)
        return turns

    def _rewritten_start(self, chat: Renderings, index: int, place: tuple[int, int], floor: int) -> int:
        """Return the end of the header before ``place``, searched no further back than ``floor``."""
        before = chat.prompt(index)
        if before is not None and chat.text.startswith(before) and floor <= len(before) <= place[0]:
            return self._start_behind(chat, index, len(before), chat.text)
        for header in chat.headers(index):
            found = chat.text.rfind(header, floor, place[0])
            if found >= 0:
                return found + len(header)
        start = self._behind_printed_header(chat, index, place, floor)
        if start is not None:
            return start
        lead = None if chat.has_generation_prompt(index) else chat.lead(index)
        start = place[0] - len(lead or "")
        if lead is not None and floor <= start and chat.text.startswith(lead, start):
            return start + self._plain_header_length(chat, index, chat.text[start:])
        raise chat.refusal(index, "puts something else before it than its generation prompt")

    def _behind_printed_header(self, chat: Renderings, index: int, place: tuple[int, int], floor: int) -> int | None:
        """Return the end of the part of a generation prompt that stands before ``place``; None if none does.

        A generation prompt may say more than the header of a turn in history, such as ``<think></think>``. The header
        ends where the text of the turn begins, or of an answer in its place.
        """
        for header in chat.headers(index):
            if common := self._header_before(chat.text, place[0], floor, header):
                return place[0] - opened_reasoning(common)
            bare, begins = chat.bare_answer(index)
            common = self._header_before(bare, begins, floor, header) if bare.startswith(chat.text[:floor]) else ""
            found = chat.text.rfind(common, floor, place[0]) if common else -1
            if found >= 0:
                return found + len(common) - opened_reasoning(common)
        return None

    def _header_before(self, text: str, position: int, floor: int, header: str) -> str:
        """Return the longest beginning of ``header``, with a special token, that ends at ``position`` of a text."""
        first = self._special.search(header)
        least = first.end() if first is not None else 1
        sizes = range(min(len(header), position - floor), least - 1, -1)
        common = next((header[:size] for size in sizes if text.endswith(header[:size], floor, position)), "")
        return common if common.strip() else ""

    def _rewritten_end(self, chat: Renderings, index: int, place: tuple[int, int]) -> int:
        through = chat.through(index)
        place_in_prefix = chat.place_in_prefix(index)
        if through is not None and place_in_prefix is not None:
            tail = through[place_in_prefix[1] :]
            shared = tail[: common_prefix(tail, chat.text[place[1] :])]
            if self._special.search(shared) or shared.strip() == tail.strip():
                return place[1] + self._terminator_length(chat, index, shared)
        # The last turn of a chat may end with another token than those before it: take the one that stands here.
        token = self._special.match(chat.text, _skip_blanks(chat.text, place[1]))
        if token is None:
            raise chat.refusal(index, "ends it otherwise than the last answer")
        return token.end()

    # ------------------------------------------------------------------ users, tools, and the ends of turns

    def _other_turns(self, chat: Renderings, turns: list[ChatTurn], others: Sequence[int]) -> list[ChatTurn]:
        """Return the turns of answers and other messages in order, with the terminators that ``train_on_eos`` names."""
        which = self._options.train_on_eos
        if not others and which == "turn":
            return turns
        enders = self._enders(chat, turns)
        places = [chat.place(index) for index in range(len(chat.messages))] if others else []
        for index in others:
            start, end = _printed(chat, places, index)
            _refuse_shared(chat, places, index, ChatTurn(start, end))
            turns = [*turns, ChatTurn(start, self._behind_ender(chat.text, end, enders))]
        if which != "turn":
            turns = [ChatTurn(turn.start, self._before_ender(chat.text, turn, enders)) for turn in turns]
            ends = self._ends_of_turns(chat, enders) if which != "none" else []
            turns += ends[-1:] if which == "last" else ends
        return _joined(turns)

    def _enders(self, chat: Renderings, turns: Sequence[ChatTurn]) -> set[str]:
        """Return the tokens that end answers: the tokenizer's end token, and the last tokens of this chat's turns."""
        texts = [chat.text[turn.start : turn.end] for turn in turns]
        ends = {next((token for token in self._special_tokens if text.endswith(token)), "") for text in texts}
        return (ends | {str(self._end or "")}) - {""}

    def _behind_ender(self, text: str, position: int, enders: set[str]) -> int:
        """Return the position behind a terminator that follows, or ``position`` itself."""
        following = self._special.match(text, _skip_blanks(text, position))
        return following.end() if following is not None and following.group() in enders else position

    def _before_ender(self, text: str, turn: ChatTurn, enders: set[str]) -> int:
        token = next((token for token in enders if text.endswith(token, turn.start, turn.end)), "")
        return turn.end - len(token)

    def _ends_of_turns(self, chat: Renderings, enders: set[str]) -> list[ChatTurn]:
        """Return the terminators of all messages, whoever speaks."""
        ends = []
        turns = dict(zip(chat.answers(), self._located_turns(chat, chat.answers()), strict=True))
        for index in range(len(chat.messages)):
            if index in turns:
                ends.append(ChatTurn(self._before_ender(chat.text, turns[index], enders), turns[index].end))
            elif (place := chat.place(index)) is not None and place != (0, 0):
                start = _skip_blanks(chat.text, place[1])
                ends.append(ChatTurn(start, self._behind_ender(chat.text, place[1], enders)))
        return sorted((turn for turn in ends if turn.start < turn.end), key=lambda turn: turn.start)

    # ------------------------------------------------------------------ reasoning that was dropped

    def _with_reasoning(
        self, chat: Renderings, turns: Sequence[ChatTurn], dropped: Mapping[int, ChatTurn]
    ) -> tuple[str, list[ChatTurn]]:
        """Return the rendering with reasoning put back into the turns of answers, and the trained turns in it."""
        text, moved = chat.text, list(turns)
        for index, turn in sorted(dropped.items(), reverse=True):  # from the end, so that earlier places stay
            written = self._written(chat, index, text[turn.start : turn.end])
            text = text[: turn.start] + written + text[turn.end :]
            longer = len(written) - (turn.end - turn.start)
            # A place behind the turn moves, and so does the end of what covers it; its start stays.
            moved = [
                ChatTurn(
                    each.start + longer if each.start >= turn.end else each.start,
                    each.end + longer if each.end > turn.start else each.end,
                )
                for each in moved
            ]
        return text, moved

    def _written(self, chat: Renderings, index: int, printed: str) -> str:
        """Return what the model writes in a turn with its reasoning: as in a conversation that ends with the turn."""
        reasoning, before = reasoning_of(chat.messages[index]), chat.prompt(index)
        for messages in as_last_answer(chat, index) if before is not None else ():
            through = chat.try_render(messages)
            if before is not None and through is not None and not through.startswith(before):
                before = _CLOSED_REASONING.sub("", before)  # which the reasoning stands in place of
            if before is None or through is None or not through.startswith(before):
                continue
            start = self._start_behind(chat, index, len(before), through)
            turn = through[start:].rstrip()
            if reasoning in turn:
                token = next((token for token in self._special_tokens if printed.endswith(token)), "")
                # The last turn of a chat may end with another token than the others.
                specials = list(self._special.finditer(turn))
                while token and specials and specials[-1].end() == len(turn):
                    turn = turn[: specials.pop().start()].rstrip()
                return turn + token if token else turn
        return f"<think>\n{reasoning}\n</think>\n\n{_NO_REASONING.sub('', printed).lstrip()}"


Places = Sequence[tuple[int, int] | None]
"""[messages] as :meth:`Renderings.place` returns them."""


def _printed(chat: Renderings, places: Places, index: int) -> tuple[int, int]:
    """Return the place of a message; raise if the template does not print its text."""
    place = places[index]
    if place is None or place == (0, 0):
        raise chat.refusal(index, "does not print its text")
    return place


def _refuse_shared(chat: Renderings, places: Places, index: int, turn: ChatTurn) -> None:
    """Raise if the turn of a message touches the text of another."""
    for other, foreign in enumerate(places):
        if other != index and (foreign is None or (foreign[0] < turn.end and turn.start < foreign[1])):
            raise chat.refusal(index, f"prints it together with messages[{other}]")


def _ends_exchange(messages: Sequence[Message], index: int) -> bool:
    """Return True if a message of a user or the system follows an answer, not of a tool or the assistant."""
    following = messages[index + 1]["role"] if index + 1 < len(messages) else ""
    return following in ("user", "system", "developer")


def _joined(turns: Sequence[ChatTurn]) -> list[ChatTurn]:
    """Return turns in order, touching turns joined."""
    joined: list[ChatTurn] = []
    for turn in sorted((turn for turn in turns if turn.start < turn.end), key=lambda turn: turn.start):
        if joined and turn.start <= joined[-1].end:
            joined[-1] = ChatTurn(joined[-1].start, max(joined[-1].end, turn.end))
        else:
            joined.append(turn)
    return joined


_NEAR = 4096
"""Characters at the end of a prompt that are searched for ``<think>``, unless all are blank."""
_BLANKS = re.compile(r"\s*")
_CLOSED_REASONING = re.compile(r"<think>\s*</think>\s*\Z")
_NO_REASONING = re.compile(r"\A\s*<think>\s*</think>")


def _skip_blanks(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position
