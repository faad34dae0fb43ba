"""From files of preferences to trees, end to end, with a real tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from preparing import prepare, prepare_preferences, prepare_unpaired
from transformers import PreTrainedTokenizerFast

from streamtune.data import PREFERENCE_TYPES, PROMPT_TYPES, ROW_TYPES, PreparedCompletions, Source, Tree, iter_texts
from streamtune.data import CompletionReport as CompletionReport
from streamtune.data.reading.sources import READ_BY
from streamtune.errors import ArgumentError, DataError

Write = Callable[..., str]
Prepared = Callable[..., PreparedCompletions]


def pair(prompt: str, chosen: str = " good", rejected: str = " bad", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def judged(prompt: str, completion: str, label: bool) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


@pytest.fixture
def prepared(tokenizer: PreTrainedTokenizerFast) -> Prepared:
    def run(*paths: str, **options: Any) -> PreparedCompletions:
        return prepare_preferences([Source(path) for path in paths], tokenizer, **{"max_length": 64, **options})

    return run


@pytest.fixture
def unpaired(tokenizer: PreTrainedTokenizerFast) -> Prepared:
    def run(*paths: str, **options: Any) -> PreparedCompletions:
        return prepare_unpaired([Source(path) for path in paths], tokenizer, **{"max_length": 64, **options})

    return run


def decoded(tokenizer: PreTrainedTokenizerFast, tree: Tree) -> list[str]:
    return [tokenizer.decode(ids) for ids in (tree.prompt, *tree.completions)]


def test_pairs_become_trees(prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    told: list[str] = []
    texts = write("texts.jsonl", [pair("one?", score_chosen=3, score_rejected=1)])
    chats = write("chats.jsonl", [pair([{"role": "user", "content": "two?"}])])  # type: ignore[arg-type]
    cells = write("cells.csv", "prompt,chosen,rejected,margin\nthree?, good, bad,0.5\nfour?, a, b,\n")
    data = prepared(texts, chats, cells, notify=told.append)
    assert told == [
        *(f"{path}: detected row type 'preference'" for path in (texts, chats, cells)),
        "2 pairs have no score, unlike other pairs; a loss that reads scores (copg) gives each the default difference "
        "of rewards, 1/2",
    ]
    header = "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"
    assert [decoded(tokenizer, tree) for tree in data.training] == [
        ["one?", " good<|im_end|>", " bad<|im_end|>"],
        [header, " good<|im_end|>\n", " bad<|im_end|>\n"],
        ["three?", " good<|im_end|>", " bad<|im_end|>"],
        ["four?", " a<|im_end|>", " b<|im_end|>"],
    ]
    assert [tree.origin for tree in data.training] == [f"{texts}:1", f"{chats}:1", f"{cells}:2", f"{cells}:3"]
    assert [tree.margin for tree in data.training] == [2.0, None, 0.5, None]
    masks = data.training[1].masks
    assert masks is not None
    assert [mask[-2:] for mask in masks] == [[True, False]] * 2, "nothing is learnt from the line break behind a turn"
    assert data.training[0].masks is None
    assert data.training[1:3][1] == data.training[2]
    assert data.training[0].labels is None


def test_parquet(prepared: Prepared, tmp_path: Path) -> None:
    rows = [
        {"chosen": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}],
         "rejected": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "c"}],
         "score_chosen": 1.0, "score_rejected": None},
    ]  # fmt: skip
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match="'score_rejected' must be a finite number, found no value") as caught:
        prepared(str(path))
    assert caught.value.where == f"{path}:row 1"
    rows[0]["score_rejected"] = 3.0
    pq.write_table(pa.Table.from_pylist(rows), path)
    told: list[str] = []
    data = prepared(str(path), notify=told.append)
    assert data.training[0].margin == -2.0
    assert data.report.negative_margins == 1
    assert told[-1] == "1 pair has a chosen answer with the lower score"


def test_report(prepared: Prepared, write: Write) -> None:
    rows = [pair("a" * n, " good" * (n % 3 + 1), " bad") for n in range(1, 41)]
    data = prepared(write("a.jsonl", rows), val_size=0.1)
    trees = [*data.training, *data.validation]
    report = data.report
    assert isinstance(report, CompletionReport)
    assert (report.rows, report.kept, report.train_examples, report.validation_examples) == (40, 40, 36, 4)
    assert (report.completions, report.dropped, report.truncated, report.split) == (80, 0, 0, 0)
    # Answers begin with the same token, so the last one of the prompt, which predicts it, is there once.
    assert {t.num_common_tokens for t in trees} == {1}
    assert report.tree_tokens == sum(len(t.prompt) + sum(len(c) for c in t.completions) for t in trees)
    assert report.tokens == sum(len(t.prompt) + len(c) for t in trees for c in t.completions)
    assert report.supervised_tokens == sum(len(c) for t in trees for c in t.completions)
    assert report.length_percentiles["max"] == max(len(t.prompt) + max(map(len, t.completions)) for t in trees)
    assert report.prompt_lengths["max"] == max(len(t.prompt) for t in trees)
    assert list(report.completion_lengths) == ["chosen", "rejected"]
    assert report.completion_lengths["chosen"]["max"] == max(len(t.completions[0]) for t in trees)
    assert report.tree_lengths["max"] == max(t.num_tokens for t in trees)
    assert json.loads(json.dumps(report.to_json()))["tree_tokens"] == report.tree_tokens
    assert report.describe().startswith("40 rows; 36 to train on; 4 held out; prompts 1 to ")
    assert f"{report.tokens:,} tokens, {report.tree_tokens:,} with shared beginnings" in report.describe()
    assert [int(length) for length in data.training.lengths()] == [t.num_tokens for t in data.training]  # type: ignore[attr-defined]


def test_held_out_prompts_are_not_trained_on(
    prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [pair(f"prompt {n % 10}?", f" good {n}") for n in range(50)]
    data = prepared(write("a.jsonl", rows), val_size=10)
    train, held_out = ({decoded(tokenizer, tree)[0] for tree in part} for part in (data.training, data.validation))
    assert (len(data.training), len(data.validation)) == (40, 10)
    assert not train & held_out
    with pytest.raises(DataError, match=re.escape("would hold out all 5 rows (1 distinct)")):
        prepared(write("b.jsonl", [pair("same?", f" good {n}") for n in range(5)]), val_size=1)


def test_too_long_rows(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [pair("a" * 30), pair("a" * 30, " good" * 20), pair("a" * 30, " good" * 30)])
    with pytest.raises(
        DataError, match="2 rows have more than max_length = 64 tokens in the prompt plus its"
    ) as caught:
        prepared(path)
    assert caught.value.where == f"{path}:3"
    longest = int(re.findall(r"set max_length to (\d+) or more", caught.value.fix)[0])
    assert prepared(path, max_length=longest).report.kept == 3
    with pytest.raises(DataError):
        prepared(path, max_length=longest - 1)
    data = prepared(path, overlength="drop")
    assert (len(data.training), data.report.dropped, data.report.truncated) == (1, 2, 0)


def test_a_prompt_that_leaves_no_room(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [pair("a" * 10), pair("a" * 64)])
    with pytest.raises(DataError, match="a prompt of 64 tokens leaves no room for a completion in max_len") as caught:
        prepared(path)
    assert caught.value.where == f"{path}:2"
    assert "max_prompt_length" in caught.value.fix
    told: list[str] = []
    data = prepared(path, overlength="truncate", notify=told.append)
    assert (data.report.kept, data.report.dropped) == (1, 1)
    assert told[-1] == "1 of 2 rows exceed the length: 1 dropped; 139 tokens and 11 trained tokens lost"


def test_long_prompts(prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write("a.jsonl", [pair("b" * 3 + "a" * 20), pair("a" * 5)])
    with pytest.raises(DataError, match="1 prompt has more than max_prompt_length = 20 tokens; the longest has 23"):
        prepared(path, max_prompt_length=20)
    data = prepared(path, max_prompt_length=20, overlength="truncate")
    assert decoded(tokenizer, data.training[0]) == ["a" * 20, " good<|im_end|>", " bad<|im_end|>"]
    assert (data.report.truncated, data.report.prompt_lengths["max"]) == (1, 23)
    assert prepared(path, max_prompt_length=20, overlength="drop").report.kept == 1


def test_truncate_keeps_the_beginning_of_the_answers(
    prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [pair("a" * 60, "bbbbb" * 3, "bad"), pair("a" * 60, "bbbbbc", "bbbbbd"), pair("a")]
    told: list[str] = []
    data = prepared(write("a.jsonl", rows), overlength="truncate", notify=told.append)
    assert decoded(tokenizer, data.training[0]) == ["a" * 60, "bbbb", "bad<|im_end|>"]
    assert told[-1] == ("2 of 3 rows exceed the length: 1 truncated, 1 dropped; 146 tokens and 26 trained tokens lost")
    assert (data.report.kept, data.report.dropped) == (2, 1), "what is left of the second row's answers is the same"


def test_truncate_drops_what_has_nothing_left_to_count(prepared: Prepared, write: Write) -> None:
    asked = [{"role": "user", "content": "a?"}]
    turns = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a" * 80}]
    row = {"prompt": asked, "chosen": [*turns, turns[0]], "rejected": [{"role": "assistant", "content": "c"}]}
    data = prepared(write("a.jsonl", [row]), overlength="truncate")
    assert data.report.truncated == 1, "the first of the answer's turns is left"
    first = [{"role": "assistant", "content": "b", "weight": 0}, *turns[1:], turns[0]]
    with pytest.raises(DataError, match="all 1 were dropped"):
        prepared(write("b.jsonl", [{**row, "chosen": first}]), overlength="truncate")


def test_identical_answers(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [pair("one?"), pair("two?", " bad")])
    with pytest.raises(DataError, match="'chosen' and 'rejected' are the same, so there is no preference") as caught:
        prepared(path)
    assert caught.value.where == f"{path}:2"
    assert "identical_pairs: drop" in caught.value.fix
    told: list[str] = []
    data = prepared(path, identical_pairs="drop", notify=told.append)
    assert (data.report.rows, data.report.kept, data.report.dropped, data.report.identical) == (2, 1, 1, 1)
    assert told[-1] == "1 of 2 pairs dropped: both answers are the same"
    with pytest.raises(DataError, match="no row is left to train on: all 1 were dropped"):
        prepared(write("b.jsonl", [pair("two?", " bad")]), identical_pairs="drop")


def test_answers_that_a_template_writes_alike(make_tokenizer: Callable[..., Any], write: Write) -> None:
    asked = [{"role": "user", "content": "a?"}]
    path = write("a.jsonl", [pair(asked, "good ", " good")])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="'chosen' and 'rejected' are the same"):
        prepare_preferences([Source(path)], make_tokenizer("llama3", eos_token="<|eot_id|>"), max_length=64)


def test_unpaired_rows(unpaired: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [judged("one?", " good", True), judged("one?", " bad", False)]
    rows += [judged("two?", " a", False), judged("two?", " b", True)]
    data = unpaired(write("a.jsonl", rows), val_size=1)
    trees = [*data.training, *data.validation]
    assert all(len(tree.completions) == 1 for tree in trees)
    assert sorted((decoded(tokenizer, tree)[1], tree.labels) for tree in trees) == [
        (" a<|im_end|>", [False]),
        (" b<|im_end|>", [True]),
        (" bad<|im_end|>", [False]),
        (" good<|im_end|>", [True]),
    ]
    assert list(data.report.completion_lengths) == ["desirable", "undesirable"]
    assert data.report.completions == 4


def test_pairs_read_as_judged_answers(unpaired: Prepared, write: Write) -> None:
    data = unpaired(write("a.jsonl", [pair("one?")]), write("b.jsonl", [judged("two?", " a", True)]))
    assert [tree.labels for tree in data.training] == [[True, False], [True]]
    assert data.report.completions == 3
    with pytest.raises(DataError, match="one answer cannot be desirable and undesirable"):
        unpaired(write("c.jsonl", [pair("one?", " bad")]))


def test_all_labels_the_same(unpaired: Prepared, write: Write) -> None:
    path = write("a.jsonl", [judged("one?", " good", True), judged("two?", " good", True)])
    with pytest.raises(DataError, match="completions must have both labels, found only desirable") as caught:
        unpaired(path)
    assert caught.value.where == path


@pytest.mark.parametrize("drop", ["desirable", "undesirable"])
def test_all_rows_of_a_label_dropped_or_held_out(drop: str, unpaired: Prepared, write: Write) -> None:
    rows = [
        judged(f"{n}?", " good" * (30 if label == (drop == "desirable") else 1), label)
        for n in range(3)
        for label in (True, False)
    ]
    kept = "undesirable" if drop == "desirable" else "desirable"
    match = f"both labels, found only {kept}; all {drop} ones were dropped or held out"
    with pytest.raises(DataError, match=match):
        unpaired(write("a.jsonl", rows), overlength="drop")
    held_out = write("b.jsonl", [judged("one?", " good", True), *(judged("two?", f" {n}", False) for n in range(5))])
    with pytest.raises(DataError, match=r"found only (un)?desirable; all (un)?desirable ones were dropped or held out"):
        unpaired(held_out, val_size=1)


def test_judged_answers_where_pairs_are_wanted(
    prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write("a.jsonl", [judged("one?", " good", True)])
    with pytest.raises(DataError, match="found rows of type 'unpaired'") as caught:
        prepared(path)
    assert "loss_type: kto" in caught.value.fix
    with pytest.raises(DataError, match="found rows of type 'unpaired'"):
        prepare_preferences([Source(path, type="unpaired")], tokenizer, max_length=64)


def test_one_malformed_row_stops_everything(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [*[pair(f"{n}?") for n in range(20)], {"prompt": "p", "chosen": "a"}])
    with pytest.raises(DataError, match="needs the column 'rejected'") as caught:
        prepared(path)
    assert caught.value.where == f"{path}:21"


def test_fingerprint_follows_what_is_seen(prepared: Prepared, unpaired: Prepared, write: Write) -> None:
    rows = [pair(f"prompt {n}?") for n in range(10)]
    first = prepared(write("a.jsonl", rows), val_size=2).fingerprint
    assert prepared(write("b.jsonl", rows), val_size=2).fingerprint == first
    swapped = [pair(f"prompt {n}?", " bad", " good") for n in range(10)]
    others = [
        prepared(write("c.jsonl", rows[::-1]), val_size=2),
        prepared(write("d.jsonl", rows), val_size=3),
        prepared(write("e.jsonl", rows), val_size=2, seed=2),
        prepared(write("f.jsonl", swapped), val_size=2),
        prepared(write("g.jsonl", [{**row, "margin": 1} for row in rows]), val_size=2),
        unpaired(write("h.jsonl", rows), val_size=2),
    ]
    assert len({first, *(data.fingerprint for data in others)}) == 7


def test_unknown_names(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [pair("one?")])
    with pytest.raises(ArgumentError, match="unknown overlength 'split'") as caught:
        prepared(path, overlength="split")
    assert "cannot be split" in caught.value.fix
    with pytest.raises(ArgumentError, match="unknown identical_pairs 'keep'"):
        prepared(path, identical_pairs="keep")
    for length in (0, 64):
        with pytest.raises(ArgumentError, match=rf"must be between 1 and 63 \(max_length - 1\), found {length}"):
            prepared(path, max_prompt_length=length)


def test_unknown_types(write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write("a.jsonl", [pair("one?")])
    with pytest.raises(DataError, match="unknown row type 'pairs'"):
        prepare_preferences([Source(path, type="pairs")], tokenizer, max_length=8)
    with pytest.raises(
        DataError, match="rows of type 'messages' are for streamtune sft and grpo, not for this command"
    ) as caught:
        prepare_preferences([Source(path, type="messages")], tokenizer, max_length=8)
    assert caught.value.fix == "with this command, use auto, preference, unpaired"
    with pytest.raises(DataError, match="rows of type 'preference' are for streamtune dpo"):
        prepare([Source(path, type="preference")], tokenizer, max_length=8)
    assert set(READ_BY) == {*ROW_TYPES, *PREFERENCE_TYPES, *PROMPT_TYPES}


def test_texts_for_a_tokenizer(write: Write) -> None:
    paths = [
        write("a.jsonl", [pair("one?")]),
        write("b.jsonl", [judged("two?", " a", True)]),
        write("c.jsonl", [{"prompt": [{"role": "user", "content": "three?"}], "answer": "3"}]),
    ]
    assert list(iter_texts([Source(path) for path in paths])) == ["one?", " good", " bad", "two? a", "three?"]


def test_more_tokens_than_one_batch_of_the_store_holds(
    prepared: Prepared, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [pair(f"prompt {n}?", f" good {n}") for n in range(50)]
    whole = list(prepared(write("a.jsonl", rows)).training)
    monkeypatch.setattr("streamtune.data.record_table._FLUSH_TOKENS", 10)
    assert list(prepared(write("a.jsonl", rows)).training) == whole
