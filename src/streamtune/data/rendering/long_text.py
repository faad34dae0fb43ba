r"""Tokenise long text in parts: the same ids as for the whole text, with a fraction of the memory.

A tokenizer needs hundreds of bytes per token while it works, so it gets a long text in parts. A text that cannot be cut
without changing ids is tokenised whole. A cut is exact if no token crosses it, and if each side gets the same tokens as
in the whole text. Cuts are made between words::

    letter | space letter                  "one| two"
    no space, line break | letter          "one.\n|Two"

Three kinds of tokenizers allow exact cuts; all others tokenise the whole text.

1. Byte-level BPE, whose pre-tokenizer splits text into words before any merge. Each alternative of its regular
   expressions is in :data:`ALTERNATIVES`. No match of these crosses a cut, changes if the text ends at the cut, or
   looks back over it.
2. Tokenizers that split words at spaces: WordPiece with BERT's pre-tokenizer, and models with ``Metaspace``.
3. BPE over ``▁`` without a pre-tokenizer, as in Llama 2 and Gemma. If no token of the vocabulary has a letter followed
   by ``▁``, nothing merges across a space. These texts are cut only at spaces.

All three kinds need two more conditions. The normaliser changes characters one by one or composes them; line breaks and
spaces do not compose. No added token contains whitespace. An added token with ``lstrip`` or ``rstrip``, whose matches
include the spaces before or after it, has an ASCII sign on that side.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from streamtune.base.patterns import tokenizer_panic_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LETTERS = (
    "A-Za-zÀ-ÖØ-öø-ɏ\u0391-\u03a1\u03a3-\u03c9\u0410-\u044f\u05d0-\u05ea"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
"""Characters that are letters in every Unicode version with which a tokenizer may have been built."""

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
"""Regular expressions of pre-tokenizers that allow exact cuts: GPT-2, Llama 3, Qwen, o200k, Tekken, DeepSeek."""

_COMPOSING = frozenset({"NFC", "NFKC"})
_BY_CHARACTER = _COMPOSING | {"NFD", "NFKD", "StripAccents", "Lowercase", "BertNormalizer"}
_BLANK = "▁"


@dataclass(frozen=True)
class CutRule:
    """Places where a text may be cut so that its parts have the same token ids as the whole text."""

    border: re.Pattern[str]
    """pattern that matches the empty string at each of these places"""
    skip: int = 0
    """number of spaces to remove from the start of later parts, because the tokenizer adds a space"""


def cut_rule(tokenizer: PreTrainedTokenizerBase) -> CutRule | None:
    """Return where text may be cut without changing its token ids; None if no such place is known for the tokenizer."""
    if not tokenizer.is_fast:
        return None
    backend: Any = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    normaliser = tokenizer_component_steps(backend.normalizer, "normalizers")
    splitter = tokenizer_component_steps(backend.pre_tokenizer, "pretokenizers")
    kind = type(backend.model).__name__
    if not all(map(_leaves_blanks_alone, added)) or (kind == "BPE" and backend.model.dropout):
        return None
    if kind == "BPE" and _all_have_types(normaliser, _COMPOSING) and _is_word_splitter(splitter):
        return CutRule(BORDER)
    if _tokenises_by_word(kind, normaliser, splitter):
        return CutRule(BORDER if kind == "WordPiece" else BLANK_BORDER)
    if kind == "BPE" and _keeps_text_whole(splitter) and _no_merge_crosses_blank(backend):
        return _blank_cut_rule(normaliser, splitter)
    return None


def tokenizer_component_steps(component: Any, name: str) -> list[dict[str, Any]]:
    """Return the settings of a normaliser or pre-tokenizer, one dict per step; nested sequences are flattened.

    Args:
        component: Component of a fast tokenizer; None gives an empty list.
        name: Key of a sequence's steps, ``normalizers`` or ``pretokenizers``.
    """

    def flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
        return [each for inner in step[name] for each in flatten(inner)] if step["type"] == "Sequence" else [step]

    return [] if component is None else flatten(json.loads(component.__getstate__()))


def _leaves_blanks_alone(added_token: Any) -> bool:
    """Return True if an added token never matches whitespace at which texts are cut, which is next to a letter.

    With ``lstrip`` or ``rstrip``, a match includes adjacent whitespace; on that side the token must have an ASCII sign.
    """
    text = added_token.content
    if re.search(r"\s", text):
        return False
    return (not added_token.lstrip or _is_ascii_non_alphanumeric(text[:1])) and (
        not added_token.rstrip or _is_ascii_non_alphanumeric(text[-1:])
    )


def _is_ascii_non_alphanumeric(character: str) -> bool:
    return character.isascii() and not character.isalnum()


def _all_have_types(parts: list[dict[str, Any]], names: frozenset[str]) -> bool:
    return all(part["type"] in names for part in parts)


# --- 1. words by an expression ----------------------------------------------------------------------------------------


def _is_word_splitter(steps: list[dict[str, Any]]) -> bool:
    """Return True if a pre-tokenizer splits text into words, and a cut between words changes none of its splits."""
    return all(map(_allows_cuts, steps)) and any(map(_splits_into_words, steps))


def _allows_cuts(part: dict[str, Any]) -> bool:
    """Return True if a cut between words does not change how this step of a pre-tokenizer splits text."""
    if part["type"] == "ByteLevel":
        return not part["add_prefix_space"]
    if part["type"] == "Digits":
        return True
    if part["type"] != "Split" or part["behavior"] != "Isolated" or part["invert"]:
        return False
    found = _regex_alternatives(part["pattern"].get("Regex", ""))
    # `\s+(?!\S)` matches a last line break only at the end of the text; `\s+` matches it elsewhere.
    return ALTERNATIVES.issuperset(found) and (r"\s+(?!\S)" not in found or r"\s+" in found)


def _splits_into_words(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return bool(part.get("use_regex", True))
    return part["type"] == "Split" and r"\s+" in _regex_alternatives(part["pattern"].get("Regex", ""))


def _regex_alternatives(expression: str) -> list[str]:
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


def _tokenises_by_word(model_type: str, normaliser: list[dict[str, Any]], splitter: list[dict[str, Any]]) -> bool:
    """Return True if the tokenizer tokenises each word between spaces separately."""
    if model_type == "WordPiece":
        first = splitter[:1] and splitter[0]["type"] in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
        return (
            bool(first)
            and _all_have_types(splitter[1:], frozenset({"Punctuation", "Digits"}))
            and _all_have_types(normaliser, _BY_CHARACTER)
        )
    metaspace = len(splitter) == 1 and splitter[0]["type"] == "Metaspace" and splitter[0]["split"]
    return metaspace and model_type in ("BPE", "Unigram") and _all_have_types(normaliser, _COMPOSING)


# --- 3. no words ------------------------------------------------------------------------------------------------------


def _keeps_text_whole(splitter: list[dict[str, Any]]) -> bool:
    """Return True if the pre-tokenizer splits no text, or splits at spaces that the normaliser has already replaced."""
    of_gemma = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return not splitter or splitter == [of_gemma] or (len(splitter) == 1 and splitter[0]["type"] == "Metaspace")


def _no_merge_crosses_blank(backend: Any) -> bool:
    """Return True if no BPE token contains a letter followed by ``▁``, so that no merge crosses a space."""
    model = backend.model
    if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    crossing = re.compile(f"[{_LETTERS}]{_BLANK}")
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return _BLANK in vocabulary and not any(_BLANK in token[1:] and crossing.search(token) for token in vocabulary)


def _blank_cut_rule(normaliser: list[dict[str, Any]], splitter: list[dict[str, Any]]) -> CutRule | None:
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    prepends = {"type": "Prepend", "prepend": _BLANK}
    if splitter and splitter[0]["type"] == "Metaspace":
        is_known = splitter[0]["replacement"] == _BLANK and _all_have_types(normaliser, _COMPOSING)
        return CutRule(BLANK_BORDER) if is_known else None
    if normaliser == [replaces]:
        return CutRule(BLANK_BORDER)
    return CutRule(BLANK_BORDER, skip=1) if normaliser == [prepends, replaces] else None


PART_CHARACTERS = 1 << 16
"""Minimum number of characters of a part; a text of up to twice as many is tokenised whole."""
NOTED = 1 << 22
"""Minimum number of characters of a text for which the user is told that it is tokenised whole."""

_WHOLE = (
    "rows of more than 4 million characters are tokenised whole, which takes about 200 bytes of memory per character. "
    "This tokenizer is not known to give the same tokens for a text in parts"
)


@dataclass(frozen=True)
class TextPart:
    """Token ids of characters ``start`` to ``stop`` (exclusive) of a text."""

    start: int
    stop: int
    ids: Sequence[int]
    """[T] token ids"""
    read_offsets: Callable[[], Sequence[tuple[int, int]]] | None
    """function that computes :attr:`offsets`, which is slow; None if offsets were not requested"""

    @property
    def offsets(self) -> Sequence[tuple[int, int]] | None:
        """Start and end (exclusive) of each token in characters from ``start``; None if they were not requested."""
        return None if self.read_offsets is None else self.read_offsets()


class LongTextTokenizer:
    """Tokenises text of any length; a long text is tokenised in parts if this does not change its token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], None] = lambda message: None) -> None:
        self.tokenizer, self._note = tokenizer, note

    @cached_property
    def cut_rule(self) -> CutRule | None:
        return cut_rule(self.tokenizer)

    def ids(self, text: str, *, add_special_tokens: bool = True) -> MutableSequence[int]:
        """Return the token ids of a text: a list, or an array of 32-bit ids if the text is long.

        Args:
            add_special_tokens: Whether to add the tokens that the tokenizer puts around a text, such as BOS.
        """
        parts = self.iter_parts(text, add_special_tokens=add_special_tokens, offsets=False)
        first = next(parts)
        if first.stop == len(text):
            return list(first.ids)
        ids = array("i", first.ids)
        for part in parts:
            ids.extend(part.ids)
        return ids

    def iter_parts(self, text: str, *, add_special_tokens: bool, offsets: bool) -> Iterator[TextPart]:
        """Yield the token ids of a text in parts, in order; a short text, or a text that cannot be cut, is one part.

        If there are several parts, the tokens around the text, such as BOS, are separate parts without characters.

        Args:
            add_special_tokens: Whether to add the tokens that the tokenizer puts around a text, such as BOS.
            offsets: Whether the character offsets of the tokens will be read.
        """
        around = (
            self._find_added_tokens(add_special_tokens)
            if len(text) > 2 * PART_CHARACTERS and self.cut_rule is not None
            else None
        )
        if around is None:
            if len(text) > NOTED:
                self._note(_WHOLE)
            yield self._encode(text, 0, len(text), 0, add_special_tokens=add_special_tokens, offsets=offsets)
            return
        assert self.cut_rule is not None, "a text is cut only if the tokenizer has a cut rule"
        yield _make_added_part(0, around[0], offsets)
        for start, stop in self._iter_part_bounds(text, self.cut_rule):
            skip = self.cut_rule.skip if start else 0
            yield self._encode(text[start + skip : stop], start, stop, skip, add_special_tokens=False, offsets=offsets)
        yield _make_added_part(len(text), around[1], offsets)

    @cached_property
    def _backend(self) -> Any:
        """The Rust tokenizer, called directly to save time; None if the tokenizer's own call may give other ids."""
        from transformers import PreTrainedTokenizerFast

        tokenizer: Any = self.tokenizer
        kinds = (type(tokenizer).__call__, getattr(type(tokenizer), "_encode_plus", None))
        if kinds != (PreTrainedTokenizerFast.__call__, getattr(PreTrainedTokenizerFast, "_encode_plus", kinds)):
            return None
        tokenizer("a", verbose=False)  # switches truncation and padding off, which persist from the last call
        backend = tokenizer.backend_tokenizer
        return backend if backend.truncation is None and backend.padding is None else None

    def _encode(
        self, text: str, start: int, stop: int, skip: int, *, add_special_tokens: bool, offsets: bool
    ) -> TextPart:
        if self._backend is not None:
            try:
                encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
            except BaseException as error:
                if (known := tokenizer_panic_error(error)) is not None:
                    raise known from None
                raise
            ids, read = encoded.ids, lambda: encoded.offsets
        else:
            # verbose=False: no warning about rows that exceed the model's maximum length
            encoding = self.tokenizer(
                text, add_special_tokens=add_special_tokens, verbose=False, return_offsets_mapping=offsets
            )
            ids, read = list(encoding["input_ids"]), lambda: encoding["offset_mapping"]
        if skip and ids:
            is_blank = self.tokenizer.convert_ids_to_tokens(ids[0]) == "▁"
            return TextPart(
                start, stop, ids, (lambda: _offsets_with_blank(read(), is_blank=is_blank)) if offsets else None
            )
        return TextPart(start, stop, ids, read if offsets else None)

    def _iter_part_bounds(self, text: str, rule: CutRule) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each part; a part ends at the first possible cut after 65,536 characters."""
        start = 0
        while len(text) - start > PART_CHARACTERS:
            match = rule.border.search(text, start + PART_CHARACTERS)
            if match is None:
                break
            yield start, match.start()
            start = match.start()
        yield start, len(text)

    def _find_added_tokens(self, add_special_tokens: bool) -> tuple[list[int], list[int]] | None:
        """Return the tokens that the tokenizer adds before and after a text; None if they cannot be identified."""
        if not add_special_tokens:
            return [], []
        bare = list(self.tokenizer("a b", add_special_tokens=False)["input_ids"])
        whole = list(self.tokenizer("a b")["input_ids"])
        starts = [start for start in range(len(whole) - len(bare) + 1) if whole[start : start + len(bare)] == bare]
        return (whole[: starts[0]], whole[starts[0] + len(bare) :]) if len(starts) == 1 else None


def _make_added_part(position: int, ids: Sequence[int], offsets: bool) -> TextPart:
    return TextPart(position, position, ids, (lambda: [(0, 0)] * len(ids)) if offsets else None)


def _offsets_with_blank(offsets: Any, *, is_blank: bool) -> list[tuple[int, int]]:
    """Return character offsets that include a part's first space, which was cut off because the tokenizer adds it."""
    moved = [(start + 1, end + 1) for start, end in offsets]
    moved[0] = (0, 1 if is_blank else moved[0][1])
    return moved
