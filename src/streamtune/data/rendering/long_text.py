"""Long text tokenised in pieces, with the ids of the text tokenised whole and a fraction of the memory.

A tokenizer holds hundreds of bytes for each token while it works. So it gets long text in pieces, cut where
:mod:`streamtune.data.rendering.borders` proves that the ids stay the same; text that cannot be cut so is given whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from streamtune.base.patterns import of_tokenizer
from streamtune.data.rendering.borders import CutRule, cut_rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 1 << 16
"""Characters of a piece, at least; a shorter text is tokenised whole."""
NOTED = 1 << 22
"""Characters of a text whose memory is worth a note if it is tokenised whole."""

_WHOLE = (
    "rows of more than 4 million characters are tokenised whole, with some 200 bytes of memory for each character: "
    "this tokenizer is not known to give the same tokens for pieces of a text"
)


@dataclass(frozen=True)
class TokenPiece:
    """The tokens of characters ``start`` to ``stop`` (exclusive) of a text."""

    start: int
    stop: int
    ids: Sequence[int]
    read_offsets: Callable[[], Sequence[tuple[int, int]]] | None
    """returns :attr:`offsets`, which take time to list; None where they were not asked for"""

    @property
    def offsets(self) -> Sequence[tuple[int, int]] | None:
        """First character and end of each token, counted from ``start``; None where they were not asked for."""
        return None if self.read_offsets is None else self.read_offsets()


class PieceTokenizer:
    """Tokenises text of any length, piece by piece.

    Args:
        tokenizer: Any tokenizer; those that allow it get long text in pieces.
        note: Called with what a user should know.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], None] = lambda message: None) -> None:
        self.tokenizer, self._note = tokenizer, note

    @cached_property
    def rule(self) -> CutRule | None:
        """The rule by which text is cut; None if it is not."""
        return cut_rule(self.tokenizer)

    def ids(self, text: str, *, special: bool = True) -> MutableSequence[int]:
        """Return the ids of a text: a list, or of text in pieces an array of 32 bits each.

        Args:
            text: The text.
            special: With the tokens that the tokenizer puts around a text.
        """
        pieces = self.pieces(text, special=special, offsets=False)
        first = next(pieces)
        if first.stop == len(text):
            return list(first.ids)
        ids = array("i", first.ids)
        for piece in pieces:
            ids.extend(piece.ids)
        return ids

    def pieces(self, text: str, *, special: bool, offsets: bool) -> Iterator[TokenPiece]:
        """Yield the tokens of a text in order; a short text, and one that cannot be cut, is one piece.

        Of text in pieces, the tokens around it are pieces of their own, which hold no character.
        """
        around = self._around(special) if len(text) > 2 * PIECE and self.rule is not None else None
        if around is None:
            if len(text) > NOTED:
                self._note(_WHOLE)
            yield self._encode(text, 0, len(text), 0, special=special, offsets=offsets)
            return
        assert self.rule is not None, "there are no tokens around a text that is not cut"
        yield _around_piece(0, around[0], offsets)
        for start, stop in self._cuts(text, self.rule):
            skip = self.rule.skip if start else 0
            yield self._encode(text[start + skip : stop], start, stop, skip, special=False, offsets=offsets)
        yield _around_piece(len(text), around[1], offsets)

    @cached_property
    def _backend(self) -> Any:
        """The Rust tokenizer, if a call of the tokenizer is a call of it and nothing more; else None.

        Called directly it saves a fourth of the time of a short text.
        """
        from transformers import PreTrainedTokenizerFast

        tokenizer: Any = self.tokenizer
        kinds = (type(tokenizer).__call__, getattr(type(tokenizer), "_encode_plus", None))
        if kinds != (PreTrainedTokenizerFast.__call__, getattr(PreTrainedTokenizerFast, "_encode_plus", kinds)):
            return None
        tokenizer("a", verbose=False)  # without truncation and padding, which stay as a call sets them
        backend = tokenizer.backend_tokenizer
        return backend if backend.truncation is None and backend.padding is None else None

    def _encode(self, text: str, start: int, stop: int, skip: int, *, special: bool, offsets: bool) -> TokenPiece:
        if self._backend is not None:
            try:
                encoded = self._backend.encode(text, add_special_tokens=special)
            except BaseException as error:
                if (known := of_tokenizer(error)) is not None:
                    raise known from None
                raise
            ids, read = encoded.ids, lambda: encoded.offsets
        else:
            # verbose=False: a row longer than the model's own limit is what this program is for
            encoding = self.tokenizer(text, add_special_tokens=special, verbose=False, return_offsets_mapping=offsets)
            ids, read = list(encoding["input_ids"]), lambda: encoding["offset_mapping"]
        if skip and ids:
            is_blank = self.tokenizer.convert_ids_to_tokens(ids[0]) == "▁"
            return TokenPiece(start, stop, ids, (lambda: _with_skipped(read(), is_blank=is_blank)) if offsets else None)
        return TokenPiece(start, stop, ids, read if offsets else None)

    def _cuts(self, text: str, rule: CutRule) -> Iterator[tuple[int, int]]:
        """Yield the pieces of a text, each cut at the first border behind ``PIECE`` characters."""
        start = 0
        while len(text) - start > PIECE:
            match = rule.border.search(text, start + PIECE)
            if match is None:
                break
            yield start, match.start()
            start = match.start()
        yield start, len(text)

    def _around(self, special: bool) -> tuple[list[int], list[int]] | None:
        """Return the tokens that are put before and behind a text; None if the text's own depend on them."""
        if not special:
            return [], []
        bare = list(self.tokenizer("a b", add_special_tokens=False)["input_ids"])
        whole = list(self.tokenizer("a b")["input_ids"])
        starts = [start for start in range(len(whole) - len(bare) + 1) if whole[start : start + len(bare)] == bare]
        return (whole[: starts[0]], whole[starts[0] + len(bare) :]) if len(starts) == 1 else None


def _around_piece(place: int, ids: Sequence[int], offsets: bool) -> TokenPiece:
    """Return tokens that are put around a text as a piece that holds no character."""
    return TokenPiece(place, place, ids, (lambda: [(0, 0)] * len(ids)) if offsets else None)


def _with_skipped(offsets: Any, *, is_blank: bool) -> list[tuple[int, int]]:
    """Return the offsets of a piece whose first blank was not given to the tokenizer, which put another there."""
    moved = [(start + 1, end + 1) for start, end in offsets]
    moved[0] = (0, 1 if is_blank else moved[0][1])
    return moved
