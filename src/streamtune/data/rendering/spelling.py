"""The bytes that byte-level tokens stand for, which say what characters of a text each token holds.

A tokenizer can list the characters of every token, but to list them takes longer than all else that is done with the
tokens of a short row. Where the bytes of the tokens, one behind the other, are those of the text, each token holds
exactly its own bytes, and their lengths are enough. That is compared for every text, so a tokenizer that changes the
text or puts tokens around it is never read wrongly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamtune.data.rendering.long_text import component_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def special_names(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the special tokens of a tokenizer as text, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    return tuple(sorted(filter(None, names), key=lambda name: (-len(name), name)))


class ByteSpeller:
    """Finds the tokens that hold some characters of a text.

    Args:
        backend: The Rust tokenizer.
    """

    def __init__(self, backend: Any) -> None:
        parts = component_parts(backend.pre_tokenizer, "pretokenizers")
        self._bytes = _TokenBytes(backend) if any(part["type"] == "ByteLevel" for part in parts) else None

    def cover(
        self, ids: Sequence[int], text: str, starts: Sequence[int], ends: Sequence[int]
    ) -> npt.NDArray[np.bool_] | None:
        """Return for each token True if it holds a character of a span, [T]; None if the tokens do not spell the text.

        Args:
            ids: [T] all tokens of the text.
            text: The text.
            starts: [spans] first character of each span, in order.
            ends: [spans] character behind each span; no span begins before the end of another.
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
    """The bytes of tokens by id, found when they are first asked for: a vocabulary has many that no text of a run has.

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
"""The byte of each character of a byte-level vocabulary: those that print stand for themselves."""
