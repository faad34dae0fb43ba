"""Special tokens that the text of a row spells: ``<|im_end|>`` in an answer.

A tokenizer takes them for the tokens that the chat template writes. With ``split_special_tokens`` they stay text:

    messages --shield--> stand-ins --template--> text --spell--> ids

A stand-in has the length of its token, so trained characters stay in place. Before tokenising, the stand-ins become
text again, and the template's special tokens are spelled in characters that a copy of the tokenizer takes for them. So
the ids are as if one text were tokenised whole.
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
from streamtune.data.rendering.renderings import Message, special_names
from streamtune.data.rendering.tokens import MaskTokenizer, TextTokens
from streamtune.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEPT = ("<think>", "</think>")
"""Marks that a row writes itself: around the reasoning of an answer."""
_STAND_IN, _WRITTEN = 0xF0000, 0x100000
"""First private-use characters that stand for special tokens of rows, and of the template."""
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_STEERING = frozenset({"role", "type", *FLAGS})
"""Fields of a message that say nothing."""


class SpecialText:
    """Finds special tokens in the text of rows, and tokenises such text without taking it for them.

    Args:
        policy: Length of rows, as in :class:`MaskTokenizer`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        policy: RowPolicy | None = None,
        note: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._tokenizer, self._policy, self._note = tokenizer, policy, note
        self._names = tuple(name for name in special_names(tokenizer) if name not in _KEPT)
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._firsts = sorted({name[0] for name in self._names})

    def found(self, text: str) -> list[str]:
        """Return the special tokens that a text spells, each once."""
        if not any(first in text for first in self._firsts):
            return []
        return list(dict.fromkeys(self._pattern.findall(text)))

    def found_in(self, message: Message) -> list[str]:
        return list(dict.fromkeys(name for text in _texts(message) for name in self.found(text)))

    def shield(self, value: Any, origin: str) -> Any:
        """Return messages or tools with stand-ins for the special tokens they spell; without any, the value itself."""
        if not any(map(self.found, _texts(value))):
            return value
        self._refuse_private(_texts(value), origin)
        return _replaced(value, lambda text: self._pattern.sub(lambda match: self._stand_in(match.group()), text))

    def _stand_in(self, name: str) -> str:
        return chr(_STAND_IN + self._names.index(name)) * len(name)

    def tokenise(
        self, text: str, tokens: Callable[[MaskTokenizer, str], TextTokens], origin: str, *, rendered: bool
    ) -> TextTokens:
        """Tokenise a text without taking what it spells for special tokens.

        Args:
            tokens: Function that calls the given tokenizer with the given text.
            rendered: The text has stand-ins, and special tokens of the template.

        Raises:
            DataError: The tokenizer's vocabulary has a special token as a part of words.
            ArgumentError: The tokenizer is not a fast one.
        """
        if not rendered:
            self._refuse_private([text], origin)
        copy = self._copy
        made = tokens(copy.masks, self._spelled(text) if rendered else text)
        if copy.makes_special(made.ids):
            raise DataError(
                "the tokenizer makes special tokens of their text, whatever it is told",
                where=origin,
                fix="write split_special_tokens: false, or remove these tokens from the row",
            )
        return replace(made, ids=array("i", (copy.numbers.get(number, number) for number in made.ids)))

    def _spelled(self, text: str) -> str:
        """Return the text with the template's special tokens as the copy spells them, and names for stand-ins."""
        text = self._all.sub(lambda match: self._copy.written[match.group()], text)
        for place, name in enumerate(self._names):
            text = text.replace(chr(_STAND_IN + place) * len(name), name)
        return text

    @staticmethod
    def _refuse_private(texts: Iterable[str], origin: str) -> None:
        if any(map(_PRIVATE.search, texts)):
            raise DataError(
                "the row spells special tokens, and holds characters of the private-use planes 15 or 16: these stand "
                "for special tokens while it is tokenised (split_special_tokens)",
                where=origin,
                fix="remove these characters",
            )

    @cached_property
    def _all(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, special_names(self._tokenizer))) or r"(?!)")

    @cached_property
    def _copy(self) -> _Copy:
        return _copied(self._tokenizer, self._policy, self._note)


@dataclass(frozen=True)
class _Copy:
    """A tokenizer whose special tokens are spelled otherwise."""

    masks: MaskTokenizer
    written: Mapping[str, str]
    """special token -> its other spelling, of the same length"""
    numbers: Mapping[int, int]
    """id of an added token in the copy -> its id in the tokenizer"""
    of_words: frozenset[int | None]
    """special tokens that the copy's vocabulary has as a part of words"""
    around: frozenset[int]
    """tokens that it puts around a text"""

    def makes_special(self, ids: Sequence[int]) -> bool:
        """Return True if an id other than those around the text is a special token made of its text."""
        first = int(bool(ids) and ids[0] in self.around)
        last = len(ids) - int(len(ids) > first and ids[-1] in self.around)
        return not self.of_words.isdisjoint(ids[first:last])


def _copied(tokenizer: PreTrainedTokenizerBase, policy: RowPolicy | None, note: Callable[[str], None]) -> _Copy:
    if not tokenizer.is_fast:
        raise ArgumentError(
            "split_special_tokens needs a fast tokenizer (tokenizer.json), and this one is in Python",
            where="split_special_tokens",
            fix="use a fast tokenizer, or delete the line",
        )
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    document = json.loads(tokenizer.backend_tokenizer.to_str())
    added, document["added_tokens"] = document["added_tokens"], []
    names = special_names(tokenizer)
    written = {name: chr(_WRITTEN + place) * len(name) for place, name in enumerate(names)}
    backend = Tokenizer.from_str(json.dumps(document))
    kept = [written.get(each["content"], each["content"]) for each in added]
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    backend.add_tokens(
        [AddedToken(name, **{flag: each[flag] for flag in flags}) for name, each in zip(kept, added, strict=True)]
    )
    numbers = {backend.token_to_id(name) or 0: each["id"] for name, each in zip(kept, added, strict=True)}
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    unknown = {tokenizer.unk_token, getattr(backend.model, "unk_token", None)}  # which other characters may become
    words = (backend.model.token_to_id(name) for name in names if name not in unknown)
    around = frozenset(fast("")["input_ids"])
    return _Copy(MaskTokenizer(fast, policy, note), written, numbers, frozenset(words) - {None}, around)


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings of messages or tools that say something, keys of objects among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in _STEERING or not isinstance(item, str):
                yield name
                yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _replaced(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            name if name in _STEERING else change(name): item
            if name in _STEERING and isinstance(item, str)
            else _replaced(item, change)
            for name, item in value.items()
        }
    return [_replaced(item, change) for item in value] if isinstance(value, Sequence) else value
