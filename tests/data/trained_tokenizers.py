"""Real tokenizers trained on the spot, and the chat templates of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<s>", "</s>"),
    *("<|start_header_id|>", "<|end_header_id|>"),
]

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n\nAnd  again:   the answer is 42.\n",
    "user assistant system\nWhat is the capital of France? Paris is the capital of France.\n\n\n",
    "def answer(question):\n    return 'Grüße, 世界! 👋🏽 naïve café'\n",
]


def train_bpe(*, trim_offsets: bool = False, normalise: bool = False, special: list[str] = SPECIAL) -> Tokenizer:
    """A byte-level BPE. ``trim_offsets`` as in Llama 3 and GPT-2, ``normalise`` (NFC) as in Qwen."""
    bpe = Tokenizer(models.BPE())
    if normalise:
        bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if trim_offsets:
        bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS * 4, trainer)
    return bpe


def wrap(tokenizer: Tokenizer, template: str | None = None, **options: Any) -> PreTrainedTokenizerFast:
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<|begin_of_text|>", **options}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **settings)


def read_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
