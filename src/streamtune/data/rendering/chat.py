"""Render a conversation with its chat template, and find the characters that the assistant wrote.

A :class:`ChatTurn` is the text that the model must generate in one assistant turn. It starts after the generation
prompt. It ends after the end-of-turn token (``<|im_end|>``, ``<|eot_id|>``, EOS ...), without the line break that most
templates print after it. If the generation prompt opens ``<think>``, this tag belongs to the turn, like the rest of the
reasoning.

All turns are positions in **one** rendering of the whole conversation, because this text is trained on. They are found
by the first method that applies:

1. Marks. The template encloses turns in ``{% generation %}``.
2. Prefixes. The messages before a turn, the messages up to the turn, and all messages are rendered. If each rendering
   is a prefix of the next, the turn is the difference of the first two.
3. Changes. Some templates drop the reasoning of earlier turns, or end the last turn with another token, so renderings
   are not prefixes. Each message is then replaced by an unused character, to find which characters of the full
   rendering change. Renderings that stop at the turn show the text before it and the end token. If a turn overlaps the
   text of another message, the row is rejected.

Other messages (user, tool, system) are trained on if ``roles_to_train`` names their role. The third method finds their
text. An end token directly after it is trained on too, if answers also end with this token.

With ``reasoning: keep``, reasoning that the template dropped is restored afterwards: the text of the turn is taken from
a conversation that ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from streamtune.data.options import DEFAULT_CHAT, ChatOptions
from streamtune.data.rendering.chat_variants import (
    Message,
    Renderings,
    answers_without_printed_reasoning,
    common_prefix_length,
    forms_as_last_answer,
    opened_reasoning_length,
    reasoning_of,
    render_messages,
    special_names,
    template_marks_answers,
    without_training_flags,
)
from streamtune.data.rendering.left_out import LeftOutFinder
from streamtune.data.templates import ChatRequest
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChatTurn:
    """Characters ``start`` to ``end`` (exclusive) of a rendered conversation: one turn to train on."""

    start: int
    end: int


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation with the turns to train on."""

    text: str
    turns: list[ChatTurn]
    """turns to train on, in order"""
    ends: bool
    """True if every turn to train on ends with a special token, from which the model learns to stop"""
    system: str = "printed"
    """treatment of the system message by the template, a value of :attr:`Renderings.system`"""
    reasoned: int = 0
    """number of answers with reasoning to train on"""
    dropped: list[int] = field(default_factory=list)
    """indices of the answers to train on whose reasoning the template omits"""
    exchanges: list[int] = field(default_factory=list)
    """positions at which an exchange begins, which is a user or system message after an answer"""
    closed: int = 0
    """number of answers trained with reasoning although their generation prompt has an empty ``<think></think>``"""
    left_out: list[int] = field(default_factory=list)
    """indices of the messages that the template does not print, without a system message at the start"""
    omits_tools: bool = False
    """True if the template does not print the tools"""


_COMPARED, _DISAGREED = 8, -1
"""Number of conversations for which two methods to find ``{% generation %}`` spans are compared, and the mark of a
difference."""


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template, and finds the characters to train on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ChatOptions = DEFAULT_CHAT) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._end = tokenizer.eos_token
        self._special_tokens = special_names(tokenizer)
        self._left_out = LeftOutFinder()
        self._agreed = 0
        """number of conversations for which both methods gave the same spans; :data:`_DISAGREED` after a difference"""
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
        """Render a conversation and find the turns to train on.

        Args:
            trained: Indices of the messages to train on.
            origin: File and line of the row, for errors.
            reasoned: Indices of the answers whose reasoning must be printed. [default: ``trained``]
            find_exchanges: Whether to find where exchanges begin: a user or system message after an answer.

        Raises:
            DataError: The template rejects the conversation, or a turn cannot be located exactly.
        """
        messages = request.messages
        chat = Renderings(self._tokenizer, request, origin)
        left_out = self._left_out.find_messages(request, chat.text, chat.try_render)
        if left_out[:1] == [0] and messages[0]["role"] == "system":
            del left_out[0]
            chat.print_system_late()
        omits_tools = self._left_out.omits_tools(request, chat.text, chat.render_without_tools, chat.system)
        answers = [index for index in trained if messages[index]["role"] == "assistant"]
        turns = self._find_turns_by_marks(chat, answers)
        if turns is None:
            turns = self._locate_turns(chat, answers)
        texts = [chat.text[turn.start : turn.end] for turn in turns]
        for place, index in enumerate(answers):
            self._check_answer_is_printed(
                chat, index, texts[place : place + 1] if len(texts) == len(answers) else texts
            )
        reasoned = [index for index in (trained if reasoned is None else reasoned) if reasoning_of(messages[index])]
        turns_by_index = dict(zip(answers, turns, strict=True)) if len(answers) == len(turns) else {}
        texts_by_index = {index: chat.text[turn.start : turn.end] for index, turn in turns_by_index.items()}
        dropped = answers_without_printed_reasoning(chat, reasoned, texts_by_index)
        ends = all(map(self._ends_with_special, texts))
        closed = self._count_closed_reasoning(chat, reasoned, dropped)
        turns = self._turns_with_end_tokens(chat, turns, [index for index in trained if index not in answers])
        text, exchange_ends = chat.text, self._find_exchange_end_turns(chat, turns_by_index) if find_exchanges else []
        if dropped and self._options.reasoning == "keep":
            if not turns_by_index.keys() >= set(dropped):
                turns_by_index = dict(zip(dropped, self._locate_turns(chat, dropped), strict=True))
            restored_turns = {index: turns_by_index[index] for index in dropped}
            text, moved = self._restore_reasoning(chat, [*turns, *exchange_ends], restored_turns)
            turns, exchange_ends = moved[: len(turns)], moved[len(turns) :]
        exchanges = [_skip_blanks(text, turn.end) for turn in exchange_ends]
        return RenderedChat(
            text, turns, ends, chat.system, len(reasoned), dropped, exchanges, closed, left_out, omits_tools
        )

    def _count_closed_reasoning(self, chat: Renderings, reasoned: Sequence[int], dropped: Sequence[int]) -> int:
        """Return :attr:`RenderedChat.closed`."""
        printed = [index for index in reasoned if self._options.reasoning == "keep" or index not in dropped]
        prompt = chat.render_prompt(printed[-1]) if printed else None
        return len(printed) if prompt is not None and _CLOSED_REASONING.search(prompt[-_NEAR:]) else 0

    def system_prefix_length(self, request: ChatRequest, text: str, origin: str) -> int:
        """Return the number of characters of the system messages at the start of a rendered conversation.

        Return 0 if the template prints the system messages differently without the other messages.

        Args:
            request: Request with only the system messages.
            origin: File and line of the row, for errors.
        """
        try:
            alone = render_messages(self._tokenizer, request, origin)
        except DataError:  # some templates reject a conversation without a user message
            return 0
        content = request.messages[0].get("content", "").strip()
        return len(alone) if text.startswith(alone) and content in alone else 0

    def _find_exchange_end_turns(self, chat: Renderings, turns_by_index: Mapping[int, ChatTurn]) -> list[ChatTurn]:
        """Return the turn of each answer before a user or system message; untrained answers may be missing."""
        answers = [index for index in chat.answers() if _is_last_of_exchange(chat.messages, index)]
        if not turns_by_index.keys() >= set(answers):
            try:
                turns_by_index = dict(zip(answers, self._locate_turns(chat, answers), strict=True))
            except DataError:
                answers = [index for index in answers if index in turns_by_index]
        return [turns_by_index[index] for index in answers]

    def requests_to_render_ahead(self, request: ChatRequest, trained: Sequence[int]) -> list[ChatRequest]:
        """Return the requests that :meth:`render` will usually make, so that they can be rendered together in advance.

        Args:
            trained: Indices of the assistant messages to train on.
        """
        shown = without_training_flags(request)
        wanted = [shown]
        if not template_marks_answers(self._tokenizer, request.tools):
            for index in trained:
                wanted.append(replace(shown, messages=shown.messages[: index + 1]))
                if index:
                    before = replace(shown, messages=shown.messages[:index])
                    wanted += [replace(before, generation=True), before]
        return wanted

    def _locate_turns(self, chat: Renderings, answers: Sequence[int]) -> list[ChatTurn]:
        turns = self._find_turns_by_prefixes(chat, answers)
        return self._find_turns_by_changes(chat, answers) if turns is None else turns

    def _check_answer_is_printed(self, chat: Renderings, index: int, turns: Sequence[str]) -> None:
        """Check that the template prints the text and the tool calls of an answer.

        Raises:
            DataError: A text or a function name is in none of the turns.
        """
        message = chat.messages[index]
        # Reasoning may be omitted, so only the text after it is checked.
        words = [message.get("content", "").rpartition("</think>")[2].strip()]
        words += [call.get("function", call)["name"] for call in message.get("tool_calls", [])]
        for text in words:
            if not any(text in turn for turn in turns):
                raise chat.location_error(index, f"omits {text[:60]!r}")

    # ------------------------------------------------------------------ 1. the template's own marks

    def _find_turns_by_marks(self, chat: Renderings, trained: Sequence[int]) -> list[ChatTurn] | None:
        """Return the turns in ``{% generation %}`` blocks; None without blocks, or if answers do not match blocks."""
        spans = self._generation_spans(chat)
        if spans is None:
            return None
        answers = chat.answers()
        if len(spans) == len(answers):
            spans = [span for span, index in zip(spans, answers, strict=True) if index in trained]
        elif len(trained) != len(answers):
            return None  # only some turns are trained, and it is unknown which span belongs to which turn
        # A turn ends with EOS, or with the special token at the end of a chat whose last message is an answer.
        terminators = {self._end}
        if answers and answers[-1] == len(chat.messages) - 1:
            terminators.update(token for token in self._special_tokens if chat.text.rstrip().endswith(token))
        return [self._extend_to_end_token(chat.text, start, end, terminators) for start, end in spans]

    def _generation_spans(self, chat: Renderings) -> list[tuple[int, int]] | None:
        """Return the character spans of ``{% generation %}`` blocks; None without blocks.

        The template process reports spans with each rendering. They are used without a check after they equalled the
        spans of :meth:`Renderings.find_generation_spans` for 8 conversations.
        """
        ahead = chat.spans_rendered_ahead() if self._agreed >= 0 else None
        if ahead is not None and self._agreed >= _COMPARED:
            return ahead
        spans = chat.find_generation_spans()
        if ahead is not None:
            self._agreed = self._agreed + 1 if ahead == spans else _DISAGREED
        return spans

    def _extend_to_end_token(self, text: str, start: int, end: int, terminators: set[str]) -> ChatTurn:
        """Return the turn of a ``{% generation %}`` block, up to its end token.

        Some templates leave the end token outside of the block; others have a line break after it in the block.
        """
        marked = text[start:end].rstrip()
        if self._ends_with_special(marked):
            return ChatTurn(start, start + len(marked))
        following = self._special.match(text, _skip_blanks(text, end))
        return ChatTurn(start, following.end() if following and following.group() in terminators else end)

    def _ends_with_special(self, text: str) -> bool:
        return text.endswith(self._special_tokens)

    # ------------------------------------------------------------------ 2. prefixes

    def _find_turns_by_prefixes(self, chat: Renderings, trained: Sequence[int]) -> list[ChatTurn] | None:
        """Return each turn as the difference of two renderings; None if these are not prefixes of the full text."""
        turns = []
        for index in trained:
            before, through = chat.length_before_answer(index), chat.length_through_message(index)
            if before is None or through is None or before > through:
                return None
            start = self._find_turn_start(chat, index, before, chat.text, through)
            turns.append(ChatTurn(start, self._find_turn_end(chat, index, start, chat.text[start:through])))
        return turns

    def _find_turn_start(
        self, chat: Renderings, index: int, history_length: int, text: str, through: int | None = None
    ) -> int:
        """Return the position in ``text`` where the turn of message ``index`` starts, after the text that introduces
        the turn.

        Args:
            history_length: Length of the prompt before the turn; usually the turn starts here.
            text: Rendering that contains the turn.
            through: End of the text to search for a header, if the template has no generation prompt; None searches
                all.
        """
        if not chat.has_generation_prompt(index):
            return history_length + self._plain_header_length(chat, index, text[history_length:through])
        near = text[max(0, history_length - _NEAR) : history_length]
        return history_length - opened_reasoning_length(text[:history_length] if near.isspace() else near)

    def _plain_header_length(self, chat: Renderings, index: int, turn: str) -> int:
        """Return the length of the header at the start of ``turn``, for a template without a generation prompt.

        The header is what such a template prints between the earlier messages and the content of an answer.
        """
        mark = chat.unused_character()
        history = chat.render_history(index) or ""
        answer = chat.try_render([*chat.messages[:index], {"role": "assistant", "content": mark}])
        if answer is None or not answer.startswith(history) or mark not in answer:
            return 0
        header = answer[len(history) : answer.index(mark)]
        # Blanks alone are not a header: the model generates them.
        return len(header) if header.strip() and turn.startswith(header) else 0

    def _find_turn_end(self, chat: Renderings, index: int, start: int, turn: str) -> int:
        """Return the position after the end token of a turn; ``turn`` is the text from position ``start``."""
        turn = turn.rstrip()
        if self._ends_with_special(turn) and not self._has_two_end_tokens(turn):
            return start + len(turn)
        place = chat.text_range_in_prefix(index)
        if place is None:
            return start + len(turn)
        return place[1] + self._turn_tail_length(chat, index, (chat.render_through_message(index) or "")[place[1] :])

    def _has_two_end_tokens(self, text: str) -> bool:
        """Return True if only whitespace separates the last two special tokens, which end the turn and the text."""
        specials = list(self._special.finditer(text))
        return len(specials) > 1 and text[specials[-2].end() : specials[-1].start()].isspace()

    def _turn_tail_length(self, chat: Renderings, index: int, tail: str) -> int:
        """Return how many characters of ``tail`` (the text printed after an answer) belong to the turn of the answer.

        The turn ends with the last special token, because an earlier one may close a tool call. Without special tokens
        it ends before trailing whitespace. A token that only ends the conversation is excluded.
        """
        if self._has_two_end_tokens(tail.rstrip()) and index == len(chat.messages) - 1:
            shared = tail[: common_prefix_length(tail, chat.text_after_last_answer() or tail)]
            tail = shared if self._special.search(shared) else tail
        specials = list(self._special.finditer(tail))
        return specials[-1].end() if specials else len(tail.rstrip())

    # ------------------------------------------------------------------ 3. changes

    def _find_turns_by_changes(self, chat: Renderings, trained: Sequence[int]) -> list[ChatTurn]:
        """Return the turn of each answer, found by replacing the answer and comparing the renderings.

        Raises:
            DataError: A turn cannot be located, or overlaps the text of another message.
        """
        text_ranges = [chat.text_range(index) for index in range(len(chat.messages))]
        turns: list[ChatTurn] = []
        for index in trained:
            text_range = _require_printed_range(chat, text_ranges, index)
            earlier = (each[1] for each in text_ranges[:index] if each is not None and each[1] <= text_range[0])
            floor = max(turns[-1].end if turns else 0, *earlier, 0)
            turn = ChatTurn(
                self._find_turn_start_by_comparison(chat, index, text_range, floor),
                self._find_turn_end_by_comparison(chat, index, text_range),
            )
            _check_no_overlap(chat, text_ranges, index, turn)
            turns.append(turn)
        return turns

    def _find_turn_start_by_comparison(
        self, chat: Renderings, index: int, text_range: tuple[int, int], floor: int
    ) -> int:
        """Return the end of the header (text that introduces a turn) before ``text_range``; it begins at ``floor`` or
        later.

        Raises:
            DataError: The template does not print its generation prompt before the answer.
        """
        before = chat.render_prompt(index)
        if before is not None and chat.text.startswith(before) and floor <= len(before) <= text_range[0]:
            return self._find_turn_start(chat, index, len(before), chat.text)
        for header in chat.possible_headers(index):
            found = chat.text.rfind(header, floor, text_range[0])
            if found >= 0:
                return found + len(header)
        start = self._short_header_end(chat, index, text_range, floor)
        if start is not None:
            return start
        lead = None if chat.has_generation_prompt(index) else chat.text_before_answer(index)
        start = text_range[0] - len(lead or "")
        if lead is not None and floor <= start and chat.text.startswith(lead, start):
            return start + self._plain_header_length(chat, index, chat.text[start:])
        raise chat.location_error(index, "prints different text before the answer than its generation prompt")

    def _short_header_end(self, chat: Renderings, index: int, text_range: tuple[int, int], floor: int) -> int | None:
        """Return the end of the text before a turn that is only the beginning of the generation prompt; None if there
        is none.

        For example, a generation prompt may end with ``<think></think>``, while the text before an earlier turn does
        not.
        """
        for header in chat.possible_headers(index):
            if common := self._header_ending_at(chat.text, text_range[0], floor, header):
                return text_range[0] - opened_reasoning_length(common)
            bare, begins = chat.render_short_answer(index)
            common = self._header_ending_at(bare, begins, floor, header) if bare.startswith(chat.text[:floor]) else ""
            found = chat.text.rfind(common, floor, text_range[0]) if common else -1
            if found >= 0:
                return found + len(common) - opened_reasoning_length(common)
        return None

    def _header_ending_at(self, text: str, position: int, floor: int, header: str) -> str:
        """Return the longest beginning of ``header`` that ends at ``position`` of a text; an empty string if there is
        none.

        The beginning must contain the first special token of ``header``, if there is one.
        """
        first = self._special.search(header)
        min_length = first.end() if first is not None else 1
        sizes = range(min(len(header), position - floor), min_length - 1, -1)
        common = next((header[:size] for size in sizes if text.endswith(header[:size], floor, position)), "")
        return common if common.strip() else ""

    def _find_turn_end_by_comparison(self, chat: Renderings, index: int, text_range: tuple[int, int]) -> int:
        through = chat.render_through_message(index)
        text_range_in_prefix = chat.text_range_in_prefix(index)
        if through is not None and text_range_in_prefix is not None:
            tail = through[text_range_in_prefix[1] :]
            shared = tail[: common_prefix_length(tail, chat.text[text_range[1] :])]
            if self._special.search(shared) or shared.strip() == tail.strip():
                return text_range[1] + self._turn_tail_length(chat, index, shared)
        # The last turn of a chat may end with another token than earlier turns: use the token found here.
        token = self._special.match(chat.text, _skip_blanks(chat.text, text_range[1]))
        if token is None:
            raise chat.location_error(index, "ends the turn differently from the last turn")
        return token.end()

    # ------------------------------------------------------------------ users, tools, and the ends of turns

    def _turns_with_end_tokens(
        self, chat: Renderings, turns: list[ChatTurn], other_messages: Sequence[int]
    ) -> list[ChatTurn]:
        """Return all turns to train on, in order, with the end tokens that ``train_on_eos`` selects."""
        which = self._options.train_on_eos
        if not other_messages and which == "turn":
            return turns
        end_tokens = self._end_token_names(chat, turns)
        text_ranges = [chat.text_range(index) for index in range(len(chat.messages))] if other_messages else []
        for index in other_messages:
            start, end = _require_printed_range(chat, text_ranges, index)
            _check_no_overlap(chat, text_ranges, index, ChatTurn(start, end))
            turns = [*turns, ChatTurn(start, self._position_after_end_token(chat.text, end, end_tokens))]
        if which != "turn":
            turns = [
                ChatTurn(turn.start, self._position_before_end_token(chat.text, turn, end_tokens)) for turn in turns
            ]
            ends = self._end_token_ranges(chat, end_tokens) if which != "none" else []
            turns += ends[-1:] if which == "last" else ends
        return _join_turns(turns)

    def _end_token_names(self, chat: Renderings, turns: Sequence[ChatTurn]) -> set[str]:
        """Return the texts of the tokens that end answers: EOS, and the special token at the end of each turn.

        Args:
            turns: Turns of the answers to train on; if there are none, the ends of all answers are found.
        """
        texts = [chat.text[turn.start : turn.end] for turn in turns]
        for index in () if turns else chat.answers():
            with suppress(DataError):  # an answer that is not trained on need not be found
                texts += [chat.text[turn.start : turn.end] for turn in self._locate_turns(chat, [index])]
        texts = texts or [self._text_of_next_answer(chat)]
        ends = {next((token for token in self._special_tokens if text.endswith(token)), "") for text in texts}
        return (ends | {str(self._end or "")}) - {""}

    def _text_of_next_answer(self, chat: Renderings) -> str:
        """Return an unused character as the next answer, up to the last special token that the template prints."""
        mark = chat.unused_character()
        text = chat.try_render([*chat.messages, {"role": "assistant", "content": mark}]) or ""
        specials = list(self._special.finditer(text, text.find(mark) + 1)) if mark in text else []
        return text[text.find(mark) : specials[-1].end()] if specials else ""

    def _position_after_end_token(self, text: str, position: int, end_tokens: set[str]) -> int:
        """Return the position after the end token (after whitespace) at ``position``; without it, ``position``."""
        following = self._special.match(text, _skip_blanks(text, position))
        return following.end() if following is not None and following.group() in end_tokens else position

    def _position_before_end_token(self, text: str, turn: ChatTurn, end_tokens: set[str]) -> int:
        token = next((token for token in end_tokens if text.endswith(token, turn.start, turn.end)), "")
        return turn.end - len(token)

    def _end_token_ranges(self, chat: Renderings, end_tokens: set[str]) -> list[ChatTurn]:
        ends = []
        turns = dict(zip(chat.answers(), self._locate_turns(chat, chat.answers()), strict=True))
        for index in range(len(chat.messages)):
            if index in turns:
                ends.append(
                    ChatTurn(self._position_before_end_token(chat.text, turns[index], end_tokens), turns[index].end)
                )
            elif (place := chat.text_range(index)) is not None and place != (0, 0):
                start = _skip_blanks(chat.text, place[1])
                ends.append(ChatTurn(start, self._position_after_end_token(chat.text, place[1], end_tokens)))
        return sorted((turn for turn in ends if turn.start < turn.end), key=lambda turn: turn.start)

    # ------------------------------------------------------------------ reasoning that was dropped

    def _restore_reasoning(
        self, chat: Renderings, turns: Sequence[ChatTurn], dropped_turns: Mapping[int, ChatTurn]
    ) -> tuple[str, list[ChatTurn]]:
        """Insert the reasoning that the template dropped into the rendering.

        Args:
            turns: Turns whose positions are adjusted.
            dropped_turns: Message index -> turn of an answer with dropped reasoning.

        Returns:
            The text with reasoning, and ``turns`` with their positions in it.
        """
        text, moved = chat.text, list(turns)
        for index, turn in sorted(dropped_turns.items(), reverse=True):  # from the end, so that earlier places stay
            written = self._turn_with_reasoning(chat, index, text[turn.start : turn.end])
            text = text[: turn.start] + written + text[turn.end :]
            longer = len(written) - (turn.end - turn.start)
            # A turn after the restored turn moves as a whole; of an overlapping turn only the end moves.
            moved = [
                ChatTurn(
                    each.start + longer if each.start >= turn.end else each.start,
                    each.end + longer if each.end > turn.start else each.end,
                )
                for each in moved
            ]
        return text, moved

    def _turn_with_reasoning(self, chat: Renderings, index: int, printed: str) -> str:
        """Return the text of a turn with its reasoning, as printed in a conversation that ends with this turn."""
        reasoning, before = reasoning_of(chat.messages[index]), chat.render_prompt(index)
        for messages in forms_as_last_answer(chat, index) if before is not None else ():
            through = chat.try_render(messages)
            if before is not None and through is not None and not through.startswith(before):
                before = _CLOSED_REASONING.sub("", before)  # the reasoning replaces an empty <think></think>
            if before is None or through is None or not through.startswith(before):
                continue
            start = self._find_turn_start(chat, index, len(before), through)
            turn = through[start:].rstrip()
            if turn.count(reasoning) > printed.count(reasoning):  # the answer itself may contain the same text
                token = next((token for token in self._special_tokens if printed.endswith(token)), "")
                # The last turn of a chat may end with another token than earlier turns.
                specials = list(self._special.finditer(turn))
                while token and specials and specials[-1].end() == len(turn):
                    turn = turn[: specials.pop().start()].rstrip()
                return turn + token if token else turn
        return f"<think>\n{reasoning}\n</think>\n\n{_NO_REASONING.sub('', printed).lstrip()}"


TextRanges = Sequence[tuple[int, int] | None]
"""[messages] range of characters of each message, from :meth:`Renderings.text_range`."""


def _require_printed_range(chat: Renderings, text_ranges: TextRanges, index: int) -> tuple[int, int]:
    """Return the range of characters that prints a message.

    Raises:
        DataError: The template does not print the message.
    """
    text_range = text_ranges[index]
    if text_range is None or text_range == (0, 0):
        raise chat.location_error(index, "does not print the text of the message")
    return text_range


def _check_no_overlap(chat: Renderings, text_ranges: TextRanges, index: int, turn: ChatTurn) -> None:
    """Check that the turn of a message does not overlap the text of another message.

    Raises:
        DataError: The turn overlaps another message, or the position of another message is unknown.
    """
    for other, foreign in enumerate(text_ranges):
        if other != index and (foreign is None or (foreign[0] < turn.end and turn.start < foreign[1])):
            raise chat.location_error(index, f"prints the message in one block with messages[{other}]")


def _is_last_of_exchange(messages: Sequence[Message], index: int) -> bool:
    following = messages[index + 1]["role"] if index + 1 < len(messages) else ""
    return following in ("user", "system", "developer")


def _join_turns(turns: Sequence[ChatTurn]) -> list[ChatTurn]:
    """Return turns sorted by position; turns that touch or overlap become one."""
    joined: list[ChatTurn] = []
    for turn in sorted((turn for turn in turns if turn.start < turn.end), key=lambda turn: turn.start):
        if joined and turn.start <= joined[-1].end:
            joined[-1] = ChatTurn(joined[-1].start, max(joined[-1].end, turn.end))
        else:
            joined.append(turn)
    return joined


_NEAR = 4096
"""Number of characters at the end of a prompt that are searched for ``<think>``, unless all are whitespace."""
_BLANKS = re.compile(r"\s*")
_CLOSED_REASONING = re.compile(r"<think>\s*</think>\s*\Z")
_NO_REASONING = re.compile(r"\A\s*<think>\s*</think>")


def _skip_blanks(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position
