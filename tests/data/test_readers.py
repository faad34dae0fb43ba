"""Real files of every format, and what is wrong with the wrong ones."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamtune.data.bad_rows import BadRows
from streamtune.data.reading import files
from streamtune.data.reading.files import make_local_file
from streamtune.data.reading.readers import read_data_file, read_file
from streamtune.errors import DataError

Write = Callable[..., str]


def read(path: str) -> list[dict[str, Any]]:
    return [row.columns for row in read_file(Path(path), path)]


def origins(path: str) -> list[str]:
    return [row.origin.removeprefix(f"{path}:") for row in read_file(Path(path), path)]


ROWS = [{"text": "one"}, {"text": "zwei Wörter 👋"}, {"text": "drei\u2028x"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n'),
        ("no-line-break-at-the-end.jsonl", '{"text": "one"}\n{"text": "two"}'),
        ("windows.jsonl", '{"text": "one"}\r\n{"text": "two"}\r\n'),
        ("mark.jsonl", '\ufeff{"text": "one"}\n{"text": "two"}\n'),
        ("ENDING.JSONL", '{"text": "one"}\n{"text": "two"}\n'),
        ("list.json", '[{"text": "one"}, {"text": "two"}]'),
        ("pretty.json", '\ufeff[\r\n  {\n    "text": "one"\n  },\n  {"text": "two"}\n]\n'),
        ("lines.json", '{"text": "one"}\n{"text": "two"}\n'),
        ("a.csv", "text\none\ntwo\n"),
        ("windows.csv", "\ufefftext\r\none\r\ntwo\r\n"),
        ("a.tsv", "text\none\ntwo\n"),
    ],
)
def test_text_formats(write: Write, name: str, content: str) -> None:
    assert read(write(name, content)) == [{"text": "one"}, {"text": "two"}]
    assert read(write(f"{name}.gz", gzip.compress(content.encode()))) == [{"text": "one"}, {"text": "two"}]


def test_lines_are_counted_as_an_editor_counts_them(write: Write) -> None:
    assert origins(write("a.jsonl", '\n{"text": "one\u2028two"}\r\n\n\n{"text": "two"}\n')) == ["2", "5"]
    assert origins(write("a.json", '\n[\n {"a":\n 1},\n\n {"a": 2}, {"a": 3}]')) == ["3", "6", "6"]
    assert origins(write("a.csv", 'text,n\n"two\nlines",1\n\nx,2\n')) == ["2", "5"]
    assert origins(write("a.txt", "one\n\ntwo")) == ["1"]


def test_a_text_file_is_one_document(write: Write) -> None:
    assert read(write("book.txt", "\ufeffone\r\n\ntwo\n")) == [{"text": "one\r\n\ntwo\n"}]
    assert read(write("empty.txt", " \n")) == []


def test_a_csv_cell_may_be_long(write: Write) -> None:
    long = "word " * 100_000
    assert read(write("a.csv", f'text\n"{long}"\n')) == [{"text": long}]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": ["x"]}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}] * 130), path)
    rows = list(read_file(path, "a.parquet"))
    assert len(rows) == 130
    assert rows[129].origin == "a.parquet:row 130"
    # the keys a message never had come back as nulls and must not reach the template
    assert rows[0].columns == {"messages": [messages[0], {"role": "assistant", "tool_calls": ["x"]}]}


@pytest.mark.parametrize(
    ("name", "content", "line", "what"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": "two"\n', "2", "malformed JSON"),
        (
            "a.jsonl",
            '{"text": "one"} {"text": "two"}\n',
            "1",
            "expected one JSON value per line, found a second at column 17",
        ),
        ("a.jsonl", '{"text": "one"}\n["two"]\n', "2", "found a list"),
        ("a.jsonl", '\n\n"two"\n', "3", "found a string"),
        ("a.jsonl", "null\n", "1", "found null"),
        ("a.jsonl", '{"text": "a", "text": "b"}\n', "1", "'text' appears twice"),
        ("a.jsonl", '{"text": "one"}\n' + "[" * 100_000, "2", "nested too deeply"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "\xff"}\n', "2", "not valid UTF-8: byte 0xff at column 11"),
        ("utf16.jsonl", '{"text": "one"}\n'.encode("utf-16-le"), "1", "UTF-16 without a byte order mark"),
        ("a.json", '[{"text": "one"},\n {"text" "two"}]', "2", "malformed JSON"),
        ("a.json", '[{"text": "one"},\n {"text": "two"}\n', "3", "list of rows is truncated"),
        ("a.json", '[{"text": "one"}\n {"text": "two"}]', "2", "one ',' between rows"),
        ("a.json", '[{"text": "one"},\n]', "1", "one ',' between rows"),
        ("a.json", '[{"text": "one"},', "1", "list of rows is truncated"),
        ("a.json", '[{"text": "one"}]\nx', "1", "there is text after"),
        ("a.json", '[{"text": "one"},\n [1]]', "2", "found a list"),
        ("a.json", '[{"text": "one", "text": "two"}]', "1", "'text' appears twice"),
        ("a.json", '{"text": "one"}\n5', "2", "found a number"),
        ("a.csv", "text,n\none,1\ntwo\n", "3", "one cell per column (2: text, n), found 1"),
        ("a.csv", "text\none,more\n", "2", "one cell per column (1: text), found 2"),
        ("a.csv", "text,text\none,1\n", "1", "the column 'text' appears twice"),
        ("a.csv", 'text\n"one\ntwo', "2", "malformed CSV"),
    ],
)
def test_malformed_rows_are_named_by_line(write: Write, name: str, content: str, line: str, what: str) -> None:
    path = write(name, content)
    with pytest.raises(DataError, match=re.escape(what)) as caught:
        read(path)
    assert caught.value.where == f"{path}:{line}"


def test_rows_before_a_malformed_one_are_not_lost(write: Write) -> None:
    path = write("a.jsonl", '{"text": "one"}\n{"text"\n')
    rows = read_file(Path(path), path)
    assert next(rows).columns == {"text": "one"}
    with pytest.raises(DataError):
        next(rows)


def test_damaged_gzip(write: Write) -> None:
    packed = gzip.compress(json.dumps({"text": "x" * 50_000}).encode())
    for content in (packed[:-20], b"no gzip at all"):
        with pytest.raises(DataError, match="gzip file is damaged"):
            read(write("a.jsonl.gz", content))


def test_a_compressed_file_without_its_suffix_is_told_as_that(write: Write) -> None:
    packed = gzip.compress(b'{"text": "one"}')
    with pytest.raises(DataError, match=r"compressed \(gzip\), but its extension names no compression") as caught:
        read(write("a.jsonl", packed))
    assert caught.value.fix == "rename it to a.jsonl.gz"
    with pytest.raises(DataError, match=r"compressed \(zstd\)"):
        read(write("a.json", b"\x28\xb5\x2f\xfd\x00\xff"))


def test_damaged_parquet(write: Write) -> None:
    path = write("a.parquet", b"PAR1 no parquet")
    with pytest.raises(DataError, match="cannot read the Parquet file") as caught:
        read(path)
    assert caught.value.where == path


def test_unknown_format_names_the_known_ones(write: Write) -> None:
    with pytest.raises(DataError, match=r"unknown file format: 'a\.docx'") as caught:
        read(write("a.docx", "x"))
    assert ".jsonl" in caught.value.fix


CSV_WITH_A_BAD_LINE = {
    "bad byte within a cell": (b'text,n\n"one\ntw\xffo\nthree",1\nnext,2\n', 3),
    "bad byte where a cell begins": (b'text,n\n"o\xffne\ntwo",1\nnext,2\n', 2),
    "bad byte where a cell ends": (b'text,n\n"one\ntw\xffo",1\nnext,2\n', 3),
    "NUL within a cell": (b'text,n\n"one\n\0\nthree",1\nnext,2\n', 3),
    "NUL in UTF-16": ('text,n\n"one\n\0\nthree",1\nnext,2\n'.encode("utf-16"), 3),
    "bad line between rows": (b"text,n\n\xff\nnext,2\n", 2),
}


@pytest.mark.parametrize("name", CSV_WITH_A_BAD_LINE)
def test_a_csv_row_with_a_line_that_cannot_be_read_is_bad_as_a_whole(write: Write, name: str) -> None:
    content, line = CSV_WITH_A_BAD_LINE[name]
    path, bad = write("a.csv", content), BadRows("skip")
    rows = list(read_data_file(make_local_file(Path(path), path), bad))
    assert [row.columns for row in rows] == [{"text": "next", "n": "2"}]
    assert [error.where for error in bad.errors] == [f"{path}:{line}"]


def test_a_csv_header_that_cannot_be_read_is_never_skipped(write: Write) -> None:
    path = write("a.csv", b"te\xffxt,n\none,1\ntwo,2\n")
    with pytest.raises(DataError, match="not valid UTF-8") as caught:
        list(read_data_file(make_local_file(Path(path), path), BadRows("skip")))
    assert caught.value.where == f"{path}:1"


def test_a_csv_line_that_is_too_long_is_never_skipped(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 20)
    path = write("a.csv", 'text,n\n"one\n' + "x" * 30 + '\nthree",1\nnext,2\n')
    with pytest.raises(DataError, match="the line is longer") as caught:
        list(read_data_file(make_local_file(Path(path), path), BadRows("skip")))
    assert caught.value.where == f"{path}:3"


@pytest.mark.parametrize("content", ["text,n\rone,1\rtwo,2\r", '"text","n"\r"one","1"\r'])
def test_line_ends_of_old_macs_are_told(write: Write, content: str) -> None:
    with pytest.raises(DataError, match="carriage return") as caught:
        read(write("a.csv", content))
    assert "tr '" in caught.value.fix
