"""Find special tokens in the text of rows, such as ``<|im_end|>`` in an answer, and tokenise them as ordinary text.

By default a tokenizer converts such names to special tokens, as in the text of the chat template. With
``split_special_tokens`` the names stay text::

    messages --replace--> placeholders --chat template--> text --tokenise--> ids

1. Names of special tokens in the messages are replaced by placeholder characters of the same length, so that positions
   do not change.
2. The chat template renders the messages.
3. The special tokens of the template are replaced by other private-use characters. A copy of the tokenizer has these as
   its special tokens.
4. The placeholders are replaced by the names again, which are ordinary text for the copy.

So the text is tokenised as a whole.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from streamtune.data.options import RowPolicy
from streamtune.data.reading.cells import FLAGS
from streamtune.data.rendering.chat_variants import Message, special_names
from streamtune.data.rendering.tokens import MaskTokenizer, TextTokens
from streamtune.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ALLOWED = ("<think>", "</think>")
"""Special tokens that rows may contain: they enclose the reasoning of an answer."""
_STAND_IN, _WRITTEN = 0xF0000, 0x100000
"""First private-use code points of the placeholders for names in rows, and for special tokens of the template."""
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_STEERING = frozenset({"role", "type", *FLAGS})
"""Fields of a message whose strings are not text."""


class SpecialText:
    """Finds special tokens (such as ``<|im_end|>``) in the text of rows, and tokenises them as ordinary text.

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
        self._names = tuple(name for name in special_names(tokenizer) if name not in _ALLOWED)
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._firsts = sorted({name[0] for name in self._names})

    def find_names(self, text: str) -> list[str]:
        """Return the special tokens that occur in a text, such as ``<|im_end|>``, without repeats."""
        if not any(first in text for first in self._firsts):
            return []
        return list(dict.fromkeys(self._pattern.findall(text)))

    def find_names_in_message(self, message: Message) -> list[str]:
        return list(dict.fromkeys(name for text in _iter_texts(message) for name in self.find_names(text)))

    def replace_names(self, value: Any, origin: str) -> Any:
        """Return messages or tools with placeholders for special tokens; without special tokens, return the same
        object.

        Raises:
            DataError: The text also contains characters that are used as placeholders.
        """
        if not any(map(self.find_names, _iter_texts(value))):
            return value
        self._refuse_private_characters(_iter_texts(value), origin)
        return _replace_texts(
            value, lambda text: self._pattern.sub(lambda match: self._make_placeholder(match.group()), text)
        )

    def _make_placeholder(self, name: str) -> str:
        return chr(_STAND_IN + self._names.index(name)) * len(name)

    def tokenise(
        self, text: str, encode: Callable[[MaskTokenizer, str], TextTokens], origin: str, *, rendered: bool
    ) -> TextTokens:
        """Tokenise a text so that special tokens in the row's own text, such as ``<|im_end|>``, become ordinary tokens.

        Args:
            encode: Function of a tokenizer and a text that tokenises the text.
            origin: File and line of the row, for errors.
            rendered: Whether the text was rendered from messages that :meth:`replace_names` returned, so that it
                contains only the template's special tokens.

        Raises:
            DataError: The text contains placeholder characters, or the tokenizer makes special tokens of ordinary text.
            ArgumentError: The tokenizer is not a fast tokenizer.
        """
        if not rendered:
            self._refuse_private_characters([text], origin)
        copy = self._copy
        made = encode(copy.masks, self._spell_for_copy(text) if rendered else text)
        if copy.has_special_from_text(made.ids):
            raise DataError(
                "this tokenizer always converts the names of special tokens to special tokens",
                where=origin,
                fix="set split_special_tokens: false, or remove these names from the row",
            )
        return replace(made, ids=array("i", (copy.numbers.get(number, number) for number in made.ids)))

    def _spell_for_copy(self, text: str) -> str:
        """Return the text with the copy's names of special tokens, and with the original names for placeholders."""
        text = self._name_pattern.sub(lambda match: self._copy.copied_names[match.group()], text)
        for place, name in enumerate(self._names):
            text = text.replace(chr(_STAND_IN + place) * len(name), name)
        return text

    @staticmethod
    def _refuse_private_characters(texts: Iterable[str], origin: str) -> None:
        if any(map(_PRIVATE.search, texts)):
            raise DataError(
                "the row contains special tokens and also private-use characters (Unicode planes 15 and 16), which "
                "split_special_tokens uses as placeholders",
                where=origin,
                fix="remove the private-use characters",
            )

    @cached_property
    def _name_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, special_names(self._tokenizer))) or r"(?!)")

    @cached_property
    def _copy(self) -> _TokenizerCopy:
        return _copy_tokenizer(self._tokenizer, self._policy, self._note)


@dataclass(frozen=True)
class _TokenizerCopy:
    """A copy of the tokenizer whose special tokens have other names, so that the original names stay ordinary text."""

    masks: MaskTokenizer
    """tokenizer that finds the tokens to train on, based on the copy"""
    copied_names: Mapping[str, str]
    """name of a special token -> its name in the copy, of the same length"""
    numbers: Mapping[int, int]
    """id of an added token in the copy -> its id in the original tokenizer"""
    ordinary_word_ids: frozenset[int | None]
    """ids of special tokens whose names are ordinary words in the copy's vocabulary"""
    added_ids: frozenset[int]
    """ids of the tokens that the copy adds around a text, such as BOS"""

    def has_special_from_text(self, ids: Sequence[int]) -> bool:
        """Return True if a name in the text became a special token. Tokens added around the text do not count."""
        first = int(bool(ids) and ids[0] in self.added_ids)
        last = len(ids) - int(len(ids) > first and ids[-1] in self.added_ids)
        return not self.ordinary_word_ids.isdisjoint(ids[first:last])


def _copy_tokenizer(
    tokenizer: PreTrainedTokenizerBase, policy: RowPolicy | None, note: Callable[[str], None]
) -> _TokenizerCopy:
    if not tokenizer.is_fast:
        raise ArgumentError(
            "split_special_tokens needs a fast tokenizer (tokenizer.json), found a Python tokenizer",
            where="split_special_tokens",
            fix="use a fast tokenizer, or remove split_special_tokens",
        )
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    document = json.loads(tokenizer.backend_tokenizer.to_str())
    added, document["added_tokens"] = document["added_tokens"], []
    names = special_names(tokenizer)
    written = {name: chr(_WRITTEN + place) * len(name) for place, name in enumerate(names)}
    backend = Tokenizer.from_str(json.dumps(document))
    copied_names = [written.get(each["content"], each["content"]) for each in added]
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    backend.add_tokens(
        [
            AddedToken(name, **{flag: each[flag] for flag in flags})
            for name, each in zip(copied_names, added, strict=True)
        ]
    )
    numbers = {backend.token_to_id(name) or 0: each["id"] for name, each in zip(copied_names, added, strict=True)}
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    unknown = {tokenizer.unk_token, getattr(backend.model, "unk_token", None)}  # unknown characters may become these
    words = (backend.model.token_to_id(name) for name in names if name not in unknown)
    around = frozenset(fast("")["input_ids"])
    return _TokenizerCopy(MaskTokenizer(fast, policy, note), written, numbers, frozenset(words) - {None}, around)


def _iter_texts(value: Any) -> Iterator[str]:
    """Yield all text in messages or tools: strings, and keys of objects, except roles, types and flags."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in _STEERING or not isinstance(item, str):
                yield name
                yield from _iter_texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _iter_texts(item)


def _replace_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            name if name in _STEERING else change(name): item
            if name in _STEERING and isinstance(item, str)
            else _replace_texts(item, change)
            for name, item in value.items()
        }
    return [_replace_texts(item, change) for item in value] if isinstance(value, Sequence) else value
