"""Places where text may be cut before it is tokenised, so that the ids of the pieces are those of the whole.

A cut is exact where no token of the whole text crosses it, and where each side is tokenised as it is in the whole. It
lies between words:

    letter | blank letter                  "one| two"
    no blank, line break | letter          "one.\\n|Two"

Three kinds of tokenizers allow that; other ones get the text whole.

1. Byte-level BPE, whose pre-tokenizer splits text into words before anything is merged. Each alternative of the
   splitting expressions is one of :data:`ALTERNATIVES`: no match of these goes on over such a border, and none ends
   elsewhere because the text ends there. None looks back.
2. Words split at blanks: WordPiece with BERT's pre-tokenizer, and models over ``▁`` with ``Metaspace``.
3. BPE over ``▁`` without a pre-tokenizer, as Llama 2 and Gemma have it. A border is exact if no token of the vocabulary
   holds a letter with ``▁`` behind it: then nothing merges over the border. Cut at blanks alone.

In all of them the normaliser changes characters one by one or composes them, and no line break or blank composes with
anything; no added token holds a blank, and those that take blanks at their sides begin and end with a sign.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LETTERS = (
    "A-Za-zÀ-ÖØ-öø-ɏ\u0391-\u03a1\u03a3-\u03c9\u0410-\u044f\u05d0-\u05ea"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
"""Letters in every version of Unicode that a tokenizer may have been built with."""

BORDER = re.compile(rf"(?<=[{_LETTERS}])(?= [{_LETTERS}])|(?<=[^\s]\n)(?=[{_LETTERS}])")
BLANK_BORDER = re.compile(rf"(?<=[{_LETTERS}])(?= [{_LETTERS}])")

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

_COMPOSING = frozenset({"NFC", "NFKC"})
_BY_CHARACTER = _COMPOSING | {"NFD", "NFKD", "StripAccents", "Lowercase", "BertNormalizer"}
_BLANK = "▁"


@dataclass(frozen=True)
class CutRule:
    """The places where the text of a tokenizer may be cut."""

    border: re.Pattern[str]
    """matches the empty text at each border"""
    skip: int = 0
    """blanks at the start of a later piece that are not given to the tokenizer, as it puts one there itself"""


def cut_rule(tokenizer: PreTrainedTokenizerBase) -> CutRule | None:
    """Return the rule by which a tokenizer's text may be cut; None if it is not known to keep any border."""
    if not tokenizer.is_fast:
        return None
    backend: Any = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    normaliser = component_parts(backend.normalizer, "normalizers")
    splitter = component_parts(backend.pre_tokenizer, "pretokenizers")
    kind = type(backend.model).__name__
    if not all(map(_keeps_blanks, added)) or (kind == "BPE" and backend.model.dropout):
        return None
    if kind == "BPE" and _named(normaliser, _COMPOSING) and _splits_words(splitter):
        return CutRule(BORDER)
    if _splits_at_blanks(kind, normaliser, splitter):
        return CutRule(BORDER if kind == "WordPiece" else BLANK_BORDER)
    if kind == "BPE" and _is_whole(splitter) and _merges_no_border(backend):
        return _rule_of_blanks(normaliser, splitter)
    return None


def component_parts(component: Any, name: str) -> list[dict[str, Any]]:
    """Return the parts of a normaliser or a pre-tokenizer, in order."""

    def flat(part: dict[str, Any]) -> list[dict[str, Any]]:
        return [each for inner in part[name] for each in flat(inner)] if part["type"] == "Sequence" else [part]

    return [] if component is None else flat(json.loads(component.__getstate__()))


def _keeps_blanks(token: Any) -> bool:
    """Return True if an added token holds no blank, and takes none of a border: there it would have a letter."""
    text = token.content
    if re.search(r"\s", text):
        return False
    return (not token.lstrip or _is_sign(text[:1])) and (not token.rstrip or _is_sign(text[-1:]))


def _is_sign(character: str) -> bool:
    return character.isascii() and not character.isalnum()


def _named(parts: list[dict[str, Any]], names: frozenset[str]) -> bool:
    return all(part["type"] in names for part in parts)


# --- 1. words by an expression ----------------------------------------------------------------------------------------


def _splits_words(splitter: list[dict[str, Any]]) -> bool:
    """Return True if a pre-tokenizer splits at the borders: all of its parts keep them, and one splits words."""
    return all(map(_keeps, splitter)) and any(map(_finds_words, splitter))


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


def _finds_words(part: dict[str, Any]) -> bool:
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


# --- 2. words between blanks ------------------------------------------------------------------------------------------


def _splits_at_blanks(kind: str, normaliser: list[dict[str, Any]], splitter: list[dict[str, Any]]) -> bool:
    """Return True if each word between blanks is tokenised by itself."""
    if kind == "WordPiece":
        first = splitter[:1] and splitter[0]["type"] in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
        return (
            bool(first)
            and _named(splitter[1:], frozenset({"Punctuation", "Digits"}))
            and _named(normaliser, _BY_CHARACTER)
        )
    metaspace = len(splitter) == 1 and splitter[0]["type"] == "Metaspace" and splitter[0]["split"]
    return metaspace and kind in ("BPE", "Unigram") and _named(normaliser, _COMPOSING)


# --- 3. no words ------------------------------------------------------------------------------------------------------


def _is_whole(splitter: list[dict[str, Any]]) -> bool:
    """Return True if text is not split: by nothing, or at blanks that the normaliser has replaced."""
    of_gemma = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return not splitter or splitter == [of_gemma] or (len(splitter) == 1 and splitter[0]["type"] == "Metaspace")


def _merges_no_border(backend: Any) -> bool:
    """Return True if no token of a BPE holds a letter with ``▁`` behind it, so that nothing merges over a border."""
    model = backend.model
    if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    crossing = re.compile(f"[{_LETTERS}]{_BLANK}")
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return _BLANK in vocabulary and not any(_BLANK in token[1:] and crossing.search(token) for token in vocabulary)


def _rule_of_blanks(normaliser: list[dict[str, Any]], splitter: list[dict[str, Any]]) -> CutRule | None:
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    prepends = {"type": "Prepend", "prepend": _BLANK}
    if splitter and splitter[0]["type"] == "Metaspace":
        is_known = splitter[0]["replacement"] == _BLANK and _named(normaliser, _COMPOSING)
        return CutRule(BLANK_BORDER) if is_known else None
    if normaliser == [replaces]:
        return CutRule(BLANK_BORDER)
    return CutRule(BLANK_BORDER, skip=1) if normaliser == [prepends, replaces] else None
