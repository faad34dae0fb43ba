"""Rows that are faulty: listed together, or counted and left out; for every objective."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from preparing import prepare, prepare_preferences, prepare_prompts, prepare_unpaired
from tests.sft_kit import FIXED, RECIPE, write_recipe
from tests.sft_kit import run as run_recipe

from streamtune.data import DataOptions, RowStream, StreamPosition, iter_texts
from streamtune.data.reading.sources import Source
from streamtune.errors import ArgumentError, DataError, RecipeError
from streamtune.recipe.keys.datasets import DatasetSpec
from streamtune.recipe.loader import load_recipe
from streamtune.tasks.streamed import record_bad_rows

Write = Callable[..., str]

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
PAIR = {"prompt": "Is it?", "chosen": " Yes", "rejected": " No"}
PROMPT = {"prompt": "Is it?"}


def mixed(good: dict[str, Any], bad: list[str], rows: int = 3) -> str:
    """Sound rows with a faulty one behind each."""
    lines = []
    for number in range(max(rows, len(bad))):
        lines.append(json.dumps(good))
        if number < len(bad):
            lines.append(bad[number])
    return "\n".join(lines) + "\n"


KINDS: dict[str, tuple[Any, dict[str, Any], list[str], dict[str, Any]]] = {
    "sft": (prepare, CHAT, ['{"messages": []}', "{", '{"text": "a"}', '{"messages": [{"role": "x"}]}'], {}),
    "dpo": (prepare_preferences, PAIR, ['{"prompt": "a"}', "[]", json.dumps({**PAIR, "chosen": " No"})], {}),
    "kto": (
        prepare_unpaired,
        {"prompt": "a", "completion": " b", "label": True},
        ['{"prompt": "a"}', '{"prompt": "a", "completion": " b", "label": "x"}'],
        {},
    ),
    "grpo": (prepare_prompts, PROMPT, ['{"prompt": ""}', '{"prompt": 5}', "nothing"], {}),
}
LENGTHS = {"grpo": {"max_prompt_length": 64}}


def run(kind: str, path: str, tokenizer: Any, **options: Any) -> Any:
    return KINDS[kind][0]([Source(path)], tokenizer, **LENGTHS.get(kind, {"max_length": 64}), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_lists_them_all(kind: str, write: Write, tokenizer: Any) -> None:
    _, good, bad, _ = KINDS[kind]
    path = write("rows.jsonl", mixed(good, bad))
    with pytest.raises(DataError) as caught:
        run(kind, path, tokenizer)
    head, *lines = caught.value.what.split("\n")
    assert head == f"{len(bad)} rows are bad:"
    assert [line.split(": ")[0] for line in lines] == [f"- {path}:{2 * n + 2}" for n in range(len(bad))]
    assert len({line.partition(": ")[2] for line in lines}) == len(bad), "each has its own sentence"
    assert caught.value.where == f"{path}:2"
    assert "on_bad_row: skip" in caught.value.fix


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_skip_leaves_them_out_and_counts(kind: str, write: Write, tokenizer: Any) -> None:
    _, good, bad, _ = KINDS[kind]
    notes: list[str] = []
    found = run(kind, write("rows.jsonl", mixed(good, bad)), tokenizer, on_bad_row="skip", notify=notes.append)
    count = max(3, len(bad))
    assert len(found.training) == found.report.rows == count
    assert [row["row"].rpartition(":")[2] for row in found.bad_rows] == [str(2 * n + 2) for n in range(len(bad))]
    assert all(row["what"] for row in found.bad_rows)
    assert any(note.startswith(f"{len(bad)} bad rows skipped; the first is at ") for note in notes)
    assert found.fingerprint == run(kind, write("good.jsonl", mixed(good, [], count)), tokenizer).fingerprint


def test_the_first_ten_and_the_count(write: Write, tokenizer: Any) -> None:
    path = write("rows.jsonl", json.dumps(CHAT) + "\n" + "{\n" * 30)
    with pytest.raises(DataError, match="30 rows are bad") as caught:
        run("sft", path, tokenizer)
    assert len(caught.value.what.split("\n")) == 12
    assert caught.value.what.endswith("- and 20 more")
    with pytest.raises(DataError, match="1,000 rows are bad; the rows after them were not read"):
        run("sft", write("rows.jsonl", json.dumps(CHAT) + "\n" + "{\n" * 5000), tokenizer)


def test_one_bad_row_is_its_own_sentence(write: Write, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"^malformed JSON") as caught:
        run("sft", write("rows.jsonl", json.dumps(CHAT) + "\n{\n"), tokenizer)
    assert caught.value.where.endswith(":2")


def test_more_than_max_bad_rows(write: Write, tokenizer: Any) -> None:
    path = write("rows.jsonl", json.dumps(CHAT) + "\n" + "{\n" * 5)
    assert len(run("sft", path, tokenizer, on_bad_row="skip", max_bad_rows=5).bad_rows) == 5
    with pytest.raises(DataError, match=r"more than 4 bad rows \(max_bad_rows\)") as caught:
        run("sft", path, tokenizer, on_bad_row="skip", max_bad_rows=4)
    assert "raise max_bad_rows" in caught.value.fix
    with pytest.raises(DataError, match="no row is left: all 2 were bad"):
        run("sft", write("all.jsonl", "{\n{\n"), tokenizer, on_bad_row="skip")
    with pytest.raises(ArgumentError, match="unknown on_bad_row 'drop'"):
        run("sft", path, tokenizer, on_bad_row="drop")


def test_what_all_rows_share_is_no_bad_row(write: Write, make_tokenizer: Callable[..., Any]) -> None:
    for on_bad_row in ("error", "skip"):
        with pytest.raises(DataError, match="the tokenizer has no chat template"):
            run("sft", write("rows.jsonl", [CHAT] * 5), make_tokenizer(None), on_bad_row=on_bad_row)
    with pytest.raises(DataError, match=r"^cannot recognise the row type") as caught:
        run("sft", write("rows.jsonl", [{"body": "x"}] * 5), make_tokenizer())
    assert caught.value.where.endswith(":1")


def test_a_tokenizer_is_trained_on_the_rows_that_are_left(write: Write) -> None:
    path = write("rows.jsonl", mixed({"text": "sound"}, ["{", '{"text": 5}']))
    assert list(iter_texts([Source(path)], on_bad_row="skip")) == ["sound"] * 3
    with pytest.raises(DataError, match="2 rows are bad"):
        list(iter_texts([Source(path)]))


# --- columns, max_rows, repeat ----------------------------------------------------------------------------------------


def texts(found: Any, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row.input_ids[:-1]) for row in found.training]


def test_columns_are_renamed(write: Write, tokenizer: Any) -> None:
    path = write("rows.jsonl", [{"question": "a?", "answer": " b", "prompt": "other"}])
    notes: list[str] = []
    source = Source(path, columns={"prompt": "question", "completion": "answer"})
    found = prepare([source], tokenizer, max_length=64, notify=notes.append)
    assert texts(found, tokenizer) == ["a? b"]
    assert any("the column 'prompt' is ignored" in note for note in notes)
    swapped = Source(
        write("s.jsonl", [{"prompt": " b", "completion": "a?"}]),
        columns={"prompt": "completion", "completion": "prompt"},
    )
    assert texts(prepare([swapped], tokenizer, max_length=64), tokenizer) == ["a? b"]
    with pytest.raises(DataError, match="'columns' refers to 'quesion', but the row has") as caught:
        prepare([Source(path, columns={"prompt": "quesion"}, where="r.yaml:4")], tokenizer, max_length=64)
    assert "'question'" in caught.value.what
    assert caught.value.where == "r.yaml:4"
    assert caught.value.fix == "did you mean 'question'?"


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["null last", "null first"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_renamed_column_may_be_null(kind: str, order: slice, tmp_path: Path, write: Write, tokenizer: Any) -> None:
    rows = [
        {"instruction": "a", "output": "b", "context": "c", "input": "other"},
        {"instruction": "d", "output": "e", "context": None, "input": "other"},
    ][order]
    path = write("rows.jsonl", rows) if kind == "jsonl" else str(tmp_path / f"rows.{kind}")
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, pa.Table.from_pylist(rows).schema) as file:
            file.write_table(pa.Table.from_pylist(rows))
    found = prepare([Source(path, columns={"input": "context"})], tokenizer, max_length=64)
    asked = [tokenizer.decode(row.input_ids).split("<|im_end|>")[0].partition("user\n")[2] for row in found.training]
    assert asked == ["a\n\nc", "d"][order]
    with pytest.raises(DataError, match=r"'columns' refers to 'contxt', but the row has .*'context'") as caught:
        prepare([Source(path, columns={"input": "contxt"})], tokenizer, max_length=64)
    assert caught.value.fix == "did you mean 'context'?"


def test_rows_drawn_by_the_seed(write: Write, tokenizer: Any) -> None:
    path = write("rows.jsonl", [{"text": f"row {n}"} for n in range(50)])

    def drawn(**options: Any) -> list[str]:
        return texts(prepare([Source(path, max_rows=10, **options)], tokenizer, max_length=64), tokenizer)

    assert drawn() == [f"row {n}" for n in range(10)]
    first = drawn(shuffle=True)
    assert first == drawn(shuffle=True) != drawn(shuffle=True, seed=1)
    assert first != drawn()
    assert len(set(first)) == 10
    assert sorted(first, key=lambda text: int(text.split()[1])) == first, "they stay in their order"


def test_repeat(write: Write, tokenizer: Any) -> None:
    first, second = (write(f"{name}.jsonl", [{"text": f"{name}{n}"} for n in range(3)]) for name in "ab")
    sources = [Source(first, repeat=2), Source(second)]
    found = prepare(sources, tokenizer, max_length=64)
    assert texts(found, tokenizer) == ["a0", "a1", "a2", "a0", "a1", "a2", "b0", "b1", "b2"]
    assert found.report.train_examples == 9
    assert found.fingerprint != prepare([Source(first), Source(second)], tokenizer, max_length=64).fingerprint
    packed = prepare(sources, tokenizer, max_length=64, packing=True)
    assert sorted(packed.packs.rows.tolist()) == list(range(9))
    held = prepare(sources, tokenizer, max_length=64, val_size=2)
    assert len(held.validation) == 2, "a held-out row is there once"
    assert len(held.training) + sum(2 if "a" in row.origin[-9:] else 1 for row in held.validation) == 9


def test_keys_of_a_recipe(tmp_path: Path, write: Write) -> None:
    write("rows.jsonl", [CHAT])
    recipe = tmp_path / "r.yaml"
    head = "model_name_or_path: x\n"
    recipe.write_text(f"{head}datasets: [rows.jsonl, {{file_name: b.jsonl, num_samples: 3, shuffle: true}}]\n")
    loaded = load_recipe(recipe, ["datasets.0.repeat=2"])
    assert loaded.recipe.datasets[0] == DatasetSpec(path=str(tmp_path / "rows.jsonl"), repeat=2)
    assert (loaded.recipe.datasets[1].path, loaded.recipe.datasets[1].max_rows) == ("b.jsonl", 3)
    assert "'datasets[1].num_samples' is read as 'max_rows'" in loaded.notes
    assert loaded.key_origin("datasets", 0, "path") == f"{recipe}:2"
    for text, what in [
        ("datasets: [{path: a, shuffle: true}]", "'shuffle' of a dataset draws its 'max_rows'"),
        ("datasets: [{path: a, columns: {}}]", "columns"),
        ("datasets: [{path: a, columns: {prompt: q, completion: q}}]", "reads the column 'q' twice"),
        ("datasets: [{path: a, subset: b, name: c}]", "'subset' means 'name', which is also set"),
        ("datasets: [{path: a, repeat: 0}]", "repeat"),
        ("datasets: [a]\nstrict: true", "'strict' is another trainer's key"),
        ("datasets: [a]\non_bad_row: ignore", "on_bad_row"),
    ]:
        recipe.write_text(f"{head}{text}\n")
        with pytest.raises(RecipeError) as caught:
            load_recipe(recipe)
        assert what in caught.value.what, caught.value
        assert caught.value.where == f"{recipe}:{2 + text.count(chr(10))}"


# --- the run, and the disk --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_keeps_the_rows_that_it_left_out(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("rows.jsonl", mixed(CHAT, ["{", '{"messages": []}'], 6))
    changes = {"datasets": ["rows.jsonl"], "max_length": 128, "max_steps": 1, "on_bad_row": "skip", "output_dir": "out"}
    write_recipe(tmp_path, {**RECIPE, **changes, "engine": FIXED})
    assert run_recipe() == 0
    kept = json.loads((tmp_path / "out/bad_rows.json").read_text())["bad_rows"]
    assert [row["row"] for row in kept] == [f"rows.jsonl:{line}" for line in (2, 4)]
    assert kept[1]["what"] == "'messages' is an empty list"


CHILD = """
import sys
from streamtune.data import DataOptions, prepare
from streamtune.data.reading.sources import Source
from streamtune.models import train_tokenizer
try:
    prepare([Source(sys.argv[1])], train_tokenizer(["a b c"], vocab_size=300), DataOptions(max_length=10**6))
except Exception as error:
    print(type(error).__name__, "|", error.what, "|", error.where, "|", error.fix)
"""


@pytest.mark.full
@pytest.mark.parametrize("reason", ["full", "missing"])
def test_the_folder_of_temporary_files_is_named(reason: str, write: Write, tmp_path: Path) -> None:
    path = write("rows.jsonl", [{"text": "a b c " * 50}] * 2000)

    def limit() -> None:  # a file of more than a megabyte fails to be written, as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    folder = tmp_path / "temporary"
    folder.mkdir()
    program = CHILD if reason == "full" else f"import tempfile\ntempfile.tempdir = {str(folder / 'gone')!r}\n{CHILD}"
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True,
        env={**__import__("os").environ, "TMPDIR": str(folder)}, preexec_fn=limit if reason == "full" else None,
    )  # fmt: skip
    kind, what, where, fix = done.stdout.strip().splitlines()[-1].split(" | ")
    assert (kind, where) == ("StorageError", "TMPDIR")
    if reason == "full":
        assert what == f"cannot write the prepared rows to {folder}: File too large"
        assert fix.startswith("prepared rows need more than ")
        assert list(folder.iterdir()) == []
    else:
        assert what.startswith("cannot create a temporary folder: ")
        assert "set TMPDIR" in fix


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_that_cannot_be_read_and_rows_that_cannot_be_trained_on_are_listed_in_their_order(
    processes: int, tmp_path: Path, tokenizer: Any
) -> None:
    good = json.dumps({"prompt": "2 + 2 is", "completion": " 4"})
    untrained = json.dumps({"prompt": "2 + 2 is", "completion": 4})
    unread = "{broken"
    lines = [good, untrained, unread, good, unread, untrained, good, untrained, unread]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    wrong = [f"{tmp_path / 'rows.jsonl'}:{number}" for number, line in enumerate(lines, start=1) if line != good]
    options: dict[str, Any] = {"max_length": 99, "processes": processes}
    prepared = prepare([Source(str(tmp_path / "rows.jsonl"))], tokenizer, on_bad_row="skip", **options)
    assert [row["row"] for row in prepared.bad_rows] == wrong
    with pytest.raises(DataError) as error:
        prepare([Source(str(tmp_path / "rows.jsonl"))], tokenizer, **options)
    assert [line.split(": ")[0][2:] for line in str(error.value).splitlines() if line.startswith("- ")] == wrong


def test_the_record_of_rows_goes_through_no_link(tmp_path: Path) -> None:
    """Somebody else's link under the name that is staged: what it leads to is left as it is."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".tmp-bad_rows.json").symlink_to(tmp_path / "mine")
    for number in (3, 5):
        record_bad_rows(tmp_path / "bad_rows.json", [DataError("no text", where=f"rows.jsonl:{number}")])
    assert (tmp_path / "mine").read_text() == "mine"
    rows = json.loads((tmp_path / "bad_rows.json").read_text())["bad_rows"]
    assert [each["row"] for each in rows] == ["rows.jsonl:3", "rows.jsonl:5"]


OFF = {"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0}]}


@pytest.mark.parametrize("bad", ['{"messages": 1}', '{"messages"', json.dumps(OFF)], ids=["column", "JSON", "rendered"])
@pytest.mark.parametrize("mixed_by", [{"repeat": 5}, {"weight": 1.0}], ids=["repeat", "weight"])
def test_a_stream_that_reads_a_bad_row_again_counts_it_once(
    bad: str, mixed_by: dict[str, Any], write: Write, tokenizer: Any
) -> None:
    short = Source(write("short.jsonl", f"{json.dumps(CHAT)}\n{bad}\n"), **mixed_by)
    long = Source(write("long.jsonl", [CHAT] * 20), weight=mixed_by.get("weight"))
    options = DataOptions(max_length=64, on_bad_row="skip", max_bad_rows=1)
    told: list[str] = []
    stream = RowStream([short, long], tokenizer, options, told.append)
    left_out: list[str] = []
    stream.left_out = lambda error: left_out.append(error.where)
    for example, position in stream.examples(StreamPosition()):
        if example is None and position.epoch == 2:
            break
    assert left_out == [f"{short.path}:2"] * 2
    assert sum("; 1 skipped as bad" in text for text in told) == 2


@pytest.mark.parametrize("mixed_by", [{"repeat": 3}, {"weight": 1.0}], ids=["repeat", "weight"])
def test_a_resumed_stream_counts_a_bad_row_once(mixed_by: dict[str, Any], write: Write, tokenizer: Any) -> None:
    """Its place is part of the position, because a resumed stream does not render the rows before the position."""
    short = Source(write("short.jsonl", [CHAT, OFF, CHAT]), **mixed_by)
    long = Source(write("long.jsonl", [CHAT] * 6), weight=mixed_by.get("weight"))
    told: list[str] = []

    def read(start: StreamPosition) -> list[StreamPosition]:
        options = DataOptions(max_length=64, on_bad_row="skip", max_bad_rows=1)
        positions = []
        with closing(RowStream([short, long], tokenizer, options, told.append).examples(start)) as examples:
            for example, position in examples:
                if example is None:
                    return positions
                positions.append(position)
        raise AssertionError("a stream does not end")

    whole = read(StreamPosition())
    for index, position in enumerate(whole):
        again = read(StreamPosition(**json.loads(json.dumps(position.to_json()))))
        assert [each.rows for each in again] == [each.rows for each in whole[index + 1 :]]
    passes = [text for text in told if text.startswith("pass 1")]
    assert len(set(passes)) == 1
    assert "; 1 skipped as bad" in passes[0]
