"""From rows of every kind to token ids and labels."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from preparing import ListRenderer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from trained_tokenizers import read_template, train_bpe, wrap
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.rendering.tokens import Rendered, _extents_with_blanks
from streamtune.data.row_types import Content, Conversation, Document, PromptCompletion
from streamtune.errors import ArgumentError, DataError

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


def render(tokenizer: PreTrainedTokenizerFast, content: Content, train_on: str = "assistant") -> Rendered:
    return ListRenderer(tokenizer, train_on=train_on, notify=lambda message: None)(content, "x:1")


def trained_text(tokenizer: PreTrainedTokenizerFast, rendered: Rendered) -> str:
    return tokenizer.decode([label for label in rendered.labels if label != IGNORE_INDEX])


def test_document_trains_every_token_and_an_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    rendered = render(tokenizer, Document("The quick brown fox"))
    assert tokenizer.decode(rendered.input_ids) == "The quick brown fox<|im_end|>"
    assert rendered.labels == [IGNORE_INDEX, *rendered.input_ids[1:]]


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("The quick", " brown fox"),
        ("The quick ", "brown fox"),
        ("", "The answer"),
        ("é", "e\u0301"),
        ("a\n", "\n  b \n"),
    ],
)
def test_completion_trains_what_follows_the_prompt(
    make_tokenizer: MakeTokenizer, prompt: str, completion: str, trim_offsets: bool, train_on: str
) -> None:
    tokenizer = make_tokenizer(trim_offsets=trim_offsets)
    rendered = render(tokenizer, PromptCompletion(prompt, completion), train_on)
    whole = tokenizer(prompt + completion)["input_ids"]
    assert rendered.input_ids == [*whole, tokenizer.eos_token_id]
    text = trained_text(tokenizer, rendered)
    assert text.endswith(f"{completion}<|im_end|>") or not prompt
    assert len(text) <= len(completion) + len("<|im_end|>") + 1, "at most one token crosses the border"


def test_completion_trained_on_all(tokenizer: PreTrainedTokenizerFast) -> None:
    rendered = render(tokenizer, PromptCompletion("The quick", " brown fox"), "all")
    assert rendered.labels == [IGNORE_INDEX, *rendered.input_ids[1:]]


def test_the_tokenizers_own_start_and_end_tokens_are_kept_once(bpe: Tokenizer) -> None:
    """Llama starts every text with a token, T5 ends it with one: neither stands for a character."""
    ends = Tokenizer.from_str(bpe.to_str())
    ends.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|im_end|>",
        special_tokens=[(token, bpe.token_to_id(token)) for token in ("<|begin_of_text|>", "<|im_end|>")],
    )
    tokenizer = wrap(ends)
    rendered = render(tokenizer, PromptCompletion("The quick", " brown fox"))
    assert tokenizer.decode(rendered.input_ids) == "<|begin_of_text|>The quick brown fox<|im_end|>"
    assert trained_text(tokenizer, rendered) == " brown fox<|im_end|>"


def test_no_end_token_is_said_once(bpe: Tokenizer) -> None:
    told: list[str] = []
    tokenizer = wrap(bpe, eos_token=None)
    renderer = ListRenderer(tokenizer, train_on="assistant", notify=told.append)
    for text in ("The quick", "brown fox"):
        assert tokenizer.decode(renderer(Document(text), "x:1").input_ids) == text
    assert len(told) == 1
    assert "no EOS token" in told[0]


def test_row_without_trained_tokens_is_refused(bpe: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}>{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer = wrap(bpe, template, eos_token=None)
    chat = Conversation([{"role": "user", "content": "one"}, {"role": "assistant", "content": ""}])
    with pytest.raises(DataError, match="the row has no token to train on") as caught:
        render(tokenizer, chat)
    assert caught.value.where == "x:1"


def test_every_answer_switched_off_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "weight": 0}]
    with pytest.raises(DataError, match="the row has no assistant message to train on"):
        render(tokenizer, Conversation(chat))


def test_answers_before_the_completion_are_context(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["one", "two", "three", "four", "five", "six"]
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    for train_on in ("assistant", "completion"):
        rendered = render(tokenizer, Conversation(chat, first_answer=3), train_on)
        assert trained_text(tokenizer, rendered) == "four<|im_end|>six<|im_end|>"


def test_sentencepiece_like_tokenizer() -> None:
    """A unigram-style vocabulary: a blank belongs to the word after it, there is one at the start that is no text."""
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"], show_progress=False
    )
    words.train_from_iterator(["user assistant The quick brown fox one two three\n"] * 4, trainer)
    tokenizer = wrap(words, read_template("chatml"), pad_token="<unk>", bos_token=None)
    chat = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "quick brown fox"}]
    rendered = render(tokenizer, Conversation(chat))
    trained = [label for label in rendered.labels if label != IGNORE_INDEX]
    pieces = "".join(tokenizer.convert_ids_to_tokens(trained))
    assert pieces == "quick▁brown▁fox<|im_end|>"


def test_tokenizer_without_offsets() -> None:
    """A tokenizer in pure Python: borders are found by tokenising prefixes."""
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    texts = ["Grüße", "世界 1", "two", "second"]
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    rendered = render(tokenizer, Conversation(chat))
    assert not tokenizer.is_fast
    assert trained_text(tokenizer, rendered) == "世界 1</s>second</s>"


def test_extents_of_trimmed_offsets_are_the_untrimmed_ones() -> None:
    """Two tokenizers that differ in ``trim_offsets`` alone: from the trimmed offsets follow the others."""
    trimmed, whole = wrap(train_bpe(trim_offsets=True)), wrap(train_bpe())
    alphabet = [
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "a",
        "The",
        "quick ",
        "<|im_end|>",
        "é",
        "👋🏽",
        "世",
        "\u00a0",
        "\r\n",
        ".",
    ]
    chance = random.Random(0)
    for _ in range(300):
        text = "".join(chance.choices(alphabet, k=chance.randint(1, 14)))
        encoding, expected = (t(text, return_offsets_mapping=True) for t in (trimmed, whole))
        assert _extents_with_blanks(text, encoding["offset_mapping"], encoding.tokens) == expected["offset_mapping"], (
            text
        )


def test_unknown_train_on(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ArgumentError, match="unknown train_on 'user'"):
        ListRenderer(tokenizer, train_on="user", notify=print)
