# ruff: noqa: E501 (reports are one line each)
"""Fingerprints and reports of prepared data, written out: a run is resumed only if its data has the same fingerprint.

The tokenizer has the 256 bytes and three tokens of its own, and no merges: it is the same with any version of any
library. A value here changes only where the data that is trained on changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preparing import prepare, prepare_preferences, prepare_prompts, prepare_unpaired
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trained_tokenizers import read_template
from transformers import PreTrainedTokenizerFast

from streamtune.data import Source

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CHATS: list[dict[str, Any]] = [
    {"messages": [turn("user", f"What is {n}?"), turn("assistant", f"It is {n * n}." * (1 + n % 3))]} for n in range(12)
] + [{"messages": [turn("system", "Be brief."), turn("user", "a"), turn("assistant", "b"), turn("user", "ü, 'é"),
                   turn("assistant", "c")]}]  # fmt: skip
PAIRS = [{"prompt": f"{n} plus one is", "completion": f" {n + 1}" * (n + 1)} for n in range(8)]
TEXTS = [{"text": f"line {n}\n" * (n + 1)} for n in range(9)]
PREFERENCES = [{"prompt": f"Say {n}:", "chosen": f" {n}", "rejected": f" {n + 1} or so" * (n + 1)} for n in range(8)]
SCORED = [
    {"prompt": f"p{n}", "chosen": "yes", "rejected": "no", "score_chosen": n % 3, "score_rejected": 1} for n in range(6)
]
UNPAIRED = [{"prompt": f"q{n // 2}", "completion": f"a{n}", "label": n % 2 == 0} for n in range(8)]
PROMPTS = [{"prompt": f"Compute {n} * {n}" + "." * n, "answer": n * n, "level": None} for n in range(10)]
ASKED = [{"messages": [turn("user", f"ask {n}"), turn("assistant", f"told {n}")], "n": n} for n in range(5)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = read_template("chatml")
    return made


Case = tuple[Callable[..., Any], list[dict[str, Any]], dict[str, Any]]

CASES: dict[str, Case] = {
    "chats": (prepare, CHATS, {"max_length": 256}),
    "chats, last turn": (prepare, CHATS, {"max_length": 256, "train_on": "completion", "val_size": 3}),
    "chats, packed": (prepare, CHATS, {"max_length": 256, "packing": True, "val_size": 0.2, "seed": 7}),
    "pairs, truncated": (prepare, PAIRS, {"max_length": 24, "overlength": "truncate", "truncate_side": "right"}),
    "texts, split": (
        prepare,
        TEXTS,
        {"max_length": 20, "overlength": "split", "split_at": "token", "train_on": "all", "val_size": 2},
    ),
    "texts, dropped": (prepare, TEXTS, {"max_length": 40, "overlength": "drop", "train_on": "all"}),
    "preferences": (prepare_preferences, PREFERENCES, {"max_length": 256, "val_size": 2}),
    "preferences, truncated": (
        prepare_preferences,
        PREFERENCES,
        {"max_length": 24, "max_prompt_length": 5, "overlength": "truncate"},
    ),
    "preferences, scored": (prepare_preferences, SCORED, {"max_length": 64, "identical_pairs": "drop"}),
    "unpaired": (prepare_unpaired, UNPAIRED, {"max_length": 64, "val_size": 0.25}),
    "pairs as unpaired": (prepare_unpaired, PREFERENCES, {"max_length": 48, "overlength": "drop"}),
    "prompts": (prepare_prompts, PROMPTS, {"max_prompt_length": 64, "val_size": 3}),
    "prompts, truncated": (prepare_prompts, PROMPTS, {"max_prompt_length": 16, "overlength": "truncate"}),
    "prompts of messages": (prepare_prompts, ASKED, {"max_prompt_length": 128, "seed": 3, "val_size": 1}),
}

EXPECTED: dict[str, tuple[str, str]] = {
    "chats": (
        "d7c8938fd444bc3fe5806343d0aa25d2c6d445bc0b72105425d3c32416328b04",
        "13 rows; 13 to train on; 659 tokens, 230 of them trained; lengths 39 to 71, median 49",
    ),
    "chats, last turn": (
        "917b9c1f31d1f204278279511795f7b101b6744cf4b5d9813bbe2260dd869f59",
        "13 rows; 10 to train on; 3 held out; 659 tokens, 228 of them trained; lengths 39 to 71, median 49",
    ),
    "chats, packed": (
        "7f0b11a2ddfec6bb3d946d3e719bfa9b074c74940315e324dbbbe998721d9007",
        "13 rows; 10 to train on; 3 held out; packed into 2 sequences, 98.2% full; 659 tokens, 230 of them trained; lengths 39 to 71, median 49",
    ),
    "pairs, truncated": (
        "5c14e88e1334acf598d77ed1c5b5b52e5b55bbfd43009ecbf6ca8959d805563c",
        "8 rows; 3 truncated; 8 to train on; 172 tokens, 68 of them trained; 12 tokens lost (6.5% of all); 12 trained tokens lost; lengths 16 to 30, median 24 before they were cut",
    ),
    "texts, split": (
        "017ef6e007460dc5e9846013d5ee6f3e3da3930df4810ead9ecffaf6bb7b5cf7",
        "9 rows; 7 split; 16 to train on; 5 held out; 324 tokens, 303 of them trained; 12 trained tokens lost; lengths 8 to 64, median 36 before they were cut",
    ),
    "texts, dropped": (
        "4e2bcd728e08d1485129931293b6e0396a74c190fe5a200165ce6cdf09fdbd66",
        "9 rows; 5 kept; 4 dropped; 5 to train on; 110 tokens, 105 of them trained; 214 tokens lost (66% of all); 210 trained tokens lost; lengths 8 to 64, median 36",
    ),
    "preferences": (
        "ae53e437eead13cc567aaa62e840bdcf702af5d8fc30129667c6e985694a38de",
        "8 rows; 6 to train on; 2 held out; prompts 6 to 6, median 6; chosen 3 to 3, median 3; rejected 9 to 65, median 41; 416 tokens, 368 with shared beginnings counted once, 320 trained",
    ),
    "preferences, truncated": (
        "8712afee651c6d8bb881940307c2019db7dc10b27cf62d134b7d1f25dbadf5e8",
        "8 rows; 8 truncated; 8 to train on; prompts 6 to 6, median 6; chosen 3 to 3, median 3; rejected 9 to 65, median 41; 244 tokens, 204 with shared beginnings counted once, 164 trained; 172 tokens lost (41% of all); 156 trained tokens lost",
    ),
    "preferences, scored": (
        "cefb0719b39ec962c6703021cd039a3e4f4df1f4f53fbbd91517b732bd8facb1",
        "6 rows; 6 to train on; prompts 2 to 2, median 2; chosen 4 to 4, median 4; rejected 3 to 3, median 3; 66 tokens, 60 with shared beginnings counted once, 42 trained",
    ),
    "unpaired": (
        "34e78c307fde01b84c5bc8afb30627ba4f5b4eac83cef4883e411f0248472e3a",
        "8 rows; 6 to train on; 2 held out; prompts 2 to 2, median 2; desirable 3 to 3, median 3; undesirable 3 to 3, median 3; 40 tokens, 24 trained",
    ),
    "pairs as unpaired": (
        "006a5331e36754c036dc7d237d79d448c49deacc1b4f1e430a8e934d66925c94",
        "8 rows; 5 kept; 3 dropped; 5 to train on; prompts 6 to 6, median 6; desirable 3 to 3, median 3; undesirable 9 to 65, median 41; 200 tokens, 170 with shared beginnings counted once, 140 trained; 216 tokens lost (52% of all); 180 trained tokens lost",
    ),
    "prompts": (
        "6eca38b1e70cfdb5eebd85c62965b6ee6704e66304f4d8cdc7e40cc9bfd6ae55",
        "10 rows; 7 to train on; 3 held out; prompts 13 to 22, median 18; 175 tokens",
    ),
    "prompts, truncated": (
        "bd156d7d6d9045f721b891e8f0b3d3c2e84d1ad5ffa2ff60b4c019db95764aee",
        "10 rows; 6 truncated; 10 to train on; prompts 13 to 22, median 18; 154 tokens; 21 tokens lost (12% of all)",
    ),
    "prompts of messages": (
        "8395b887f5346aad4280c1bbdd772c7d9026a3f0f6c93e2a18221c11f4a1595e",
        "5 rows; 4 to train on; 1 held out; prompts 24 to 24, median 24; 120 tokens",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_data(name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    make, rows, options = CASES[name]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    prepared = make([Source(str(path))], tokenizer, **options)
    assert (prepared.fingerprint, prepared.report.describe()) == EXPECTED[name]
