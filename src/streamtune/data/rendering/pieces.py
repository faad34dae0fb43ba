"""Long text tokenised in pieces, with the ids of the text tokenised whole and a fraction of the memory.

A tokenizer holds hundreds of bytes for each token while it works. Text may be cut where its pre-tokenizer, which splits
text into words before anything is merged, puts a border for certain:

    letter | blank letter                  "one| two"
    no blank, line break | letter          "one.\\n|Two"

That holds if the normaliser composes characters only (a line break or blank composes with none), if no added token
takes blanks at its sides or holds any, and if each alternative of the splitting expressions is one of
:data:`ALTERNATIVES`. No match of these goes on over such a border, and none ends elsewhere because the text ends there.
None looks back. So the words of the text are those of its pieces, and words are all that a model of such a tokenizer
sees. Other tokenizers get the text whole.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, MutableSequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["tokenise_text"]

PIECE = 1 << 16
"""Characters of a piece, at least; a shorter text is tokenised whole."""

_LETTERS = (
    "A-Za-zÀ-ÖØ-öø-ɏ\u0391-\u03a1\u03a3-\u03c9\u0410-\u044f\u05d0-\u05ea"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
"""Letters in every version of Unicode that a tokenizer may have been built with."""

_BORDER = re.compile(rf"(?<=[{_LETTERS}])(?= [{_LETTERS}])|(?<=[^\s]\n)(?=[{_LETTERS}])")

_CONTRACTIONS = (
    "'s|'t|'re|'ve|'m|'ll|'d",
    "'(?:[sdmt]|ll|ve|re)",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)

ALTERNATIVES = frozenset(
    {
        *_CONTRACTIONS[0].split("|"),
        *_CONTRACTIONS[1:],
        # letters, with one sign or blank before them
        r" ?\p{L}+",
        r"\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        *_O200K,
        *(f"{start}{_CONTRACTIONS[2]}?" for start in _O200K),
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        "[一-龥\u3040-ゟ\u30a0-ヿ]+",
        # digits
        r" ?\p{N}+",
        r"\p{N}+",
        r"\p{N}",
        r"\p{N}{1,3}",
        # signs, with the line breaks behind them
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        # blanks
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s+",
    }
)
"""Alternatives of splitting expressions that keep the borders: GPT-2, Llama 3, Qwen, o200k, Tekken, DeepSeek."""


def tokenise_text(tokenizer: PreTrainedTokenizerBase, text: str) -> MutableSequence[int]:
    """Return the ids of a text, with the tokens that the tokenizer puts around it: as ``tokenizer(text)`` does.

    Args:
        tokenizer: Any tokenizer; those that allow it get long text in pieces.
        text: The text.

    Returns:
        The ids: a list, or of text in pieces an array of 32 bits each.
    """
    around = _around(tokenizer) if len(text) > 2 * PIECE and _keeps_borders(tokenizer) else None
    if around is None:
        return list(tokenizer(text, verbose=False)["input_ids"])
    before, after = around
    ids = array("i", before)
    for piece in _pieces(text):
        ids.extend(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
    ids.extend(after)
    return ids


def _pieces(text: str) -> Iterator[str]:
    """Cut a text at the first border behind each ``PIECE`` characters."""
    start = 0
    while len(text) - start > PIECE:
        match = _BORDER.search(text, start + PIECE)
        if match is None:
            break
        yield text[start : match.start()]
        start = match.start()
    yield text[start:]


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]] | None:
    """Return the tokens that a tokenizer puts before and behind a text; None if it changes the text's own."""
    bare = list(tokenizer("a b", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a b")["input_ids"])
    starts = [start for start in range(len(whole) - len(bare) + 1) if whole[start : start + len(bare)] == bare]
    return (whole[: starts[0]], whole[starts[0] + len(bare) :]) if len(starts) == 1 else None


def _keeps_borders(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a tokenizer is known to split text at the borders, see the module."""
    if not tokenizer.is_fast:
        return False
    backend: Any = tokenizer.backend_tokenizer
    parts = json.loads(backend.to_str())
    model = parts["model"]
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and _composes(parts.get("normalizer"))
        and _splits(parts.get("pre_tokenizer"))
        and all(
            not token["lstrip"] and not token["rstrip"] and re.search(r"\s", token["content"]) is None
            for token in parts.get("added_tokens") or ()
        )
    )


def _composes(normaliser: dict[str, Any] | None) -> bool:
    """Return True if a normaliser composes characters, or changes nothing."""
    if normaliser is None or normaliser["type"] in ("NFC", "NFKC"):
        return True
    return normaliser["type"] == "Sequence" and all(map(_composes, normaliser["normalizers"]))


def _splits(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return True if a pre-tokenizer splits at the borders: all of its parts keep them, and one splits words."""
    if pre_tokenizer is None:
        return False
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    return all(map(_keeps, parts)) and any(map(_splits_words, parts))


def _keeps(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return not part["add_prefix_space"]
    if part["type"] == "Digits":
        return True
    if part["type"] != "Split" or part["behavior"] != "Isolated" or part["invert"]:
        return False
    found = _alternatives(part["pattern"].get("Regex", ""))
    # The one finds a last line break only where the text ends; the other takes it where it goes on.
    return ALTERNATIVES.issuperset(found) and (r"\s+(?!\S)" not in found or r"\s+" in found)


def _splits_words(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return bool(part.get("use_regex", True))
    return part["type"] == "Split" and r"\s+" in _alternatives(part["pattern"].get("Regex", ""))


def _alternatives(expression: str) -> list[str]:
    """Split a regular expression at its outermost ``|``."""
    found, depth, in_class, start, position = [], 0, False, 0, 0
    while position < len(expression):
        sign = expression[position]
        if sign == "\\":
            position += 1
        elif in_class:
            in_class = sign != "]"
        elif sign == "[":
            in_class = True
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        elif sign == "|" and depth == 0:
            found.append(expression[start:position])
            start = position + 1
        position += 1
    return [*found, expression[start:]]
