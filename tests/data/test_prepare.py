"""From files to examples, end to end, with a real tokenizer."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparing import prepare
from transformers import PreTrainedTokenizerFast

from streamtune.data import DataReport, Example, PreparedData, Source, iter_texts
from streamtune.errors import ArgumentError, DataError

Write = Callable[..., str]


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def prepared(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PreparedData]:
    def run(*paths: str, **options: Any) -> PreparedData:
        return prepare([Source(path) for path in paths], tokenizer, **{"max_length": 64, "seed": 1, **options})

    return run


Prepared = Callable[..., PreparedData]


def decoded(tokenizer: PreTrainedTokenizerFast, examples: Any) -> list[str]:
    return [tokenizer.decode(example.input_ids) for example in examples]


def test_rows_become_examples(prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    told: list[str] = []
    chats = write("chats.jsonl", [chat("one?", "The answer 1"), chat("two?", "The answer 2")])
    pairs = write("pairs.csv", "prompt,completion\nThe quick, brown fox\n")
    data = prepared(chats, pairs, notify=told.append)
    assert told == [f"{chats}: detected row type 'messages'", f"{pairs}: detected row type 'prompt_completion'"]
    assert decoded(tokenizer, data.training) == [
        "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\nThe answer 1<|im_end|>\n",
        "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\nThe answer 2<|im_end|>\n",
        "The quick brown fox<|im_end|>",
    ]
    assert [example.origin for example in data.training] == [f"{chats}:1", f"{chats}:2", f"{pairs}:2"]
    assert len(data.validation) == 0
    example = data.training[2]
    assert example.input_ids.dtype == example.labels.dtype == np.int32
    assert tokenizer.decode(example.labels[example.labels != -100]) == " brown fox<|im_end|>"


def test_examples_are_a_sequence(prepared: Prepared, write: Write) -> None:
    data = prepared(write("a.jsonl", [{"text": f"The answer {n}"} for n in range(5)]))
    assert [example.origin[-2:] for example in data.training[1:4]] == [":2", ":3", ":4"]
    assert data.training[-1].origin.endswith(":5")
    assert isinstance(data.training[np.int64(2)], Example)
    with pytest.raises(IndexError):
        data.training[5]


def test_report(prepared: Prepared, write: Write) -> None:
    data = prepared(write("a.jsonl", [{"text": "a" * n} for n in range(1, 101)]), max_length=200, val_size=0.1)
    lengths = [len(example.input_ids) for part in (data.training, data.validation) for example in part]
    expected: dict[str, Any] = {
        "rows": 100,
        "kept": 100,
        "truncated": 0,
        "dropped": 0,
        "split": 0,
        "pieces_dropped": 0,
        "train_examples": 90,
        "validation_examples": 10,
        "tokens": sum(lengths),
        "supervised_tokens": sum(lengths) - 100,
        "length_percentiles": {"min": 2, "p50": 52, "p90": 92, "p95": 97, "p99": 101, "max": 101},
        "packs": 0,
        "pack_fill": 0.0,
        "shared_tokens": 0,
        "tokens_lost": 0,
        "supervised_tokens_lost": 0,
        "tokens_repeated": 0,
        "pieces": 0,
        "piece_tokens_lost": 0,
        "piece_targets_lost": 0,
        "estimated": 0,
        "duplicates": 0,
        "special_rows": 0,
        "held_out_duplicates": 0,
    }
    shared = ("rows", "kept", "truncated", "dropped", "split", "tokens", "supervised_tokens")
    shared += ("tokens_lost", "supervised_tokens_lost")
    source = {name: expected[name] for name in (*shared, "length_percentiles")}
    visited = {"epoch_rows": 90, "epoch_tokens": sum(len(example.input_ids) for example in data.training)}
    mixture = {"weight": None, "evaluates": None, **visited}
    expected["sources"] = [{"path": data.report.sources[0].path, "name": None, **source, **mixture}]
    assert json.loads(json.dumps(data.report.to_json())) == expected
    assert data.report.describe().startswith("100 rows; 90 to train on; 10 held out; ")


def test_too_long_rows_are_refused_with_their_number_and_the_longest(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [{"text": "a" * n} for n in (10, 70, 500, 63, 64)])
    with pytest.raises(DataError, match=re.escape("3 rows have more than max_length = 64 tokens")) as caught:
        prepared(path)
    assert "the longest has 501" in caught.value.what
    assert caught.value.where == f"{path}:3"
    assert "set max_length to 501" in caught.value.fix


def test_truncate_keeps_the_start(prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    told: list[str] = []
    path = write("a.jsonl", [{"text": "bad" * 50}, {"text": "a"}])
    data = prepared(path, overlength="truncate", notify=told.append)
    assert decoded(tokenizer, data.training)[0] == ("bad" * 50)[:64]
    assert told[-1] == "1 of 2 rows exceed 64 tokens: 1 truncated; 87 tokens and 87 trained tokens lost"
    assert (data.report.truncated, data.report.kept, data.report.length_percentiles["max"]) == (1, 2, 151)


def test_truncate_drops_a_row_whose_answer_is_cut_off(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [chat("a" * 100, "The answer"), chat("one?", "The answer")])
    data = prepared(path, overlength="truncate", truncate_side="right")
    assert (data.report.rows, data.report.kept, data.report.truncated, data.report.dropped) == (2, 1, 0, 1)


def test_drop(prepared: Prepared, write: Write) -> None:
    data = prepared(write("a.jsonl", [{"text": "a" * 100}, {"text": "a"}]), overlength="drop")
    assert (len(data.training), data.report.dropped) == (1, 1)


def test_split_covers_the_row(prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    data = prepared(write("a.jsonl", [{"text": "bad" * 50}]), overlength="split")
    assert "".join(decoded(tokenizer, data.training)) == "bad" * 50 + "<|im_end|>"
    assert [len(example.input_ids) for example in data.training] == [64, 64, 23]
    assert all(example.labels[0] == -100 for example in data.training), "nothing predicts the first token of a piece"
    assert (data.report.rows, data.report.kept, data.report.split) == (1, 1, 1)


def test_split_drops_pieces_with_nothing_to_learn(prepared: Prepared, write: Write) -> None:
    data = prepared(write("a.jsonl", [chat("a" * 200, "The answer")]), overlength="split")
    assert (len(data.training), data.report.pieces_dropped, data.report.split) == (1, 3, 1)


def test_nothing_left(prepared: Prepared, write: Write) -> None:
    with pytest.raises(DataError, match="all 2 were dropped"):
        prepared(write("a.jsonl", [{"text": "a" * 100}, {"text": "a" * 90}]), overlength="drop")


def test_one_malformed_row_stops_everything(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [*[{"text": "fine"}] * 50, {"txt": "x"}, *[{"text": "fine"}] * 50])
    with pytest.raises(DataError, match="needs the column 'text', found 'txt'") as caught:
        prepared(path)
    assert caught.value.where == f"{path}:51"


def test_mixed_row_types_are_refused(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [chat("one?", "two"), {"text": "three"}])
    with pytest.raises(DataError) as caught:
        prepared(path)
    assert caught.value.where == f"{path}:2"
    assert "looks like 'text'" in caught.value.fix


def texts_of(tokenizer: PreTrainedTokenizerFast, data: PreparedData) -> tuple[list[str], list[str]]:
    return decoded(tokenizer, data.training), decoded(tokenizer, data.validation)


def test_held_out_rows(prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write("a.jsonl", [{"text": f"The answer is {n}"} for n in range(40)])
    train, held_out = texts_of(tokenizer, prepared(path, val_size=0.25))
    assert (len(train), len(held_out)) == (30, 10)
    assert not set(train) & set(held_out)
    assert texts_of(tokenizer, prepared(path, val_size=10)) == (train, held_out)
    assert texts_of(tokenizer, prepared(path, val_size=10, seed=2)) != (train, held_out)
    assert len(prepared(path, val_size=0.001).validation) == 1


def test_copies_of_a_held_out_row_are_held_out(
    prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write("a.jsonl", [{"text": f"The answer is {n % 7}"} for n in range(70)])
    train, held_out = texts_of(tokenizer, prepared(path, val_size=15))
    assert (len(train), len(held_out)) == (50, 20)
    assert not set(train) & set(held_out)


def test_pieces_of_a_row_stay_together(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [{"text": f"{n} " * 100} for n in range(10)])
    data = prepared(path, overlength="split", val_size=2)
    train, held_out = ({example.origin for example in part} for part in (data.training, data.validation))
    assert (len(train), len(held_out)) == (8, 2)


@pytest.mark.parametrize("val_size", [3, 10, 0.9])
def test_everything_held_out(prepared: Prepared, write: Write, val_size: float) -> None:
    with pytest.raises(DataError, match="would hold out all 3 rows") as caught:
        prepared(write("a.jsonl", [{"text": f"answer {n}"} for n in range(3)]), val_size=val_size)
    assert caught.value.where == "val_size"


def test_fingerprint_follows_what_is_seen_and_not_where_it_lies(prepared: Prepared, write: Write) -> None:
    rows = [{"text": f"The answer is {n}"} for n in range(10)]
    first = prepared(write("a.jsonl", rows), val_size=2).fingerprint
    assert prepared(write("b.jsonl", rows), val_size=2).fingerprint == first
    others = [
        prepared(write("c.jsonl", rows[::-1]), val_size=2),
        prepared(write("d.jsonl", rows), val_size=3),
        prepared(write("e.jsonl", rows), val_size=2, seed=2),
        prepared(write("f.jsonl", rows[:9]), val_size=2),
    ]
    assert len({first, *(data.fingerprint for data in others)}) == 5
    pair = [{"prompt": "one", "completion": "two"}]
    trained_on = [prepared(write("g.jsonl", pair), train_on=train_on).fingerprint for train_on in ("assistant", "all")]
    assert trained_on[0] != trained_on[1]


def test_no_file_is_left_behind(prepared: Prepared, write: Write, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    data = prepared(write("a.jsonl", [{"text": "fine"}] * 3))
    with pytest.raises(DataError):
        prepared(write("b.jsonl", [{"text": ""}]))
    assert list(folder.iterdir()) == []
    assert len(data.training[2].input_ids) > 0


def test_more_tokens_than_one_batch_of_the_store_holds(
    prepared: Prepared, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamtune.data.record_table._FLUSH_TOKENS", 10)
    data = prepared(write("a.jsonl", [{"text": f"The answer is {n}"} for n in range(50)]))
    assert [example.origin.rpartition(":")[2] for example in data.training] == [str(n) for n in range(1, 51)]


def test_unknown_names(prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write("a.jsonl", [{"text": "x"}])
    with pytest.raises(ArgumentError, match="unknown overlength 'cut'"):
        prepared(path, overlength="cut")
    with pytest.raises(DataError, match="unknown row type 'chat'"):
        prepare([Source(path, type="chat")], tokenizer, max_length=8)


def test_texts_for_a_tokenizer(write: Write) -> None:
    paths = [
        write("chats.jsonl", [chat("one?", "two")]),
        write("pairs.jsonl", [{"prompt": "three", "completion": " four"}]),
        write("texts.jsonl", [{"text": "five"}]),
    ]
    assert list(iter_texts([Source(path) for path in paths])) == ["one?", "two", "three four", "five"]


def test_a_tokenizer_is_trained_on_tools_and_calls_too(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "Quitte in Köln"}}}
    messages = [
        {"role": "user", "content": "find it"},
        {"role": "assistant", "content": "", "reasoning_content": "a fruit?", "tool_calls": [call]},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "done"},
    ]
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"messages": messages, "tools": [tool]}) + "\n")
    source = Source(str(path))
    assert list(iter_texts([source])) == ["find it", "found", "done"]
    more = list(iter_texts([source], calls=True))[3:]
    assert [
        word for word in ("a fruit?", "Köln", "look_up", "properties") if not any(word in text for text in more)
    ] == []


def test_a_call_that_no_json_holds_is_a_faulty_row(tmp_path: Path) -> None:
    def row(day: datetime.date | None) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"day": day}}}
        return {"messages": [{"role": "user", "content": "find"}, {"role": "assistant", "tool_calls": [call]}]}

    path = tmp_path / "days.parquet"
    pq.write_table(pa.Table.from_pylist([row(datetime.date(2026, 1, 2)), row(None)]), path)
    source = Source(str(path))
    with pytest.raises(DataError, match="a tool or a tool call cannot be written as JSON"):
        list(iter_texts([source], calls=True))
    assert len(list(iter_texts([source], calls=True, on_bad_row="skip"))) >= 2


def test_stdlib_end_to_end(tokenizer: PreTrainedTokenizerFast) -> None:
    data = prepare(
        [Source("python-stdlib", max_rows=40)], tokenizer, max_length=4096, overlength="truncate", val_size=2
    )
    assert isinstance(data.report, DataReport)
    assert data.report.rows == 40
    assert len(data.validation) == 2


def test_rows_are_read_back_from_pages_that_were_released(
    prepared: Prepared, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("a.jsonl", [{"text": f"The answer is {n}"} for n in range(50)])
    kept = [(list(row.input_ids), list(row.labels), row.origin) for row in prepared(path).training]
    monkeypatch.setattr("streamtune.data.record_table._RESIDENT", 0)
    data = prepared(path)
    rows = list(data.training)  # their ids are views of the pages
    assert [(list(row.input_ids), list(row.labels), row.origin) for row in rows] == kept
    assert [row.origin for row in data.training[10:20]] == [origin for _, _, origin in kept[10:20]]
