"""From a row, or a prompt with its answers, to token ids and labels.

The text of a row is tokenised **once**, whole; its ids are what is trained on. What is trained is known as characters
of that text (see :mod:`streamtune.data.chat`) and carried over to tokens by the tokenizer's character offsets: a token
is trained if it holds a trained character. Tokenising pieces and gluing ids would be simpler and wrong: byte-pair
merges cross the borders of pieces.

A prompt with its answers becomes one trunk and the tokens of each answer that count. Every answer is tokenised **with
its prompt before it**, whole, as supervised training does: a conversation by the chat template, text as the plain joint
of both with the end token behind it. The tree's prompt is then the longest beginning that all of these have in common
and in which no token counts. So ``prompt + completion`` is, token for token, what the whole conversation renders to,
for any template and tokenizer, also at the border:

- A token that holds the end of the prompt and the start of an answer belongs to the answer and counts there.
- Where that token differs from answer to answer, or a template writes a prompt differently before different answers,
  the tokens that differ and do not count go with the completion, masked.

A token counts if it holds a character of an assistant's turn behind the prompt, its terminator included; the end token
behind a text counts. Messages of users and tools in an answer of several turns do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamtune.data.chat import ChatRenderer, ChatTurn
from streamtune.data.pieces import tokenise_text
from streamtune.data.renderings import require_template
from streamtune.data.rows import Content, Conversation, Document, PromptCompletion
from streamtune.errors import ArgumentError, DataError
from streamtune.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from typing import TYPE_CHECKING

from streamtune.data.preferences import Answers
from streamtune.data.records import Tree
from streamtune.data.renderings import check_unicode, render_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TRAIN_ON", "PromptRenderer", "Rendered", "RowRenderer", "TreeRenderer"]

TRAIN_ON = ("assistant", "completion", "all")
"""``assistant``: every assistant turn; ``completion``: the last one; ``all``: every token of a row."""


_NO_END = "the tokenizer has no end token: rows end without one and the model does not learn to stop"


@dataclass(frozen=True)
class Rendered:
    """Token ids of a row and their labels: the id itself where it is trained on, ``IGNORE_INDEX`` elsewhere.

    Labels are not shifted. The first token is never trained on: nothing comes before it to predict it from.
    """

    input_ids: Sequence[int]
    labels: Sequence[int]


class RowRenderer:
    """Renders normalised rows to token ids and labels.

    Args:
        tokenizer: The model's tokenizer, with its chat template.
        train_on: One of :data:`TRAIN_ON`.
        notify: Called once with each thing a user should know.

    Raises:
        ArgumentError: ``train_on`` is none of the three.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, train_on: str, notify: Callable[[str], None]) -> None:
        if train_on not in TRAIN_ON:
            raise ArgumentError(f"train_on is '{train_on}'", where="train_on", mend=f"use {', '.join(TRAIN_ON)}")
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._notify = notify
        self._noted: set[str] = set()
        self._chat = ChatRenderer(tokenizer)

    def __call__(self, content: Content, origin: str) -> Rendered:
        """Render one row.

        Raises:
            DataError: The row cannot be rendered, or has no token to train on.
        """
        if isinstance(content, Conversation):
            rendered = self._conversation(content, origin)
        elif isinstance(content, PromptCompletion):
            rendered = self._completion(content, origin)
        else:
            rendered = self._document(content, origin)
        if all(label == IGNORE_INDEX for label in rendered.labels):
            raise DataError(
                "no token of the row is trained on",
                where=origin,
                mend="give it an answer or remove it; train_on: all trains on every token",
            )
        return rendered

    def _conversation(self, content: Conversation, origin: str) -> Rendered:
        require_template(self._tokenizer, "row", origin)
        trained = self._trained_messages(content)
        if self._train_on != "all" and not trained:
            raise DataError("no assistant message of the row is trained on", where=origin, mend="remove the row")
        chat = self._chat.render(content.messages, content.tools, trained, origin)
        if not chat.ends:
            self._note("the chat template ends answers without a special token: the model does not learn where to stop")
        # As apply_chat_template does: the template has written the special tokens already.
        encoding = self._tokenizer(chat.text, add_special_tokens=False, **self._tokenizer_options())
        ids, turns = list(encoding["input_ids"]), chat.turns
        if self._train_on == "all":
            return Rendered(ids, _labels(ids, [True] * len(ids)))
        return Rendered(ids, _labels(ids, self._cover(chat.text, ids, encoding.get("offset_mapping"), turns, origin)))

    def _trained_messages(self, content: Conversation) -> list[int]:
        """Return the indices of the assistant messages that are trained on."""
        answers = [
            index
            for index, message in enumerate(content.messages)
            if message["role"] == "assistant" and index >= content.first_answer and message.get("weight", 1)
        ]
        if self._train_on == "completion" and content.first_answer == 0:
            return answers[-1:]
        return [] if self._train_on == "all" else answers

    def _completion(self, content: PromptCompletion, origin: str) -> Rendered:
        text = content.prompt + content.completion
        encoding = self._tokenizer(text, **self._tokenizer_options())
        ids = list(encoding["input_ids"])
        if self._train_on == "all":
            trained = [True] * len(ids)
        else:
            turn = ChatTurn(len(content.prompt), len(text))
            trained = self._cover(text, ids, encoding.get("offset_mapping"), [turn], origin, special=True)
        return self._ended(ids, trained)

    def _document(self, content: Document, origin: str) -> Rendered:
        ids = tokenise_text(self._tokenizer, content.text)
        if not ids:
            raise DataError("the tokenizer makes no token of the text", where=origin, mend="remove the row")
        end = self._tokenizer.eos_token_id
        if end is None:
            self._note(_NO_END)
        elif ids[-1] != end:
            ids.append(end)
        labels = ids[:]
        labels[0] = IGNORE_INDEX
        return Rendered(ids, labels)

    def _ended(self, ids: list[int], trained: list[bool]) -> Rendered:
        """Return the tokens with labels, the end token behind them and trained on."""
        end = self._tokenizer.eos_token_id
        if end is None:
            self._note(_NO_END)
        elif ids and ids[-1] == end:
            trained = [*trained[:-1], True]  # the tokenizer puts its own
        else:
            ids, trained = [*ids, end], [*trained, True]
        return Rendered(ids, _labels(ids, trained))

    def _tokenizer_options(self) -> dict[str, Any]:
        # verbose=False: a row longer than the model's own limit is what this program is for
        return {"return_offsets_mapping": bool(self._tokenizer.is_fast), "verbose": False}

    def _cover(
        self,
        text: str,
        ids: list[int],
        offsets: Sequence[tuple[int, int]] | None,
        turns: Sequence[ChatTurn],
        origin: str,
        *,
        special: bool = False,
    ) -> list[bool]:
        """Return for each token True if it holds a character of ``turns``."""
        if offsets is not None:
            extents = _extents(text, offsets, lambda: list(self._tokenizer.convert_ids_to_tokens(ids)))
            return _cover_by_offsets(extents, turns)
        return self._cover_by_prefixes(text, ids, turns, origin, special)

    def _cover_by_prefixes(
        self, text: str, ids: list[int], turns: Sequence[ChatTurn], origin: str, special: bool
    ) -> list[bool]:
        """Do as :meth:`_cover` without offsets, for tokenizers in pure Python.

        The text up to the border of a turn must give a prefix of the ids.

        Raises:
            DataError: A token crosses a border.
        """
        trained = [False] * len(ids)
        for turn in turns:
            borders = []
            for border in (turn.start, turn.end):
                prefix = list(self._tokenizer(text[:border], add_special_tokens=special, verbose=False)["input_ids"])
                if ids[: len(prefix)] != prefix:
                    raise DataError(
                        "a token crosses the border of an answer, and this tokenizer gives no character offsets",
                        where=origin,
                        mend="use a fast tokenizer (tokenizer.json)",
                    )
                borders.append(len(prefix))
            trained[borders[0] : borders[1]] = [True] * (borders[1] - borders[0])
        return trained

    def _note(self, message: str) -> None:
        if message not in self._noted:
            self._noted.add(message)
            self._notify(message)


def _labels(ids: Sequence[int], trained: Sequence[bool]) -> list[int]:
    labels = [token if train else IGNORE_INDEX for token, train in zip(ids, trained, strict=True)]
    labels[:1] = [IGNORE_INDEX] * len(labels[:1])
    return labels


def _cover_by_offsets(extents: Sequence[tuple[int, int]], turns: Sequence[ChatTurn]) -> list[bool]:
    """Return for each token True if it holds a character of ``turns``; tokens and turns are both in order."""
    trained = [False] * len(extents)
    position = 0
    for index, (start, end) in enumerate(extents):
        while position < len(turns) and turns[position].end <= start:
            position += 1
        if position == len(turns):
            break
        trained[index] = start < end and turns[position].start < end
    return trained


def _extents(
    text: str, offsets: Sequence[tuple[int, int]], pieces: Callable[[], list[str]]
) -> Sequence[tuple[int, int]]:
    """Return the characters each token stands for, including blanks that ``offsets`` leave out.

    Byte-level tokenizers like GPT-2's and Llama 3's (``trim_offsets``) report a token without the blanks at its ends.
    Blanks that no token claims belong to the token before them as far as its piece ends with blanks (``Ġ``), the rest
    to the token after them. A token the tokenizer added itself stands for no character.

    Args:
        text: The text that was tokenised.
        offsets: Start and end (exclusive) of each token as the tokenizer reports them.
        pieces: Returns the tokens as the vocabulary writes them; called only where blanks are left out.
    """
    extents = [*offsets, (len(text), len(text))]  # the end stands for one more token: blanks may come before it
    names: list[str] | None = None
    covered = 0  # characters before this one belong to a token already seen
    for index, (start, end) in enumerate(tuple(extents)):
        if covered < start and text[covered:start].isspace():
            names = names or pieces()
            if index and covered == extents[index - 1][1]:
                covered += min(_unclaimed_blanks(names[index - 1], extents[index - 1]), start - covered)
                extents[index - 1] = (extents[index - 1][0], covered)
            extents[index] = (covered, end)
        covered = max(covered, end)
    return extents[:-1]


def _unclaimed_blanks(piece: str, extent: tuple[int, int]) -> int:
    """Return the number of blanks at the end of a token's piece that its extent does not cover yet."""
    blanks = len(piece) - len(piece.rstrip("Ġ"))
    return blanks - (extent[1] - extent[0]) if blanks == len(piece) else blanks


class TreeRenderer:
    """Renders prompts with their answers to trees.

    Args:
        tokenizer: The model's tokenizer, with its chat template.
        notify: Called once with each thing a user should know.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, notify: Callable[[str], None]) -> None:
        self._render = RowRenderer(tokenizer, train_on="assistant", notify=notify)

    def __call__(self, answers: Answers, origin: str) -> Tree:
        """Render one prompt and its answers.

        Raises:
            DataError: A row cannot be rendered, an answer has no token that counts, or the prompt has no token.
        """
        rendered = [self._render(content, origin) for content in answers.contents]
        ids = [row.input_ids for row in rendered]
        counted = [[label != IGNORE_INDEX for label in row.labels] for row in rendered]
        start = min(_common_beginning(ids), *(mask.index(True) for mask in counted))
        if start == 0:
            raise DataError(
                "the prompt has no token that all its answers share, so nothing predicts their first token",
                where=origin,
                mend="give the row a prompt, or use a tokenizer that begins texts with a token",
            )
        masks = [mask[start:] for mask in counted]
        return Tree(
            prompt=list(ids[0][:start]),
            completions=[list(row[start:]) for row in ids],
            masks=None if all(map(all, masks)) else masks,
            origin=origin,
            labels=None if answers.labels is None else list(answers.labels),
            margin=answers.margin,
        )


def _common_beginning(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of items in the common beginning of all rows."""
    shortest = min(map(len, rows))
    return next((index for index in range(shortest) if len({row[index] for row in rows}) > 1), shortest)


class PromptRenderer:
    """Renders prompts: messages by the chat template with its generation prompt, text as it is.

    A text is tokenised by itself, with what the tokenizer puts in front of texts but without the end token that some
    put behind them: after an end there is nothing to write.

    Args:
        tokenizer: The model's tokenizer, with its chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, prompt: str | list[dict[str, Any]], tools: Any, origin: str) -> list[int]:
        """Render one prompt.

        Raises:
            DataError: There is no chat template for messages, it refuses them, or the prompt has no token.
        """
        ids = self._text(prompt) if isinstance(prompt, str) else self._messages(prompt, tools, origin)
        if not ids:
            raise DataError("the tokenizer makes no token of the prompt", where=origin, mend="remove the row")
        return ids

    def _text(self, prompt: str) -> list[int]:
        ids = list(self._tokenizer(prompt, verbose=False)["input_ids"])
        end = self._tokenizer.eos_token
        if end is not None and ids and ids[-1] == self._tokenizer.eos_token_id and not prompt.endswith(end):
            ids.pop()
        return ids

    def _messages(self, messages: list[dict[str, Any]], tools: Any, origin: str) -> list[int]:
        require_template(self._tokenizer, "prompt", origin)
        text = check_unicode(render_messages(self._tokenizer, messages, tools, origin, generation=True), origin)
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
