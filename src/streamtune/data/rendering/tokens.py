"""Convert the text of a row and its characters to train on to token ids and labels.

A token has a label if it contains a character to train on. A text is tokenised whole, or in parts that give the same
ids (:mod:`streamtune.data.rendering.long_text`). Ids and labels of 32 bits keep a long row small.

Character offsets of tokens are slow: on a short row they take longer than all other work. Often they are not needed. If
the concatenated bytes of the tokens equal the bytes of the text, the byte lengths of the tokens give their positions
(:class:`ByteSpeller`). This is compared for every text. So the result is correct even if a tokenizer changes the text
or adds tokens around it.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.options import SPLIT_AT, RowPolicy
from streamtune.data.rendering.chat import ChatTurn
from streamtune.data.rendering.long_text import LongTextTokenizer, TextPart, tokenizer_component_steps
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STOP = 1 << 22
"""Tokenising a row stops if the row is already too long to be used and more than this many characters are left."""

_LIKELY = 3
"""Number of characters per token of ``max_length`` above which a text is probably too long."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rendered:
    """Token ids and labels of a row. The label of a token that counts in the loss is its id; other labels are -100.

    Labels are not shifted. The first token has label -100, because no token predicts it.
    """

    input_ids: Sequence[int]
    """[T] token ids"""
    labels: Sequence[int]
    """[T] token id, or -100 for a token that does not count in the loss"""
    breaks: npt.NDArray[np.uint8] | None = None
    """[T] kind of border before each token, as an index of :data:`SPLIT_AT`; None if rows are not split at borders"""
    prefix: int = 0
    """number of tokens at the start, such as BOS or a system message, that truncation on the left keeps"""
    has_answer: bool = False
    """True if the tokens with labels are answers to a prompt"""
    system: int | None = None
    """number of tokens of the system message at the start, 0 if it is not printed separately; None without system
    message or truncation on the left"""
    estimated: int | None = None
    """estimated number of tokens of a row of which only a part was tokenised; None for other rows"""
    trained_share: float = 1.0
    """fraction of the characters to train on"""
    weight: float = 1.0
    """factor of the row's loss"""
    images: tuple[str, ...] = ()
    """files of the row's images, in order (:class:`streamtune.data.image_files.ImageFile`)"""


@dataclass(frozen=True)
class TextTokens:
    """Token ids of a text, with masks. Fields without a description are as in :class:`Rendered`."""

    ids: MutableSequence[int]
    """[T] token ids of 32 bits"""
    trained: Mask
    """[T] True for tokens that count in the loss"""
    breaks: npt.NDArray[np.uint8] | None = None
    prefix: int = 0
    """number of tokens at the start that truncation on the left keeps"""
    estimated: int | None = None
    trained_share: float = 1.0
    crosses_border: bool = False
    """True if a token crosses :attr:`MarkedText.border`"""

    def labels(self) -> MutableSequence[int]:
        """Return [T]: the id of each token that counts in the loss, -100 for other tokens and for the first token."""
        found = array("i", self.ids)
        if found:
            np.frombuffer(found, dtype=np.int32)[~self.trained] = IGNORE_INDEX
            found[0] = IGNORE_INDEX
        return found

    def without_first_token(self) -> TextTokens:
        breaks = None if self.breaks is None else self.breaks[1:]
        return replace(self, ids=self.ids[1:], trained=self.trained[1:], breaks=breaks, prefix=max(0, self.prefix - 1))

    def with_end_token(self, end: int) -> TextTokens:
        """Return the tokens with ``end`` as the last token, which counts in the loss; append it unless it is there."""
        if self.ids and self.ids[-1] == end:
            self.trained[-1] = True
            return self
        self.ids.append(end)
        breaks = None if self.breaks is None else np.append(self.breaks, np.uint8(0))
        return replace(self, trained=np.append(self.trained, True), breaks=breaks)


@dataclass(frozen=True)
class MarkedText:
    """A text to tokenise, with the character positions of its parts to train on and of places to split it."""

    text: str
    turns: Sequence[ChatTurn] | None
    """ranges of characters to train on, in order; None trains on all tokens"""
    origin: str
    """file and line of the row, for errors"""
    _: KW_ONLY
    add_special_tokens: bool
    """True adds the tokens that the tokenizer puts around a text, such as BOS"""
    exchanges: Sequence[int] = ()
    """positions at which a user or system message follows an answer, in order"""
    prefix: int = 0
    """number of characters at the start that truncation on the left keeps"""
    border: int | None = None
    """position for which :attr:`TextTokens.crosses_border` reports whether a token crosses it"""


class MaskTokenizer:
    """Tokenises texts of any length, and finds the tokens that contain characters to train on.

    Args:
        policy: Maximum length of rows, and options for longer rows; None does not limit the length.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        policy: RowPolicy | None = None,
        note: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._tokenizer, self._policy, self._note = tokenizer, policy, note
        self._long_text = LongTextTokenizer(tokenizer, note)
        self._speller = ByteSpeller(tokenizer.backend_tokenizer) if tokenizer.is_fast else None

    def __call__(self, marked: MarkedText) -> TextTokens:
        max_length = self._policy.max_length if self._policy is not None and self._policy.splits_at_borders else None
        # Borders need offsets, which are slow: request them at once only if the row is probably too long.
        breaks = max_length is not None and bool(self._tokenizer.is_fast) and len(marked.text) > _LIKELY * max_length
        found = self._tokenise_parts(marked, breaks=breaks)
        if max_length is None or breaks or len(found.ids) <= max_length:
            return found
        if not self._tokenizer.is_fast:
            self._note("split_at is ignored and rows are split at any token, because this tokenizer reports no offsets")
            return found
        return self._tokenise_parts(marked, breaks=True)

    def _tokenise_parts(self, marked: MarkedText, *, breaks: bool) -> TextTokens:
        text, turns, add_special_tokens = marked.text, marked.turns, marked.add_special_tokens
        needs_offsets = breaks or marked.prefix > 0 or marked.border is not None
        offsets = bool(self._tokenizer.is_fast) and (bool(turns) or needs_offsets)
        parts = self._long_text.iter_parts(text, add_special_tokens=add_special_tokens, offsets=offsets)
        first = next(parts)
        reader = _PartReader(self._tokenizer, marked, None if needs_offsets else self._speller)
        if first.stop == len(text):
            trained = reader.read_mask(first) if offsets or not turns else self._mask_by_prefixes(marked, first)
            found = reader.read_breaks(first) if breaks else None
            return TextTokens(
                array("i", first.ids), trained, found, reader.prefix_tokens, crosses_border=reader.crosses_border
            )
        ids, mask, marks, estimated = array("i"), bytearray(), bytearray(), None
        for part in chain([first], parts):
            ids.extend(part.ids)
            mask += reader.read_mask(part).data
            if breaks:
                marks += reader.read_breaks(part).data
            if self._may_stop_early(len(ids), len(text) - part.stop):
                estimated = round(len(ids) / part.stop * len(text))
                break
        trained = np.frombuffer(mask, dtype=np.bool_)
        found = np.frombuffer(marks, dtype=np.uint8) if breaks else None
        share = 1.0 if turns is None else sum(turn.end - turn.start for turn in turns) / len(text)
        return TextTokens(ids, trained, found, reader.prefix_tokens, estimated, share, reader.crosses_border)

    def _may_stop_early(self, num_tokens: int, characters_left: int) -> bool:
        policy = self._policy
        return policy is not None and not policy.cuts_rows and num_tokens > policy.max_length and characters_left > STOP

    def ids(self, text: str, *, add_special_tokens: bool) -> MutableSequence[int]:
        return self._long_text.ids(text, add_special_tokens=add_special_tokens)

    def _mask_by_prefixes(self, marked: MarkedText, whole_text: TextPart) -> Mask:
        """Return [T]: True for tokens to train on, found with a Python tokenizer, which reports no character offsets.

        The text before each start and end of a turn is tokenised separately; its ids must be the first ids of the text.

        Raises:
            DataError: A token contains both characters of a turn and others.
        """
        ids = list(whole_text.ids)
        trained: Mask = np.zeros(len(ids), dtype=np.bool_)
        for turn in marked.turns or ():
            borders = []
            for border in (turn.start, turn.end):
                before = self._tokenizer(
                    marked.text[:border], add_special_tokens=marked.add_special_tokens, verbose=False
                )
                prefix = list(before["input_ids"])
                if ids[: len(prefix)] != prefix:
                    raise DataError(
                        "a token crosses the border of an answer, and this tokenizer reports no character offsets",
                        where=marked.origin,
                        fix="use a fast tokenizer (tokenizer.json)",
                    )
                borders.append(len(prefix))
            trained[borders[0] : borders[1]] = True
        return trained


class _PartReader:
    """Reads a text part by part, and finds the tokens to train on, the places to split, and the prefix's length."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marked: MarkedText, speller: ByteSpeller | None) -> None:
        self.tokenizer, self.text, self.turns, self.speller = tokenizer, marked.text, marked.turns, speller
        self.turn_starts = [turn.start for turn in marked.turns or ()]
        self.turn_ends = [turn.end for turn in marked.turns or ()]
        self.exchanges = marked.exchanges
        self.prefix, self.border = marked.prefix, marked.border
        self.prefix_tokens, self.crosses_border = 0, False
        self.pairs = np.empty((0, 2), dtype=np.int64)
        """[T, 2] character offsets of the tokens of the part that was read last"""

    def read_mask(self, part: TextPart) -> Mask:
        """Return [T]: True for the tokens to train on in the next part of the text."""
        if part.read_offsets is None:
            return np.full(len(part.ids), self.turns is None)
        if self.speller is not None:
            starts, ends = self._turn_bounds_in_part(part)
            spelled = self.speller.mask_spans(part.ids, self.text[part.start : part.stop], starts, ends)
            if spelled is not None:
                return spelled
        offsets = part.read_offsets()
        pairs = self.pairs = _offset_array(offsets)
        if self.border is not None:
            here = self.border - part.start
            self.crosses_border |= bool(((pairs[:, 0] < here) & (here < pairs[:, 1])).any())
        if self.prefix > part.start:
            self._count_prefix(part, pairs)
        if self.turns is None:
            return np.ones(len(part.ids), dtype=np.bool_)
        size = part.stop - part.start
        if not _covers_text(pairs, size):
            ids = part.ids
            names = lambda: list(self.tokenizer.convert_ids_to_tokens(ids))  # noqa: E731
            pairs = _offset_array(_extents_with_blanks(self.text[part.start : part.stop], offsets, names))
        return _make_mask(pairs, *self._turn_bounds_in_part(part))

    def _turn_bounds_in_part(self, part: TextPart) -> tuple[list[int], list[int]]:
        """Return starts and ends of the turns in a part, counted in characters from the start of the part."""
        near = slice(bisect_right(self.turn_ends, part.start), bisect_left(self.turn_starts, part.stop))
        starts = [max(start - part.start, 0) for start in self.turn_starts[near]]
        return starts, [min(end, part.stop) - part.start for end in self.turn_ends[near]]

    def _count_prefix(self, part: TextPart, pairs: npt.NDArray[np.int64]) -> None:
        """Add the part's tokens in the prefix to ``prefix_tokens``; set it to 0 if a token crosses the prefix's end."""
        here = self.prefix - part.start
        if here <= 0:
            return
        inside = int(np.count_nonzero(pairs[:, 0] < here))
        if not inside:
            return
        self.prefix_tokens += inside
        if pairs[inside - 1, 1] > here:  # the token crosses the end of the prefix, so the prefix cannot be kept alone
            self.prefix = self.prefix_tokens = 0

    def read_breaks(self, part: TextPart) -> npt.NDArray[np.uint8]:
        """Return [T]: strongest kind of border before each token of the part last passed to :meth:`read_mask`."""
        found: npt.NDArray[np.uint8] = np.zeros(len(part.ids), dtype=np.uint8)
        if part.start == part.stop:
            return found
        pairs = self.pairs
        non_empty = np.flatnonzero(pairs[:, 0] < pairs[:, 1])
        starts = pairs[non_empty, 0] + part.start
        for name, places in (
            ("line", _border_ranges(_LINE, self.text, part)),
            ("paragraph", _border_ranges(_PARAGRAPH, self.text, part)),
            ("turn", np.array([(place, place) for place in self.exchanges], dtype=np.int64).reshape(-1, 2)),
        ):
            first = np.searchsorted(starts, places[:, 0], "left")
            inside = first < len(starts)
            first, last = first[inside], places[inside, 1]
            found[non_empty[first[starts[first] <= last]]] = SPLIT_AT.index(name)
        return found


_LINE = re.compile(r"\n[^\S\n]*")
_PARAGRAPH = re.compile(r"\n(?:[^\S\n]*\n)+[^\S\n]*")


def _border_ranges(border: re.Pattern[str], text: str, part: TextPart) -> npt.NDArray[np.int64]:
    """Return [borders, 2]: first and last position at which the token after each line or paragraph break may start.

    The first position is after the last line break, the last position is after the indentation that follows.
    """

    def iter_positions() -> Iterator[int]:
        # A part may begin directly after a line break.
        for match in border.finditer(text, max(0, part.start - 1), part.stop):
            yield text.rindex("\n", match.start(), match.end()) + 1
            yield match.end()

    return np.fromiter(iter_positions(), np.int64).reshape(-1, 2)


def _make_mask(extents: npt.NDArray[np.int64], turn_starts: Any, turn_ends: Any) -> Mask:
    """Return [T]: True for each token that contains a character of a turn.

    Args:
        extents: [T, 2] start and end (exclusive) of each token in characters, ascending, except for empty tokens.
        turn_starts: [turns] first character of each turn, in order.
        turn_ends: [turns] end (exclusive) of each turn.
    """
    starts, ends = extents.T
    trained: Mask = np.zeros(len(extents), dtype=np.bool_)
    non_empty = np.flatnonzero(starts < ends)
    firsts = np.searchsorted(ends[non_empty], turn_starts, "right").tolist()
    lasts = np.searchsorted(starts[non_empty], turn_ends, "left").tolist()
    for first, last in zip(firsts, lasts, strict=True):
        trained[non_empty[first:last]] = True
    return trained


def _offset_array(offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)


def _covers_text(extents: npt.NDArray[np.int64], length: int) -> bool:
    borders = [0, *extents[-1:, 1]]
    return borders == [0, length] and extents[0, 0] == 0 and bool((extents[1:, 0] == extents[:-1, 1]).all())


def _extents_with_blanks(
    text: str, offsets: Sequence[tuple[int, int]], vocabulary_entries: Callable[[], list[str]]
) -> Sequence[tuple[int, int]]:
    """Return start and end of each token in characters, including spaces that ``offsets`` omit.

    Byte-level tokenizers such as GPT-2 and Llama 3 (``trim_offsets``) report a token without the spaces at its ends.
    Omitted spaces go to the token before them, as many as its vocabulary entry ends with (``Ġ``). The other spaces go
    to the token after them. Tokens that the tokenizer added, such as BOS, have no characters.

    Args:
        offsets: Start and end (exclusive) of each token, as the tokenizer reports them.
        vocabulary_entries: Function that returns each token's vocabulary entry; called only if spaces are omitted.
    """
    extents = [*offsets, (len(text), len(text))]  # a sentinel at the end of the text: blanks may precede it
    names: list[str] | None = None
    covered = 0  # characters before this one belong to a token already seen
    for index, (start, end) in enumerate(tuple(extents)):
        if covered < start and text[covered:start].isspace():
            names = names or vocabulary_entries()
            if index and covered == extents[index - 1][1]:
                covered += min(_unclaimed_blanks(names[index - 1], extents[index - 1]), start - covered)
                extents[index - 1] = (extents[index - 1][0], covered)
            extents[index] = (covered, end)
        covered = max(covered, end)
    return extents[:-1]


def _unclaimed_blanks(vocabulary_entry: str, extent: tuple[int, int]) -> int:
    """Return the number of spaces at the end of a token's vocabulary entry that are not in its range of characters."""
    blanks = len(vocabulary_entry) - len(vocabulary_entry.rstrip("Ġ"))
    return blanks - (extent[1] - extent[0]) if blanks == len(vocabulary_entry) else blanks


# ------------------------------------------------------------------------------------------------ bytes of tokens


class ByteSpeller:
    """Finds the tokens that contain given characters by adding up the bytes of byte-level tokens, without offsets."""

    def __init__(self, backend: Any) -> None:
        parts = tokenizer_component_steps(backend.pre_tokenizer, "pretokenizers")
        self._bytes = _TokenBytes(backend) if any(part["type"] == "ByteLevel" for part in parts) else None

    def mask_spans(
        self, ids: Sequence[int], text: str, starts: Sequence[int], ends: Sequence[int]
    ) -> npt.NDArray[np.bool_] | None:
        """Return [T]: True for each token that contains a character of a span.

        Return None if the bytes of the tokens, joined, are not the bytes of the text.

        Args:
            ids: [T] token ids of the text.
            starts: [spans] first character of each span, in order.
            ends: [spans] end (exclusive) of each span; spans do not overlap.
        """
        if self._bytes is None:
            return None
        try:
            spelled = list(map(self._bytes.__getitem__, ids))
        except KeyError:
            return None
        if b"".join(spelled) != text.encode():
            return None
        borders = list(accumulate(map(len, spelled), initial=0))
        covered: npt.NDArray[np.bool_] = np.zeros(len(ids), dtype=np.bool_)
        places = _byte_positions(text, [place for span in zip(starts, ends, strict=True) for place in span])
        for start, end in zip(places[::2], places[1::2], strict=True):
            covered[bisect_right(borders, start) - 1 : bisect_left(borders, end)] = True
        return covered


def _byte_positions(text: str, character_positions: Sequence[int]) -> Sequence[int]:
    if text.isascii():
        return character_positions
    return list(accumulate(len(text[start:end].encode()) for start, end in pairwise([0, *character_positions])))


class _TokenBytes(dict[int, bytes]):
    """A dict from token id to the bytes of the token, filled at the first access, because a run uses few tokens.

    Raises:
        KeyError: A token has no bytes.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._name = backend.id_to_token
        self._added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}

    def __missing__(self, number: int) -> bytes:
        if number in self._added:
            spelled = self._added[number].encode()
        else:
            spelled = bytes(map(_BYTE_OF.__getitem__, self._name(number)))
        if not spelled:
            raise KeyError(number)
        self[number] = spelled
        return spelled


_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER = (byte for byte in range(0x100) if byte not in _PRINTED)
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(0x100 + place): byte for place, byte in enumerate(_OTHER)}
"""Character of a byte-level vocabulary -> its byte."""
