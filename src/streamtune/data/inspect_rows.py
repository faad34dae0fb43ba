"""Show prepared rows as text, with trained, masked and special tokens marked; find the tokens that end answers.

The whole row is decoded at once, and its text is cut between tokens, so that the parts join to the text of the row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.fit import Prepared
from streamtune.data.image_files import ImageFile
from streamtune.data.options import ChatOptions
from streamtune.data.record_table import Example, Prompt, Record, Tree
from streamtune.data.rendering.chat_variants import common_prefix_length
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.row_types import Conversation
from streamtune.errors import StreamTuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEFORE, AFTER = 12, 28
"""Number of tokens shown before and after each place where masked tokens meet trained tokens."""
ENDS = 32
"""Number of tokens shown at each end of a long row."""
MOST_UNFINISHED = 8
"""Maximum number of tokens that form one character: UTF-8 takes up to four bytes, an emoji several characters."""
NEAR = 24
"""Maximum length in tokens of a gap that is shown, because a note about the gap would be as long."""


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens that are all trained or all masked, and all special or all ordinary."""

    text: str
    tokens: int
    trained: bool
    """True if the tokens have a label, False if they are masked"""
    special: bool


@dataclass(frozen=True)
class TokenGap:
    """Consecutive tokens of a long row that are not shown."""

    tokens: int
    trained: int
    """number of these tokens that have a label"""


@dataclass(frozen=True)
class RowPart:
    """A whole row, or only its prompt, or one of its completions."""

    name: str
    """``row``, ``prompt``, ``chosen``, ``rejected``, ``desirable`` or ``undesirable``"""
    input_ids: list[int]
    """[T] token ids"""
    trained: npt.NDArray[np.bool_]
    """[T] True for tokens that count in the loss"""


@dataclass(frozen=True)
class RowView:
    """One record of the prepared data, with its number, its file and line, and its text as token ids."""

    number: int
    """number of the record, counted from 1 in the order of reading"""
    origin: str
    """file and line of the row, ``file:line`` or ``file:row N``"""
    source: int
    """index of the dataset in the recipe"""
    held_out: bool
    lost: int
    """number of tokens that truncation cut off"""
    parts: list[RowPart]
    """the row, or its prompt and completions"""
    images: tuple[ImageFile, ...] = ()
    """images in the order of their tokens"""

    @property
    def num_tokens(self) -> int:
        return sum(len(part.input_ids) for part in self.parts)

    @property
    def num_trained(self) -> int:
        return sum(int(part.trained.sum()) for part in self.parts)


class RowInspector:
    """Shows records of prepared data as text, and finds records that are long, truncated, or have few trained tokens.

    Args:
        prepared: Prepared data; its records stay on disk.
        kinds: Names of the two kinds of completions: chosen and rejected, or desirable and undesirable.
    """

    def __init__(
        self,
        prepared: Prepared[Any, Any],
        tokenizer: PreTrainedTokenizerBase,
        kinds: tuple[str, str] = ("chosen", "rejected"),
    ) -> None:
        self.measured, self.tokenizer, self.kinds = prepared.measured, tokenizer, kinds
        self.records = prepared.training.all_records()
        self.held_out = np.zeros(len(self.records), dtype=np.bool_)
        self.held_out[prepared.validation.table_indices()] = True
        self.special_ids = _special_ids(tokenizer)

    def __len__(self) -> int:
        return len(self.records)

    def get_view(self, number: int) -> RowView:
        """Return the record with this number, counted from 1 in the order of reading."""
        place, record = number - 1, self.records[number - 1]
        return RowView(
            number=number,
            origin=record.origin,
            source=int(np.searchsorted(self.measured.starts, place, side="right")) - 1,
            held_out=bool(self.held_out[place]),
            lost=int(self.measured.lost[place]),
            parts=_make_parts(record, self.kinds),
            images=tuple(map(ImageFile.parse, record.images)),
        )

    def record_numbers(self, origin: str) -> list[int]:
        """Return the numbers, counted from 1, of the records of the row at ``origin``, such as ``file:line``."""
        return [place + 1 for place in self.records.positions_of(origin)]

    def evenly_spaced(self, count: int) -> list[int]:
        """Return ``count`` evenly spaced record numbers, counted from 1; the first record is included."""
        count = min(count, len(self))
        return [1 + index * len(self) // count for index in range(count)]

    def most_extreme_records(self, count: int) -> list[tuple[str, int]]:
        """Return the ``count`` longest, most truncated and least trained records, each once, as (reasons, number).

        The least trained records have the smallest fraction of tokens with a label.
        """
        lengths = self.records.lengths()
        share = self.measured.trained / lengths
        ranked = [("longest", np.argsort(-(lengths + self.measured.lost), kind="stable")[:count])]
        if self.measured.trained.any():
            ranked.append(("least trained", np.argsort(share, kind="stable")[:count]))
        cut = np.argsort(-self.measured.lost, kind="stable")[:count]
        ranked.append(("most truncated", cut[self.measured.lost[cut] > 0]))
        reasons: dict[int, list[str]] = {}
        for reason, places in ranked:
            for place in places:
                reasons.setdefault(int(place) + 1, []).append(reason)
        return [(", ".join(found), number) for number, found in reasons.items()]

    def token_runs(self, part: RowPart, max_tokens: int | None = None) -> list[TokenRun | TokenGap]:
        """Return the text of a part as runs of tokens that are all trained or all masked, and all special or all
        ordinary.

        Args:
            max_tokens: Number of tokens above which some are left out, as :class:`TokenGap`; None shows all tokens.
        """
        shown: list[TokenRun | TokenGap] = []
        stop = 0
        for start, end in ranges_to_show(part.trained, max_tokens):
            if start > stop:
                shown.append(_make_token_gap(part, stop, start))
            shown += self._split_into_runs(part.input_ids[start:end], part.trained[start:end])
            stop = end
        if stop < len(part.input_ids):
            shown.append(_make_token_gap(part, stop, len(part.input_ids)))
        return shown

    def _split_into_runs(self, ids: list[int], trained: npt.NDArray[np.bool_]) -> list[TokenRun]:
        kinds = np.array([token in self.special_ids for token in ids], dtype=np.int8) * 2 + trained
        bounds = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(ids)] if ids else []
        starts = [0, *bounds]
        return [
            TokenRun(text, bound - start, trained=bool(kinds[start] & 1), special=bool(kinds[start] & 2))
            for text, start, bound in zip(decode_parts(self.tokenizer, ids, bounds), starts, bounds, strict=False)
        ]

    def token_texts(self, part: RowPart) -> list[str]:
        """Return the text of each token. A character made of several tokens is the text of the last of these tokens."""
        return decode_parts(self.tokenizer, part.input_ids, range(1, len(part.input_ids) + 1))


_REPEATED = re.compile(r"([<\[].{1,63}?)\1{7,}", re.DOTALL)


def shorten_repeats(text: str) -> str:
    """Return a text of special tokens in which a token that is repeated, such as an image's, is shown once.

    Example:
        >>> shorten_repeats("<|vision_start|>" + "<|image_pad|>" * 64)
        '<|vision_start|><|image_pad|>(64 times)'
    """
    return _REPEATED.sub(lambda found: f"{found[1]}({len(found[0]) // len(found[1])} times)", text)


def decode_parts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], bounds: Sequence[int]) -> list[str]:
    """Return the decoded text of each part of ``ids``. Joined, the texts are the text of all ids.

    Args:
        bounds: Index of the token after each part, ascending; the last is ``len(ids)``.
    """
    full_text = _decode(tokenizer, ids)
    parts: list[str] = []
    start = offset = end = 0  # a token that begins a character, its position in the text, and the end of the parts
    unfinished = 0
    for bound in bounds:
        if bound == len(ids):
            parts.append(full_text[end:])
            break
        text = _decode(tokenizer, ids[start:bound])
        rest = full_text[offset : offset + len(text) + 1]
        # A decoder may drop a leading blank.
        skipped = int(rest.startswith(" ") and not text.startswith(" "))
        shared = common_prefix_length(text, rest[skipped : skipped + len(text)])
        stop = max(end, offset + skipped + shared) if text else end
        parts.append(full_text[end:stop])
        end = stop
        unfinished = 0 if shared == len(text) else unfinished + 1
        if unfinished in (0, MOST_UNFINISHED):  # some decoders change earlier text: do not wait for them forever
            start, offset, unfinished = bound, stop, 0
    return parts


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "a list of token ids must decode to one string"
    return text


def ranges_to_show(trained: npt.NDArray[np.bool_], max_tokens: int | None) -> list[tuple[int, int]]:
    """Return the token ranges (start, stop) of a row to show: its two ends, and places where masked meet trained
    tokens.

    Args:
        trained: [T] True for trained tokens.
        max_tokens: Approximate number of tokens to show; None shows all.
    """
    size = len(trained)
    if not size:
        return []
    if max_tokens is None or size <= max_tokens:
        return [(0, size)]
    borders = (np.flatnonzero(np.diff(trained.astype(np.int8))) + 1).tolist()
    # From both ends inwards: a wrong chat template often masks the first or the last turn wrongly.
    inwards = [borders[index // 2] if index % 2 == 0 else borders[-1 - index // 2] for index in range(len(borders))]
    shown = np.zeros(size, dtype=np.bool_)
    shown[:ENDS] = shown[-ENDS:] = True
    for border in inwards:
        if int(shown.sum()) + BEFORE + AFTER > max_tokens:
            break
        shown[max(0, border - BEFORE) : border + AFTER] = True
    ranges: list[tuple[int, int]] = []
    for start, stop in _true_ranges(shown):
        if ranges and start - ranges[-1][1] <= NEAR:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


def _true_ranges(mask: npt.NDArray[np.bool_]) -> list[list[int]]:
    ranges: list[list[int]] = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()
    return ranges


def _make_token_gap(part: RowPart, start: int, stop: int) -> TokenGap:
    return TokenGap(stop - start, int(part.trained[start:stop].sum()))


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> Collection[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}


def _make_parts(record: Record, kinds: tuple[str, str]) -> list[RowPart]:
    if isinstance(record, Example):
        return [_make_part("row", record.input_ids, np.asarray(record.labels) != IGNORE_INDEX)]
    if isinstance(record, Prompt):
        return [_make_part("prompt", record.input_ids, False)]
    assert isinstance(record, Tree)
    parts = [_make_part("prompt", record.prompt, False)]
    for index, completion in enumerate(record.completions):
        first = record.labels[index] if record.labels is not None else index == 0
        counted = True if record.masks is None else np.array(record.masks[index], dtype=np.bool_)
        parts.append(_make_part(kinds[0] if first else kinds[1], completion, counted))
    return parts


def _make_part(name: str, ids: Any, trained: npt.NDArray[np.bool_] | bool) -> RowPart:
    array = np.asarray(ids, dtype=np.int64)
    return RowPart(name, array.tolist(), np.broadcast_to(np.asarray(trained, dtype=np.bool_), array.shape))


# ------------------------------------------------------------------------------------------------------ ends of answers

MOST_ENDS_ROWS = 512
"""Maximum number of rows to search for end tokens, evenly spaced."""
MOST_ENDS_TOKENS = 1 << 24
"""Number of tokens after which the search for end tokens stops."""

_EXCHANGE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"})


def trained_end_tokens(rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase, chat: ChatOptions) -> list[int]:
    """Return the ids of the tokens that end answers or texts in the training data, most frequent first.

    Generation must stop at these tokens. A base model ends texts with one token (``<|endoftext|>``), a chat template
    ends turns with another (``<|im_end|>``). The list is empty if no such token has a label.

    An added or special token is an end token if a run of tokens with labels ends with it, and no run contains it
    inside. The token that the chat template prints after the last answer is an end token if it has a label anywhere, or
    if no row shows an end token. A token that the template prints only after earlier answers is not an end token:
    gpt-oss closes its reasoning with such a token.

    Args:
        rows: Examples, trees or prompts to train on.
        chat: Options for rendering; with ``train_on_eos: none`` no end token has a label.
    """
    if chat.train_on_eos == "none":
        return []
    candidates = _end_token_candidates(tokenizer)
    last: Counter[int] = Counter()
    inside: set[int] = set()
    for run in _trained_runs(rows):
        last[int(run[-1])] += 1
        inside.update(np.intersect1d(run[:-1], candidates).tolist())
    last_end_token, earlier_end_token = _template_end_tokens(tokenizer, chat)
    last_end_token = last_end_token if last_end_token in candidates else None
    ends = [token for token, _ in last.most_common() if token in candidates]
    found = [token for token in ends if token == last_end_token or token not in {*inside, earlier_end_token}]
    if last_end_token is not None and last_end_token not in found and (last_end_token in inside or not ends):
        found.append(last_end_token)
    return found


def _end_token_candidates(tokenizer: PreTrainedTokenizerBase) -> np.ndarray[Any, Any]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return np.array(sorted({*added, *tokenizer.all_special_ids}), dtype=np.int64)


def _template_end_tokens(tokenizer: PreTrainedTokenizerBase, chat: ChatOptions) -> tuple[int | None, int | None]:
    """Render a short chat; return the ids of the tokens that end its last and its first answer, None if unknown."""
    options = replace(chat, roles_to_train=("assistant",), train_on_eos="turn", reasoning="template")
    render = RowRenderer(tokenizer, train_on="assistant", notify=lambda message: None, chat=options)
    for exchanges in (2, 1) if tokenizer.chat_template else ():
        with suppress(StreamTuneError):  # some templates allow only one exchange
            row = render(Conversation([dict(message) for message in _EXCHANGE * exchanges]), "the chat template")
            runs = list(_trained_runs_of_row(np.asarray(row.input_ids), np.asarray(row.labels) != IGNORE_INDEX))
            return int(runs[-1][-1]), int(runs[0][-1])
    return None, None


def _trained_runs(rows: Sequence[Any]) -> Iterator[np.ndarray[Any, Any]]:
    searched_tokens = 0
    for place in (
        np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_ENDS_ROWS)).astype(int)) if len(rows) else ()
    ):
        if searched_tokens > MOST_ENDS_TOKENS:
            return
        row = rows[int(place)]
        if isinstance(row, Example):
            searched_tokens += len(row.input_ids)
            yield from _trained_runs_of_row(np.asarray(row.input_ids), np.asarray(row.labels) != IGNORE_INDEX)
        elif isinstance(row, Tree):
            for number, completion in enumerate(row.completions):
                searched_tokens += len(completion)
                counted = np.ones(len(completion), bool) if row.masks is None else np.asarray(row.masks[number], bool)
                yield from _trained_runs_of_row(np.asarray(completion), counted)


def _trained_runs_of_row(ids: np.ndarray[Any, Any], trained: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    for start, stop in _true_ranges(trained):
        yield ids[start:stop]
