"""Rows over the length: what a cut keeps, where a row is split, what is lost, to the token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preparing import prepare
from trained_tokenizers import read_template, train_bpe, wrap
from transformers import PreTrainedTokenizerFast

from streamtune.data import PreparedData
from streamtune.data.fit.row_fit import TokenSpan, largest_untrained_length, last_trained_run, split_row, truncate_row
from streamtune.data.options import SPLIT_AT, RowPolicy
from streamtune.data.reading.sources import Source
from streamtune.errors import ArgumentError, DataError

Prepare = Callable[..., PreparedData]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return wrap(train_bpe(), read_template("chatml"))


@pytest.fixture
def made(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Prepare:
    def run(*rows: dict[str, Any], **options: Any) -> PreparedData:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return prepare([Source(str(path))], options.pop("tokenizer", tokenizer), **options)

    return run


def texts(tokenizer: Any, data: PreparedData) -> list[str]:
    return [tokenizer.decode(example.input_ids) for example in data.training]


def trained_texts(tokenizer: Any, data: PreparedData) -> list[str]:
    return [tokenizer.decode([label for label in example.labels if label != -100]) for example in data.training]


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def mask(text: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.array([each == "x" for each in text])


# --- what a cut keeps -------------------------------------------------------------------------------------------------

CUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    # mask, options, what is kept: the place of each token, those that a part begins with in brackets
    "right": ("..xx....", {"truncate_side": "right"}, "[0]123"),
    "left": (".x....xx", {"truncate_side": "left"}, "[4]567"),
    "left, head": (".x....xx", {"truncate_side": "left", "head": 1}, "[0][5]67"),
    "left, head over half": (".x....xx", {"truncate_side": "left", "head": 3}, "[4]567"),
    "left, head instead of the answer": (".....x...", {"truncate_side": "left", "head": 2}, "[5]678"),
    "middle": ("xx....xx", {"truncate_side": "middle"}, "[0]1[6]7"),
    "middle, answer needs more": (".......xx", {"truncate_side": "middle", "answer": True}, "[0][6]78"),
    "middle, answer fits": ("........x", {"truncate_side": "middle", "answer": True}, "[0]1[7]8"),
    "middle, answer too long": ("..xxxxxxx", {"truncate_side": "middle", "answer": True}, "[0]1[7]8"),
    "auto, document": (".xxxxxxx", {}, "[0]123"),
    "auto, answer fits": ("......xxx", {"answer": True}, "[5]678"),
    "auto, answer fits with nothing before it": (".....xxxx", {"answer": True}, "[3]456"),
    "auto, short prompt": (".xxxxxxxx", {"answer": True}, "[0]123"),
    "auto, head and a long answer": ("......xxxx", {"answer": True, "head": 1}, "[0][5]67"),
    "auto, head": (".x.....xx", {"answer": True, "head": 1}, "[0][6]78"),
}


@pytest.mark.parametrize("name", CUTS)
def test_cut(name: str) -> None:
    text, options, expected = CUTS[name]
    side = options.get("truncate_side", "auto")
    policy = RowPolicy(4, "truncate", side)
    prefix, answer = options.get("head", 0), options.get("answer", False)
    parts = truncate_row(mask(text), policy, prefix_length=prefix, has_answer=answer)
    shown = ""
    for part in parts:
        places = [str(place) for place in range(part.start, part.stop)]
        shown += f"[{places[0]}]" + "".join(places[1:])
    assert shown == expected
    assert sum(part.stop - part.start for part in parts) == 4
    assert all(part.context == 1 for part in parts)


def test_random_cuts() -> None:
    """A cut has the length; the answer stays whole if it fits; what leaves nothing trained is known before."""
    draw = random.Random(4)
    for _ in range(1500):
        size = draw.randrange(3, 40)
        most = draw.randrange(2, size)
        trained = np.array([False, *(draw.random() < 0.4 for _ in range(size - 1))])
        if not trained.any():
            continue
        side = draw.choice(("auto", "left", "right", "middle"))
        has_answer, policy = draw.random() < 0.7, RowPolicy(most, "truncate", side)
        parts = truncate_row(trained, policy, prefix_length=0, has_answer=has_answer)
        assert sum(part.stop - part.start for part in parts) == most
        kept = np.zeros(size, dtype=np.bool_)
        for part in parts:
            kept[part.start + part.context : part.stop] = True
        untrained = largest_untrained_length(trained, policy, has_answer=has_answer)
        assert bool((kept & trained).any()) is (most > untrained), (
            trained.tolist(), most, side, has_answer,
        )  # fmt: skip
        start, stop = last_trained_run(trained)
        if has_answer and side != "right" and size - start < most:
            assert kept[start:stop].all(), "the last answer fits and is there whole"
        if has_answer and side == "auto":
            assert kept[start], "the beginning of the last answer stays"


def test_a_prompt_is_cut_and_not_the_answer(made: Prepare, tokenizer: Any) -> None:
    row = {"prompt": "What is the capital? " * 40, "completion": "Paris is the capital."}
    data = made(row, max_length=24, overlength="truncate")
    assert trained_texts(tokenizer, data) == [" Paris is the capital.<|im_end|>"]
    assert data.report.supervised_tokens_lost == 0
    assert made(row, max_length=24, overlength="truncate", truncate_side="middle").report.kept == 1
    with pytest.raises(DataError, match="no row is left"):
        made(row, max_length=24, overlength="truncate", truncate_side="right")


def test_an_answer_that_is_too_long_keeps_its_beginning(made: Prepare, tokenizer: Any) -> None:
    row = {"prompt": "Why? ", "completion": "The quick brown fox jumps over the lazy dog. " * 20}
    (whole,) = made(row, max_length=10_000).training
    data = made(row, max_length=30, overlength="truncate")
    assert list(data.training[0].input_ids) == list(whole.input_ids)[:30]
    left = made(row, max_length=30, overlength="truncate", truncate_side="left")
    assert list(left.training[0].input_ids) == list(whole.input_ids)[-30:]
    lost = data.report.supervised_tokens_lost
    assert lost == sum(label != -100 for label in whole.labels) - data.report.supervised_tokens


@pytest.mark.parametrize("side", ["auto", "left", "middle"])
def test_the_system_message_stays(side: str, made: Prepare, tokenizer: Any) -> None:
    turns = [("user", "What is the capital of France? " * 8), ("assistant", "Paris."), ("user", "Why " * 30)]
    row = chat(("system", "Answer."), *turns, ("assistant", "The answer is 42."))
    told: list[str] = []
    data = made(row, max_length=48, overlength="truncate", truncate_side=side, notify=told.append)
    (text,) = texts(tokenizer, data)
    assert text.startswith("<|im_start|>system\nAnswer.<|im_end|>\n")
    assert text.endswith("Why <|im_end|>\n<|im_start|>assistant\nThe answer is 42.<|im_end|>\n")
    assert "The answer is 42.<|im_end|>" in trained_texts(tokenizer, data)[0]
    assert not [each for each in told if "system message" in each]


def test_a_system_message_that_is_lost_is_told_of(made: Prepare) -> None:
    told: list[str] = []
    row = chat(("system", "Answer in one word. " * 30), ("user", "Why " * 30), ("assistant", "The answer is 42."))
    made(row, max_length=48, overlength="truncate", notify=told.append)
    assert told[-1].startswith("1 truncated row has lost the system message: ")
    gemma = wrap(train_bpe(), read_template("gemma3"))
    row = chat(("system", "Answer."), ("user", "Why " * 60), ("assistant", "The answer is 42."))
    made(row, max_length=48, overlength="truncate", notify=told.append, tokenizer=gemma)
    assert told[-1].startswith("1 truncated row has lost the system message: ")


# --- where a row is split ---------------------------------------------------------------------------------------------


def kept(start: int, stop: int, context: int = 1) -> TokenSpan:
    return TokenSpan(start, stop, context)


SPLITS: dict[str, tuple[str, dict[str, Any], list[TokenSpan]]] = {
    # the borders before each token (t line, p paragraph, u turn: any other character is none), options, pieces
    "tokens": ("0123456789", {}, [kept(0, 4), kept(4, 8), kept(8, 10)]),
    "lines": ("0123l5l789", {"split_at": "line"}, [kept(0, 4), kept(4, 6), kept(6, 10)]),
    "a line too early": ("0l23456789", {"split_at": "line"}, [kept(0, 4), kept(4, 8), kept(8, 10)]),
    "a paragraph before a line": ("01pl45678", {}, [kept(0, 2), kept(2, 6), kept(6, 9)]),
    "a paragraph is a line": ("01pl45678", {"split_at": "line"}, [kept(0, 3), kept(3, 7), kept(7, 9)]),
    "a turn, early": ("01u3p5678", {}, [kept(0, 2), kept(2, 4), kept(4, 8), kept(8, 9)]),
    "nothing before a turn is trained": ("0u2pl5678", {"mask": "..xxxxxxx"}, [kept(0, 3), kept(3, 7), kept(7, 9)]),
    "overlap": ("0123456789", {"split_overlap": 1}, [kept(0, 4), kept(3, 7), kept(6, 10)]),
    "overlap, lines": ("01l345l789", {"split_overlap": 2, "split_at": "line"},
                       [kept(0, 2), kept(0, 4, 2), kept(2, 6, 2), kept(4, 8, 2), kept(6, 10, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_split(name: str) -> None:
    borders, options, expected = SPLITS[name]
    kinds = {"l": "line", "p": "paragraph", "u": "turn"}
    breaks = np.array([SPLIT_AT.index(kinds.get(each, "token")) for each in borders], dtype=np.uint8)
    options = dict(options)
    trained = mask(options.pop("mask", "x" * len(borders)))
    assert split_row(trained, RowPolicy(4, "split", **options), breaks) == expected


def test_a_chat_is_split_between_exchanges(made: Prepare, tokenizer: Any) -> None:
    turns: list[tuple[str, str]] = [("system", "Answer.")]
    for n in range(12):
        turns += [("user", f"What is {n}? {'Why ' * n}"), ("assistant", f"The answer is {n}.\n\n{'again ' * n}")]
    data = made(chat(*turns), max_length=120, overlength="split")
    found = texts(tokenizer, data)
    assert all(text.startswith("<|im_start|>user\n") for text in found[1:])
    assert all(text.endswith("<|im_end|>\n") for text in found)
    assert data.report.supervised_tokens_lost == 0
    everything = made(chat(*turns), max_length=120, overlength="split", train_on="all")
    assert texts(tokenizer, everything) == found, "train_on: all is split at the same places"
    tools = chat(("user", "one?"), ("assistant", "two " * 20), ("tool", "three " * 20), ("assistant", "four " * 20))
    pieces = texts(tokenizer, made(tools, max_length=90, overlength="split"))
    assert not any(text.startswith("<|im_start|>tool") for text in pieces), "a tool's answer ends no exchange"


def test_a_document_is_split_between_paragraphs_then_lines(made: Prepare, tokenizer: Any) -> None:
    text = "".join(f"The fox {n} jumps.\nAgain {n}.\n\n    And  {n}.\r\n\r\n" for n in range(30))
    paragraphs = texts(tokenizer, made({"text": text}, max_length=64, overlength="split"))
    assert "".join(paragraphs) == text + "<|im_end|>"
    assert all(piece.endswith(("\n\n", "\n\r\n", "\n\n    ")) for piece in paragraphs[:-1])
    lines = texts(tokenizer, made({"text": text}, max_length=64, overlength="split", split_at="line"))
    assert all(piece.rstrip(" ").endswith("\n") for piece in lines[:-1])
    assert len(lines) <= len(paragraphs)
    tokens = made({"text": text}, max_length=64, overlength="split", split_at="token").training
    assert {len(example.input_ids) for example in tokens[:-1]} == {64}


WORDS = ("The quick", " fox", "\n", "\n\n", " jumps", " 42", ".", "Grüße", " 世界", "👋🏽", "\r\n\r\n", "    ")


def random_row(draw: random.Random, kind: str) -> dict[str, Any]:
    def text(low: int = 1) -> str:
        return "a" + "".join(draw.choices(WORDS, k=draw.randrange(low, 60)))

    if kind == "text":
        return {"text": text(5)}
    if kind == "prompt_completion":
        return {"prompt": text(), "completion": text()}
    turns = [("system", "Answer.")] if draw.random() < 0.5 else []
    for _ in range(draw.randrange(1, 6)):
        turns += [("user", text()), ("assistant", text())]
    return chat(*turns)


@pytest.mark.parametrize("kind", ["text", "prompt_completion", "messages"])
@pytest.mark.parametrize("overlap", [0, 1, 7])
def test_trained_tokens_are_counted(kind: str, overlap: int, made: Prepare) -> None:
    """Of random rows: trained in the pieces and lost are those of the whole; each has the context that it should."""
    draw = random.Random(f"{kind} {overlap}")
    rows = [random_row(draw, kind) for _ in range(30)]
    whole = {example.origin: example for example in made(*rows, max_length=100_000).training}
    for split_at in ("turn", "line", "token"):
        most = draw.randrange(16, 80)
        options = {"overlength": "split", "split_at": split_at, "split_overlap": overlap}
        data = made(*rows, max_length=most, **options)
        report = data.report
        trained = sum(int((np.asarray(example.labels) != -100).sum()) for example in whole.values())
        assert report.supervised_tokens + report.supervised_tokens_lost == trained
        assert report.tokens - report.tokens_repeated + report.tokens_lost == sum(
            len(example.input_ids) for example in whole.values()
        )
        if overlap:
            assert report.supervised_tokens_lost == 0
        places: dict[str, int] = {}
        for piece in data.training:
            row = whole[piece.origin]
            ids, labels = np.asarray(row.input_ids), np.asarray(row.labels)
            own, size = np.asarray(piece.labels), len(piece.input_ids)
            assert size <= most
            first = int((own != -100).argmax())
            start = next(
                start
                for start in range(places.get(piece.origin, 0), len(ids) - size + 1)
                if (ids[start : start + size] == piece.input_ids).all()
                and (own[first:] == labels[start + first : start + size]).all()
            )
            assert first >= min(start, max(overlap, 1)) or start == 0, "no less context than it says"
            places[piece.origin] = start + 1


@pytest.mark.parametrize("side", ["auto", "left", "right", "middle"])
def test_tokens_lost_by_a_cut_are_counted(side: str, made: Prepare) -> None:
    draw = random.Random(side)
    rows = [random_row(draw, "messages") for _ in range(30)]
    whole = made(*rows, max_length=100_000).report
    cut = made(*rows, max_length=50, overlength="truncate", truncate_side=side).report
    assert cut.tokens + cut.tokens_lost == whole.tokens
    assert cut.supervised_tokens + cut.supervised_tokens_lost == whole.supervised_tokens
    assert cut.sources[0].supervised_tokens_lost == cut.supervised_tokens_lost > 0


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "overlap as long as a piece": (
        {"overlength": "split", "split_overlap": 8},
        "must be below max_length = 8, found 8",
    ),
    "negative": ({"overlength": "split", "split_overlap": -1}, "split_overlap must be at least 0, found -1"),
    "overlap without split": (
        {"overlength": "truncate", "split_overlap": 2},
        "needs overlength: split, found 'truncate'",
    ),
    "unknown side": ({"overlength": "truncate", "truncate_side": "top"}, "unknown truncate_side 'top'"),
    "unknown border": ({"overlength": "split", "split_at": "word"}, "unknown split_at 'word'"),
    "unknown handling": ({"overlength": "cut"}, "unknown overlength 'cut'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values(name: str, made: Prepare) -> None:
    options, message = HOSTILE[name]
    with pytest.raises(ArgumentError, match=message):
        made({"text": "one"}, max_length=8, **options)


def test_as_short_as_can_be(made: Prepare) -> None:
    """Of two tokens a piece, each with one of context, every token is trained once."""
    row = {"text": "The quick brown fox jumps over the lazy dog."}
    (whole,) = made(row, max_length=1000).training
    data = made(row, max_length=2, overlength="split", split_overlap=1)
    assert [label for example in data.training for label in example.labels if label != -100] == list(whole.input_ids)[
        1:
    ]
