"""From the text of a row, and its trained characters, to token ids and labels.

A token is trained if it holds a trained character. Text is tokenised whole, or in pieces that are proven to give the
same ids (:mod:`streamtune.data.rendering.long_text`). Ids and labels of 32 bits keep a long row small.

A tokenizer can list the characters of every token, but that takes longer than all other work on a short row. If the
bytes of the tokens, concatenated, are the bytes of the text, each token holds exactly its own bytes, and their lengths
suffice (:class:`ByteSpeller`). The bytes are compared for every text, so a tokenizer that changes the text or puts
tokens around it is never misread.
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
from streamtune.data.rendering.long_text import PieceTokenizer, TokenPiece, component_parts
from streamtune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STOP = 1 << 22
"""Characters behind the limit from which a dropped or refused row is not tokenised to its end."""

_LIKELY = 3
"""Fewest characters of a token, as a rule: a text with fewer than this times the limit is likely short enough."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rendered:
    """Token ids of a row and their labels: the id if it is trained, else ``IGNORE_INDEX``.

    Labels are not shifted. The first token is never trained: nothing predicts it.
    """

    input_ids: Sequence[int]
    labels: Sequence[int]
    breaks: npt.NDArray[np.uint8] | None = None
    """[T] border before each token, as an index of :data:`SPLIT_AT`; None if rows are not split at borders"""
    head: int = 0
    """tokens at the start, such as a system message, that a cut on the left keeps"""
    has_answer: bool = False
    """True if answers are trained, and what comes before them is not"""
    system: int | None = None
    """tokens of the system message at the start, 0 if it does not stand by itself; None without it, or if rows are not
    cut on the left"""
    estimated: int | None = None
    """about the tokens of the row, if only its beginning was tokenised"""
    trained_share: float = 1.0
    """part of the characters that is trained"""
    weight: float = 1.0
    """factor of the loss of its tokens"""


@dataclass(frozen=True)
class TextTokens:
    """Tokens of a text; fields as in :class:`Rendered`."""

    ids: MutableSequence[int]
    """[T], 32 bits each"""
    trained: Mask
    """[T]"""
    breaks: npt.NDArray[np.uint8] | None = None
    head: int = 0
    """tokens of the head"""
    estimated: int | None = None
    trained_share: float = 1.0
    crosses: bool = False
    """True if a token holds characters on both sides of the border that was asked for"""

    def labels(self) -> MutableSequence[int]:
        """Return the labels: the ids of trained tokens; the first is not trained."""
        found = array("i", self.ids)
        if found:
            np.frombuffer(found, dtype=np.int32)[~self.trained] = IGNORE_INDEX
            found[0] = IGNORE_INDEX
        return found

    def without_first(self) -> TextTokens:
        breaks = None if self.breaks is None else self.breaks[1:]
        return replace(self, ids=self.ids[1:], trained=self.trained[1:], breaks=breaks, head=max(0, self.head - 1))

    def ended(self, end: int) -> TextTokens:
        """Return the tokens with a trained end token behind them, if the tokenizer has not put it there itself."""
        if self.ids and self.ids[-1] == end:
            self.trained[-1] = True
            return self
        self.ids.append(end)
        breaks = None if self.breaks is None else np.append(self.breaks, np.uint8(0))
        return replace(self, trained=np.append(self.trained, True), breaks=breaks)


@dataclass(frozen=True)
class MarkedText:
    """A text to tokenise, with the characters that matter."""

    text: str
    turns: Sequence[ChatTurn] | None
    """trained characters, in order; None trains all tokens"""
    origin: str
    """the row, for errors"""
    _: KW_ONLY
    special: bool
    """add the tokens that the tokenizer puts around a text"""
    exchanges: Sequence[int] = ()
    """characters where a new exchange of a chat begins, in order"""
    head: int = 0
    """characters of the head"""
    border: int | None = None
    """report if a token crosses this character"""


class MaskTokenizer:
    """Tokenises texts of any length, and finds the tokens of trained characters.

    Args:
        policy: The length of rows; without it no row is cut.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        policy: RowPolicy | None = None,
        note: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._tokenizer, self._policy, self._note = tokenizer, policy, note
        self._pieces = PieceTokenizer(tokenizer, note)
        self._speller = ByteSpeller(tokenizer.backend_tokenizer) if tokenizer.is_fast else None

    def __call__(self, asked: MarkedText) -> TextTokens:
        most = self._policy.max_length if self._policy is not None and self._policy.finds_breaks else None
        # Borders need offsets, which take time: so they are asked for where the row is likely to be too long.
        breaks = most is not None and bool(self._tokenizer.is_fast) and len(asked.text) > _LIKELY * most
        found = self._tokens(asked, breaks=breaks)
        if most is None or breaks or len(found.ids) <= most:
            return found
        if not self._tokenizer.is_fast:
            self._note("rows are split at tokens: this tokenizer gives no character offsets, which borders need")
            return found
        return self._tokens(asked, breaks=True)

    def _tokens(self, asked: MarkedText, *, breaks: bool) -> TextTokens:
        text, turns, special = asked.text, asked.turns, asked.special
        finds_places = breaks or asked.head > 0 or asked.border is not None
        offsets = bool(self._tokenizer.is_fast) and (bool(turns) or finds_places)
        pieces = self._pieces.pieces(text, special=special, offsets=offsets)
        first = next(pieces)
        read = _PieceReader(self._tokenizer, asked, None if finds_places else self._speller)
        if first.stop == len(text):
            trained = read.mask(first) if offsets or not turns else self._by_prefixes(asked, first)
            found = read.breaks(first) if breaks else None
            return TextTokens(array("i", first.ids), trained, found, read.head_tokens, crosses=read.crosses)
        ids, mask, marks, estimated = array("i"), bytearray(), bytearray(), None
        for piece in chain([first], pieces):
            ids.extend(piece.ids)
            mask += read.mask(piece).data
            if breaks:
                marks += read.breaks(piece).data
            if self._is_enough(len(ids), len(text) - piece.stop):
                estimated = round(len(ids) / piece.stop * len(text))
                break
        trained = np.frombuffer(mask, dtype=np.bool_)
        found = np.frombuffer(marks, dtype=np.uint8) if breaks else None
        share = 1.0 if turns is None else sum(turn.end - turn.start for turn in turns) / len(text)
        return TextTokens(ids, trained, found, read.head_tokens, estimated, share, read.crosses)

    def _is_enough(self, tokens: int, left: int) -> bool:
        policy = self._policy
        return policy is not None and not policy.needs_length and tokens > policy.max_length and left > STOP

    def ids(self, text: str, *, special: bool) -> MutableSequence[int]:
        return self._pieces.ids(text, special=special)

    def _by_prefixes(self, asked: MarkedText, whole: TokenPiece) -> Mask:
        """Return the trained tokens without offsets, for tokenizers in pure Python.

        The text up to the border of a turn must give a prefix of the ids.
        """
        ids = list(whole.ids)
        trained: Mask = np.zeros(len(ids), dtype=np.bool_)
        for turn in asked.turns or ():
            borders = []
            for border in (turn.start, turn.end):
                before = self._tokenizer(asked.text[:border], add_special_tokens=asked.special, verbose=False)
                prefix = list(before["input_ids"])
                if ids[: len(prefix)] != prefix:
                    raise DataError(
                        "a token crosses the border of an answer, and this tokenizer gives no character offsets",
                        where=asked.origin,
                        fix="use a fast tokenizer (tokenizer.json)",
                    )
                borders.append(len(prefix))
            trained[borders[0] : borders[1]] = True
        return trained


class _PieceReader:
    """Reads a text piece by piece: which tokens are trained, where borders fall, and how many tokens its head takes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, asked: MarkedText, speller: ByteSpeller | None) -> None:
        self.tokenizer, self.text, self.turns, self.speller = tokenizer, asked.text, asked.turns, speller
        self.turn_starts = [turn.start for turn in asked.turns or ()]
        self.turn_ends = [turn.end for turn in asked.turns or ()]
        self.exchanges = asked.exchanges
        self.head, self.border = asked.head, asked.border
        self.head_tokens, self.crosses = 0, False
        self.pairs = np.empty((0, 2), dtype=np.int64)
        """offsets of the last piece, [T, 2]"""

    def mask(self, piece: TokenPiece) -> Mask:
        """Return a mask of the trained tokens of the next piece, [T]."""
        if piece.read_offsets is None:
            return np.full(len(piece.ids), self.turns is None)
        if self.speller is not None:
            starts, ends = self._turns_in(piece)
            spelled = self.speller.cover(piece.ids, self.text[piece.start : piece.stop], starts, ends)
            if spelled is not None:
                return spelled
        offsets = piece.read_offsets()
        pairs = self.pairs = _pairs(offsets)
        if self.border is not None:
            here = self.border - piece.start
            self.crosses |= bool(((pairs[:, 0] < here) & (here < pairs[:, 1])).any())
        if self.head > piece.start:
            self._count_head(piece, pairs)
        if self.turns is None:
            return np.ones(len(piece.ids), dtype=np.bool_)
        size = piece.stop - piece.start
        if not _is_whole(pairs, size):
            ids = piece.ids
            names = lambda: list(self.tokenizer.convert_ids_to_tokens(ids))  # noqa: E731
            pairs = _pairs(_extents(self.text[piece.start : piece.stop], offsets, names))
        return _cover(pairs, *self._turns_in(piece))

    def _turns_in(self, piece: TokenPiece) -> tuple[list[int], list[int]]:
        """Return starts and ends of the turns in a piece, counted from its start."""
        near = slice(bisect_right(self.turn_ends, piece.start), bisect_left(self.turn_starts, piece.stop))
        starts = [max(start - piece.start, 0) for start in self.turn_starts[near]]
        return starts, [min(end, piece.stop) - piece.start for end in self.turn_ends[near]]

    def _count_head(self, piece: TokenPiece, pairs: npt.NDArray[np.int64]) -> None:
        here = self.head - piece.start
        if here <= 0:
            return
        inside = int(np.count_nonzero(pairs[:, 0] < here))
        if not inside:
            return
        self.head_tokens += inside
        if pairs[inside - 1, 1] > here:  # that token cannot be kept without what follows
            self.head = self.head_tokens = 0

    def breaks(self, piece: TokenPiece) -> npt.NDArray[np.uint8]:
        """Return the strongest border before each token of the piece whose mask was read last, [T]."""
        found: npt.NDArray[np.uint8] = np.zeros(len(piece.ids), dtype=np.uint8)
        if piece.start == piece.stop:
            return found
        pairs = self.pairs
        held = np.flatnonzero(pairs[:, 0] < pairs[:, 1])
        starts = pairs[held, 0] + piece.start
        for name, places in (
            ("line", _places(_LINE, self.text, piece)),
            ("paragraph", _places(_PARAGRAPH, self.text, piece)),
            ("turn", np.array([(place, place) for place in self.exchanges], dtype=np.int64).reshape(-1, 2)),
        ):
            first = np.searchsorted(starts, places[:, 0], "left")
            inside = first < len(starts)
            first, last = first[inside], places[inside, 1]
            found[held[first[starts[first] <= last]]] = SPLIT_AT.index(name)
        return found


_LINE = re.compile(r"\n[^\S\n]*")
_PARAGRAPH = re.compile(r"\n(?:[^\S\n]*\n)+[^\S\n]*")


def _places(border: re.Pattern[str], text: str, piece: TokenPiece) -> npt.NDArray[np.int64]:
    """Return for each border the first and the last place where what follows it may begin, [borders, 2].

    From behind the last line break to behind the blanks that indent what follows.
    """

    def places() -> Iterator[int]:
        # A piece may begin behind a line break.
        for match in border.finditer(text, max(0, piece.start - 1), piece.stop):
            yield text.rindex("\n", match.start(), match.end()) + 1
            yield match.end()

    return np.fromiter(places(), np.int64).reshape(-1, 2)


def _cover(extents: npt.NDArray[np.int64], turn_starts: Any, turn_ends: Any) -> Mask:
    """Return a mask [T] of the tokens that hold a character of a turn.

    Args:
        extents: [T, 2] first character and end of each token, in order; a token without characters may stand anywhere.
        turn_starts: [turns] first characters, in order.
        turn_ends: [turns] ends.
    """
    starts, ends = extents.T
    trained: Mask = np.zeros(len(extents), dtype=np.bool_)
    held = np.flatnonzero(starts < ends)
    firsts = np.searchsorted(ends[held], turn_starts, "right").tolist()
    lasts = np.searchsorted(starts[held], turn_ends, "left").tolist()
    for first, last in zip(firsts, lasts, strict=True):
        trained[held[first:last]] = True
    return trained


def _pairs(offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)


def _is_whole(extents: npt.NDArray[np.int64], length: int) -> bool:
    """Return True if the tokens hold all characters of a text, one token after the other."""
    borders = [0, *extents[-1:, 1]]
    return borders == [0, length] and extents[0, 0] == 0 and bool((extents[1:, 0] == extents[:-1, 1]).all())


def _extents(
    text: str, offsets: Sequence[tuple[int, int]], pieces: Callable[[], list[str]]
) -> Sequence[tuple[int, int]]:
    """Return the characters each token stands for, including blanks that ``offsets`` leave out.

    Byte-level tokenizers like GPT-2's and Llama 3's (``trim_offsets``) report a token without the blanks at its ends.
    Blanks that no token claims belong to the token before them as far as its piece ends with blanks (``Ġ``), the rest
    to the token after them. A token that the tokenizer added itself stands for no character.

    Args:
        offsets: Start and end (exclusive) of each token as the tokenizer reports them.
        pieces: Returns the tokens as the vocabulary writes them; called only if blanks are left out.
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


# ------------------------------------------------------------------------------------------------ bytes of tokens


class ByteSpeller:
    """Finds the tokens that hold some characters of a text, by the bytes of byte-level tokens."""

    def __init__(self, backend: Any) -> None:
        parts = component_parts(backend.pre_tokenizer, "pretokenizers")
        self._bytes = _TokenBytes(backend) if any(part["type"] == "ByteLevel" for part in parts) else None

    def cover(
        self, ids: Sequence[int], text: str, starts: Sequence[int], ends: Sequence[int]
    ) -> npt.NDArray[np.bool_] | None:
        """Return a mask [T] of the tokens that hold a character of a span; None if the tokens do not spell the text.

        Args:
            ids: [T] all tokens of the text.
            starts: [spans] first character of each span, in order.
            ends: [spans] character behind each span; spans do not overlap.
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
        places = _byte_places(text, [place for span in zip(starts, ends, strict=True) for place in span])
        for start, end in zip(places[::2], places[1::2], strict=True):
            covered[bisect_right(borders, start) - 1 : bisect_left(borders, end)] = True
        return covered


def _byte_places(text: str, places: Sequence[int]) -> Sequence[int]:
    """Return the number of bytes before each of some characters, which are in order."""
    if text.isascii():
        return places
    return list(accumulate(len(text[start:end].encode()) for start, end in pairwise([0, *places])))


class _TokenBytes(dict[int, bytes]):
    """Bytes of tokens by id, found when first asked for: most of a vocabulary occurs in no text of a run.

    Raises:
        KeyError: A token does not stand for bytes.
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
"""Byte of each character of a byte-level vocabulary: printing characters stand for themselves."""
