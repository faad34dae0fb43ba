"""Text tokenised in pieces has the ids of the text tokenised whole, or it is not cut."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from preparing import prepare
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from trained_tokenizers import CORPUS, SPECIAL, read_template, wrap

from streamtune.data.reading.sources import Source
from streamtune.data.rendering import long_text, tokens
from streamtune.data.rendering.long_text import BORDER, LongTextTokenizer, cut_rule
from streamtune.errors import DataError

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "llama3": (LLAMA3,),
    "qwen": (LLAMA3.replace("{1,3}", ""),),
    "o200k": (O200K,),
    "tekken": (TEKKEN,),
    "deepseek": DEEPSEEK,
}
WORDS = [
    *("one", "Two", "DREI", "naïve", "Grüße", "мир", "世界", "かな", "한국", "x", "'s", "'LL", "can't"),
    *("\u0301", "e\u0301", "ﬁ"),
    *(" ", " ", " ", "  ", "\n", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u2028", "\x1c", "\x85"),
    *("   \n  ", "   "),
    *("1", "2024", "12345", ".", "...", "/", "//", "!?", "#", "(a", "{|}", "👋🏽", "<|im_end|>", "\u200d", "-"),
    *("_", "²", "٣"),
]  # fmt: skip


def make(name: str, *, normaliser: Any = None, prefix: bool = False, added: Any = ()) -> Any:
    """A byte-level BPE, trained, with the words of a published one."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normaliser
    if name == "gpt2":
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    else:
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[name]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    draw = random.Random(0)
    bpe.train_from_iterator([*CORPUS * 4, *("".join(draw.choices(WORDS, k=60)) for _ in range(60))], trainer)
    start, end = (bpe.token_to_id(each) for each in ("<s>", "</s>"))
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    tokenizer = wrap(bpe)
    tokenizer.add_tokens(list(added))
    return tokenizer


@pytest.mark.parametrize("name", SPLITS)
def test_pieces_have_the_ids_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "PART_CHARACTERS", 1)
    tokenizer = make(name, normaliser=normalizers.NFC() if name in ("qwen", "gpt2") else None)
    rule = cut_rule(tokenizer)
    assert rule is not None
    draw, cut = random.Random(1), 0
    for _ in range(250):
        text = "".join(draw.choices(WORDS, k=draw.randrange(3, 60)))
        assert list(LongTextTokenizer(tokenizer).ids(text)) == tokenizer(text)["input_ids"], repr(text)
        cut += len(list(LongTextTokenizer(tokenizer)._iter_part_bounds(text, rule))) > 1
    assert cut > 40, "many texts are cut"


def test_every_border_by_itself() -> None:
    """All triples of words around each border: the two sides tokenised alone are the whole."""
    tokenizer = make("llama3", normaliser=normalizers.NFKC())
    for left in WORDS:
        for right in WORDS:
            text = f"{left}a b{right}"
            for match in BORDER.finditer(text):
                sides = (text[: match.start()], text[match.start() :])
                ids = [token for side in sides for token in tokenizer(side, add_special_tokens=False)["input_ids"]]
                assert ids == tokenizer(text, add_special_tokens=False)["input_ids"], repr(text)


def _with(change: Callable[[Any], None]) -> Any:
    tokenizer = make("llama3")
    change(tokenizer)
    return tokenizer


def _set_split(tokenizer: Any, expression: str, behaviour: str = "isolated") -> None:
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(expression), behaviour)


UNPROVEN: dict[str, Callable[[], Any]] = {
    "a blank before the text": lambda: make("gpt2", prefix=True),
    "a token with a blank": lambda: make("llama3", added=["one two"]),
    "no words": lambda: _with(lambda each: setattr(each.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Digits())),
    "another expression": lambda: _with(lambda each: _set_split(each, r"\w+\s\w+|\s+")),
    "without what takes a line break": lambda: _with(lambda each: _set_split(each, r" ?\p{L}+|\s+(?!\S)")),
    "words that are removed": lambda: _with(lambda each: _set_split(each, LLAMA3, "removed")),
    "a normaliser that replaces": lambda: make("llama3", normaliser=normalizers.Replace(" ", "▁")),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_what_is_not_proven_is_not_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "PART_CHARACTERS", 1)
    tokenizer = UNPROVEN[name]()
    assert cut_rule(tokenizer) is None
    text = "one two\nthree four " * 5
    assert list(LongTextTokenizer(tokenizer).ids(text)) == tokenizer(text)["input_ids"]


def long_row(kind: str, size: int) -> dict[str, Any]:
    """A row of some ``size`` characters, half of them trained unless all are."""
    draw = random.Random(2)
    words = [word for text in CORPUS for word in text.split(" ") if word.isascii()]

    def text(length: int) -> str:
        return " ".join(draw.choices(words, k=length // 6))

    if kind == "text":
        return {"text": text(size)}
    if kind == "prompt_completion":
        return {"prompt": text(size // 2), "completion": " " + text(size // 2)}
    roles = ("user", "assistant") * 4
    return {"messages": [{"role": role, "content": text(size // len(roles))} for role in roles]}


MEASURED_IN_FULL = (
    ("text", "split"),
    ("messages", "truncate"),
    ("messages", "error"),
    ("prompt_completion", "drop"),
)


@pytest.mark.parametrize(
    ("kind", "overlength"),
    [
        pytest.param(*case, marks=pytest.mark.full if case in MEASURED_IN_FULL else pytest.mark.slow)
        for case in product(("text", "messages", "prompt_completion"), ("truncate", "split", "drop", "error"))
    ],
)
def test_memory_of_a_long_row(kind: str, overlength: str, tmp_path: Path) -> None:
    """Reading, rendering, tokenising and fitting a row takes ten bytes for each of its own, and one piece."""
    tokenizer = make("llama3")
    tokenizer.chat_template = read_template("chatml")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(long_row(kind, 8 << 20)) + "\n")
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"text": "another row"}) + "\n")
    size, limit = path.stat().st_size, 10**9 if overlength == "error" else 4096
    program = tmp_path / "measure.py"
    program.write_text(MEASURE)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = [sys.executable, str(program), str(tmp_path / "tokenizer"), str(path), str(short), str(limit), overlength]
    grown, longest = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2:]
    assert int(longest) > size / 6
    assert int(grown) < 10 * size + (24 << 20), f"{int(grown) / size:.1f} bytes for each of the row"


MEASURE = """
import resource, sys
from transformers import AutoTokenizer
from streamtune.data import DataOptions, prepare
from streamtune.data.reading.sources import Source

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

folder, path, short, limit, overlength = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
prepare([Source(short)], tokenizer, DataOptions(max_length=64))
before = peak()
options = DataOptions(max_length=int(limit), overlength=overlength)
found = prepare([Source(path), Source(short)], tokenizer, options)
print(peak() - before, found.report.length_percentiles["max"])
"""


@pytest.mark.parametrize("kind", ["text", "messages", "prompt_completion"])
def test_a_row_that_is_left_out_is_not_read_to_its_end(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_text, "PART_CHARACTERS", 1 << 10)
    monkeypatch.setattr(tokens, "STOP", 1 << 14)
    tokenizer = make("llama3")
    tokenizer.chat_template = read_template("chatml")
    path = tmp_path / "rows.jsonl"
    rows = [long_row(kind, 1 << 17), long_row(kind, 1 << 10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exact = prepare([Source(str(path))], tokenizer, max_length=10**6).report
    read: list[int] = []
    monkeypatch.setattr(LongTextTokenizer, "_encode", _counted(LongTextTokenizer._encode, read))
    told: list[str] = []
    found = prepare([Source(str(path))], tokenizer, max_length=1000, overlength="drop", notify=told.append).report
    assert sum(read) < 1 << 13, "a few pieces of 1,024 characters, of 128 in all"
    assert (found.dropped, found.estimated) == (1, 1)
    assert found.length_percentiles["max"] == pytest.approx(exact.length_percentiles["max"], rel=0.05)
    assert found.tokens_lost == found.length_percentiles["max"]
    lost = exact.supervised_tokens - found.supervised_tokens
    assert found.supervised_tokens_lost == pytest.approx(lost, rel=0.1)
    assert "; about " in told[-1]
    assert "; about " in found.describe()
    with pytest.raises(DataError, match="the longest has about ") as caught:
        prepare([Source(str(path))], tokenizer, max_length=1000)
    assert caught.value.where == f"{path}:1"
    monkeypatch.setattr(tokens, "STOP", 1 << 30)
    whole = prepare([Source(str(path))], tokenizer, max_length=1000, overlength="drop").report
    assert (whole.estimated, whole.length_percentiles) == (0, exact.length_percentiles)


def _counted(encode: Any, read: list[int]) -> Any:
    def counted(made: LongTextTokenizer, text: str, *arguments: Any, **options: Any) -> Any:
        read.append(len(text))
        return encode(made, text, *arguments, **options)

    return counted
