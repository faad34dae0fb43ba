"""Tokens that spell their text: the trained ones are those that the tokenizer's character offsets give."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from streamtune.data.rendering.chat import ChatTurn
from streamtune.data.rendering.tokens import (
    ByteSpeller,
    MarkedText,
    MaskTokenizer,
    _extents_with_blanks,
    _make_mask,
    _offset_array,
)

WORDS = ("one", " two", "  ", "\n", "é", "e\u0301", "日本", "🙂", "👩‍👩‍👧", "<|end|>", "ß", "\u0958", " x", "\t", "a1")


def train(normalizer: Any = None, *, trims: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that knows few words: characters of several bytes fall into several tokens."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    backend.train_from_iterator(["one two one two 日本 é é"] * 9, trainer)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trims)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


TOKENIZERS = {
    "plain": train(),
    "trimmed offsets": train(trims=True),
    "composing": train(normalizers.NFC()),
    "lower case": train(normalizers.Lowercase()),
}


def draw_text(draw: random.Random) -> tuple[str, list[ChatTurn]]:
    """Return a text, and spans of it in order."""
    text = "".join(draw.choice(WORDS) for _ in range(draw.randint(1, 30)))
    places = sorted(draw.randint(0, len(text)) for _ in range(2 * draw.randint(0, 4)))
    return text, [ChatTurn(start, end) for start, end in zip(places[::2], places[1::2], strict=True)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_trained_tokens_are_those_of_the_offsets(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    draw, tokenize = random.Random(0), MaskTokenizer(tokenizer)
    for _ in range(300):
        text, turns = draw_text(draw)
        encoding = tokenizer(text, return_offsets_mapping=True)
        names = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
        extents = _extents_with_blanks(text, encoding["offset_mapping"], lambda: names)  # noqa: B023
        expected = _make_mask(_offset_array(extents), [turn.start for turn in turns], [turn.end for turn in turns])
        found = tokenize(MarkedText(text, turns, "x:1", add_special_tokens=False))
        assert found.trained.tolist() == expected.tolist(), (text, turns)


@pytest.mark.parametrize(
    ("name", "text"), [("plain", "One é 🙂"), ("composing", "One é 🙂"), ("lower case", "one é 🙂")]
)
def test_bytes_of_tokens_are_compared_with_the_text(name: str, text: str) -> None:
    speller = ByteSpeller(TOKENIZERS[name].backend_tokenizer)
    ids = TOKENIZERS[name](text)["input_ids"]
    mask = speller.mask_spans(ids, text, [4], [5])
    assert mask is not None
    assert TOKENIZERS[name].decode(np.array(ids)[mask]).strip() == "é"
    assert speller.mask_spans(ids, text.replace("é", "è"), [4], [5]) is None
    assert speller.mask_spans([*ids, ids[0]], text, [4], [5]) is None


def test_of_other_tokenizers_nothing_is_found() -> None:
    words = Tokenizer(models.WordLevel({"one": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert ByteSpeller(words).mask_spans([0], "one", [0], [3]) is None
    backend = TOKENIZERS["lower case"].backend_tokenizer
    assert ByteSpeller(backend).mask_spans(backend.encode("One").ids, "One", [0], [3]) is None


def test_a_token_that_takes_blanks_does_not_spell_them() -> None:
    backend = Tokenizer.from_str(TOKENIZERS["plain"].backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken("<|call|>", lstrip=True, add_special_tokens=True)])
    speller = ByteSpeller(backend)
    assert speller.mask_spans(backend.encode("one<|call|>").ids, "one<|call|>", [0], [3]) is not None
    assert speller.mask_spans(backend.encode("one  <|call|>").ids, "one  <|call|>", [0], [3]) is None
