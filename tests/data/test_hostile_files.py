"""Files that are not what they should be: each is refused with its own true sentence, at its place, within seconds."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import socket
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparing import prepare

from streamtune.data.reading import files
from streamtune.data.reading.sources import Source
from streamtune.errors import DataError, UserError
from streamtune.models import train_tokenizer

GOOD = b'{"text": "a sound row"}\n'
BAD_LATIN = '{"text": "größe"}\n'.encode("latin-1")
CHAT = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}\n'


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return packed


def parquet(**columns: list[object]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def arrow(rows: int = 1) -> bytes:
    sink = io.BytesIO()
    table = pa.table({"text": ["a row"] * rows})
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def archive() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as packed:
        packed.writestr("xl/workbook.xml", "<workbook/>")
    return sink.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
HTML = b"<!DOCTYPE html>\n<html><body>403 Forbidden</body></html>\n"
TEXTS = b'{"text": "' + b"x" * 2000 + b'"}\n'

CASES: list[tuple[str, bytes, str, str]] = [
    # --- nothing, or no rows
    ("empty.jsonl", b"", "has no rows", ""),
    ("empty.json", b"", "has no rows", ""),
    ("empty.csv", b"", "has no rows", ""),
    ("empty.txt", b"", "has no rows", ""),
    ("empty.parquet", b"", "cannot read the Parquet file", ""),
    ("empty.arrow", b"", "cannot read the Arrow file", ""),
    ("empty.jsonl.gz", b"", "has no rows", ""),
    ("empty.jsonl.zst", b"", "has no rows", ""),
    ("blank.jsonl", b"\n  \r\n\n", "has no rows", ""),
    ("list.json", b"[]", "has no rows", ""),
    ("header.csv", b"text\n", "has no rows", ""),
    ("header.tsv", b"text\tn\r\n", "has no rows", ""),
    ("none.parquet", parquet(text=[]), "has no rows", ""),
    ("mark.jsonl", b"\xef\xbb\xbf", "has no rows", ""),
    # --- encodings
    ("latin.jsonl", GOOD + BAD_LATIN, "byte 0xf6 at column 13; it looks like Latin-1", ":2"),
    ("cp1252.jsonl", GOOD + '{"text": "“no”"}\n'.encode("cp1252"), "it looks like Windows-1252", ":2"),
    ("latin.csv", "text\ngröße\n".encode("latin-1"), "it looks like Latin-1", ":2"),
    ("latin.txt", "größe".encode("latin-1"), "it looks like Latin-1", ":1"),
    ("latin.json", '[\n{"text": "größe"}]'.encode("latin-1"), "it looks like Latin-1", ":2"),
    ("broken.jsonl", GOOD + b'{"text": "\xff"}\n', "not valid UTF-8: byte 0xff at column 11", ":2"),
    ("utf16le.jsonl", GOOD.decode().encode("utf-16-le"), "UTF-16 without a byte order mark", ":1"),
    ("utf16be.csv", "text\nrow\n".encode("utf-16-be"), "UTF-16 without a byte order mark", ":1"),
    ("odd-utf16.jsonl", b"\xff\xfe" + GOOD.decode().encode("utf-16-le") + b"x", "begins as UTF-16", ":2"),
    ("utf16-bad.jsonl", '{"text": "a"}\n{"text"\n'.encode("utf-16"), "malformed JSON", ":2"),
    ("surrogate.jsonl", b'{"text": "\\ud800"}\n', "lone surrogate", ":1"),
    # --- bytes that no text has
    ("nul.jsonl", GOOD + b"\0\0\0\n", "NUL byte", ":2"),
    ("nul.csv", b"text\nx\0y\n", "NUL byte", ":2"),
    ("nul.txt", b"one\ntwo\0", "NUL byte", ":2"),
    ("nul.json", b'[{"text":\n"\0"}]', "NUL byte", ":2"),
    ("hole.jsonl", GOOD + bytes(4096), "NUL byte", ":2"),
    # --- other kinds of files
    ("lfs.jsonl", LFS, "Git LFS pointer", ":1"),
    ("lfs.parquet", LFS, "Git LFS pointer", ":1"),
    ("lfs.csv", LFS, "Git LFS pointer", ":1"),
    ("lfs.jsonl.gz", LFS, "Git LFS pointer", ":1"),
    ("lfs.txt", LFS, "Git LFS pointer", ":1"),
    ("page.jsonl", HTML, "HTML or XML page", ":1"),
    ("page.csv", b"\n\n" + HTML.lower(), "HTML or XML page", ":1"),
    ("page.parquet", HTML, "HTML or XML page", ":1"),
    ("page.json", b'<?xml version="1.0"?><Error/>', "HTML or XML page", ":1"),
    ("sheet.csv", archive(), "a zip archive or an Excel workbook", ""),
    ("sheet.jsonl", archive(), "a zip archive or an Excel workbook", ""),
    ("paper.txt", b"%PDF-1.7\n%\xe2\xe3", "a PDF document", ""),
    ("old.csv", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(64), "an old Office document", ""),
    ("base.jsonl", b"SQLite format 3\0" + bytes(64), "an SQLite database", ""),
    ("picture.txt", b"\x89PNG\r\n\x1a\n" + bytes(64), "a PNG image", ""),
    ("rows.jsonl", parquet(text=["a"]), "the file is Parquet", ""),
    ("arrow.jsonl", b"ARROW1\0\0" + bytes(64), "the file is Arrow", ""),
    ("pickle.json", b"\x80\x04\x95" + bytes(64), "a Python pickle", ""),
    ("tar.txt", bytes([120]) * 257 + b"ustar\x0000" + bytes(200), "a tar archive", ""),
    ("gzip.jsonl", gzip.compress(GOOD), "is compressed (gzip), but its extension names no compression", ""),
    ("zstd.csv", zstd(b"text\na\n"), "is compressed (zstd), but its extension names no compression", ""),
    ("bzip2.json", bz2.compress(GOOD), "is compressed (bzip2), but its extension names no compression", ""),
    ("xz.txt", lzma.compress(GOOD), "is compressed (xz), but its extension names no compression", ""),
    ("unknown.docx", b"x", "unknown file format", ""),
    # --- damaged or cut
    ("cut.jsonl.gz", gzip.compress(TEXTS * 50)[:-12], "the gzip file is damaged", ""),
    ("cut.jsonl.zst", zstd(TEXTS * 50)[:-5], "the zstd file is damaged", ""),
    ("cut.csv.bz2", bz2.compress(b"text\n" + TEXTS * 50)[:-5], "the bzip2 file is damaged", ""),
    ("cut.csv.xz", lzma.compress(b"text\n" + TEXTS * 50)[:-5], "the xz file is damaged", ""),
    ("plain.jsonl.gz", GOOD, "the gzip file is damaged", ""),
    ("plain.jsonl.zst", GOOD, "the zstd file is damaged", ""),
    ("cut.parquet", parquet(text=["a"] * 999)[:-9], "cannot read the Parquet file", ""),
    ("cut.arrow", arrow(999)[:600], "cannot read the Arrow file", ""),
    ("text.parquet", GOOD, "cannot read the Parquet file", ""),
    ("cut.jsonl", GOOD + b'{"text": "the file ends he', "malformed JSON", ":2"),
    ("cut.json", b'[{"text": "one"},\n{"text": "tw', "malformed JSON", ":2"),
    # --- JSON
    ("trailing.json", b'[{"text": "one"}]\n]', "there is text after the list of rows", ":1"),
    ("open.json", b'[{"text": "one"}\n', "the list of rows is truncated", ":2"),
    ("comma.json", b'[{"text": "one"},\n{"text": "two"},]', "expected one ',' between rows", ":2"),
    ("two.jsonl", GOOD + b'{"text": "a"} {"text": "b"}\n', "expected one JSON value per line", ":2"),
    ("glued.jsonl", b'{"text": "a"}{"text": "b"}\n', "expected one JSON value per line", ":1"),
    ("more.jsonl", b'{"text": "a"},\n', "malformed JSON: Extra data", ":1"),
    ("quotes.jsonl", GOOD + b"{'text': 'a'}\n", "malformed JSON", ":2"),
    ("python.jsonl", b'{"text": None}\n', "malformed JSON", ":1"),
    ("arrays.jsonl", b'["a", "b"]\n', "a row must be a JSON object, found a list", ":1"),
    ("strings.jsonl", GOOD + b'"a"\n', "a row must be a JSON object, found a string", ":2"),
    ("number.jsonl", b"5\n", "a row must be a JSON object, found a number", ":1"),
    ("null.jsonl", GOOD + b"null\n", "found null", ":2"),
    ("strings.json", b'["a"]', "found a string", ":1"),
    ("twice.jsonl", b'{"text": "a", "text": "b"}\n', "the key 'text' appears twice", ":1"),
    ("nan.jsonl", GOOD + b'{"text": "a", "n": NaN}\n', "JSON does not allow NaN", ":2"),
    ("infinite.json", b'[{"text": "a", "n": -Infinity}]', "JSON does not allow -Infinity", ":1"),
    ("deep.jsonl", GOOD + b'{"text": ' + b"[" * 200_000 + b"\n", "nested too deeply", ":2"),
    ("deep.json", b'{"a":' * 200_000, "nested too deeply", ":1"),
    ("digits.jsonl", b'{"text": "a", "n": ' + b"9" * 10_000 + b"}\n", "malformed JSON", ":1"),
    ("control.jsonl", b'{"text": "a\x01"}\n', "Invalid control character", ":1"),
    ("bracket.jsonl", b'[\n{"text": "a"},\n{"text": "b"}\n]\n', "one JSON object per line, found a JSON list", ":1"),
    # --- CSV
    ("ragged.csv", b"text,n\na,1\nb\n", "one cell per column (2: text, n), found 1", ":3"),
    ("wide.csv", b"text\na,b,c\n", "one cell per column (1: text), found 3", ":2"),
    ("twice.csv", b"text, text\na,b\n", "the column 'text' appears twice", ":1"),
    ("twice.parquet", b"", "cannot read the Parquet file", ""),
    ("quote.csv", b'text\n"a\nb\nc\n', "malformed CSV", ":2"),
    ("stray.csv", b'text\n"a"b\n', "malformed CSV", ":2"),
    ("semicolons.csv", b"prompt;completion\na;b;c\n", "cell per column (2: prompt, completion), found 3", ":2"),
    ("headless.csv", b"What is 1+1?,2\nWhat is 2+2?,4\n", "cannot recognise the row type", ":2"),
    # --- rows of no known kind
    ("columns.jsonl", b'{"body": "a"}\n', "cannot recognise the row type from the columns 'body'", ":1"),
    ("content.jsonl", CHAT.replace('"Yes"', '{"a": 1}').encode(), "content", ":1"),
    ("list.jsonl", b'{"messages": {"role": "user"}}\n', "'messages' must be a list of messages", ":1"),
    ("blank-row.jsonl", GOOD + b'{"text": ""}\n', "'text' is an empty string", ":2"),
    ("type.jsonl", GOOD + b'{"text": 5}\n', "'text'", ":2"),
]
"""File name, content, a part of the sentence, and the line that is named; "" names the file."""


NO_ADVICE = ("surrogate.jsonl", "content.jsonl", "list.jsonl", "type.jsonl")
"""Rows whose sentence says it all."""


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return train_tokenizer([CHAT], vocab_size=320)


def refusal(source: Source, tokenizer: object) -> DataError:
    """Return the one error of a run on the source; it must come soon."""
    started = time.monotonic()
    with pytest.raises(DataError) as caught:
        prepare([source], tokenizer, max_length=4096, overlength="truncate", train_on="all")  # type: ignore[arg-type]
    assert time.monotonic() - started < 5
    assert "\n" not in caught.value.what
    return caught.value


def test_there_are_enough() -> None:
    assert len(CASES) >= 80
    assert len({name for name, *_ in CASES}) == len(CASES)


@pytest.mark.parametrize(("name", "content", "what", "line"), [pytest.param(*case, id=case[0]) for case in CASES])
@pytest.mark.quick(*(case[0] for case in CASES))
def test_hostile_files(name: str, content: bytes, what: str, line: str, tmp_path: Path, tokenizer: object) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    found = refusal(Source(str(path)), tokenizer)
    assert what in found.what
    assert found.where == f"{path}{line}"
    assert found.fix or name in NO_ADVICE or "has no rows" in what


READ: list[tuple[str, bytes]] = [
    ("windows.jsonl", b'{"text": "one"}\r\n{"text": "two"}\r\n'),
    ("mark.jsonl", b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n'),
    ("utf16.jsonl", '{"text": "one"}\n{"text": "two"}\n'.encode("utf-16")),
    ("utf16be.csv", b"\xfe\xff" + "text\r\none\r\ntwo\r\n".encode("utf-16-be")),
    ("utf32.jsonl", '{"text": "one"}\n{"text": "two"}\n'.encode("utf-32")),
    ("semicolons.csv", b'text;n\n"one";"1;2"\ntwo;3\n'),
    ("tabs.csv", b"text\tn\none\t1\ntwo\t2\n"),
    ("bars.csv", b"text|n\none|1\ntwo|2\n"),
    ("comma-in-quotes.csv", b'text;"a, b"\none;1\ntwo;2\n'),
    ("old.json", b'{"text": "one"}\n{"text": "two"}'),
]


@pytest.mark.parametrize(("name", "content"), [pytest.param(*case, id=case[0]) for case in READ])
@pytest.mark.quick(*(case[0] for case in READ))
def test_odd_files_that_are_read(name: str, content: bytes, tmp_path: Path, tokenizer: object) -> None:
    path, notes = tmp_path / name, list[str]()
    path.write_bytes(content)
    found = prepare([Source(str(path))], tokenizer, max_length=64, notify=notes.append)  # type: ignore[arg-type]
    assert [tokenizer.decode(row.input_ids[:-1]) for row in found.training] == ["one", "two"]  # type: ignore[attr-defined]
    if "csv" in name and "utf16" not in name:
        assert any("columns are separated by" in note for note in notes)


NODES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "expected a regular file, found a pipe"),
    "a broken link": (
        lambda path: path.symlink_to("nowhere.jsonl"),
        "broken symbolic link: 'nowhere.jsonl' does not exist",
    ),
    "a link to itself": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "expected a regular file, found a device"),
    "a folder": (lambda path: path.mkdir(), "has no data file"),
}


@pytest.mark.parametrize("inside", [False, True], ids=["named", "in a folder"])
@pytest.mark.parametrize("kind", NODES)
def test_what_is_no_file_is_never_opened(kind: str, inside: bool, tmp_path: Path, tokenizer: object) -> None:
    make, what = NODES[kind]
    (tmp_path / "data").mkdir()
    make(tmp_path / "data/rows.jsonl")
    path = tmp_path / "data" if inside else tmp_path / "data/rows.jsonl"
    assert what in refusal(Source(str(path)), tokenizer).what


def test_a_socket(tmp_path: Path, tokenizer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("rows.jsonl")
        assert "expected a regular file, found a socket" in refusal(Source("rows.jsonl"), tokenizer).what


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_a_file_that_may_not_be_read(tmp_path: Path, tokenizer: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD)
    path.chmod(0)
    found = refusal(Source(str(path)), tokenizer)
    assert "Permission denied" in found.what
    assert found.fix == "allow it: chmod u+r rows.jsonl"


def test_a_split_that_was_not_saved(tmp_path: Path, tokenizer: object) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert "has no split 'dev', found train, test" in refusal(Source(str(tmp_path), split="dev"), tokenizer).what
    assert (
        "has no split 'train', although its dataset_dict.json lists it"
        in refusal(Source(str(tmp_path)), tokenizer).what
    )


@pytest.mark.full
def test_a_line_of_300_megabytes(tmp_path: Path, tokenizer: object) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(GOOD + b'{"text": "')
        for _ in range(300):
            file.write(b"x" * 10**6)
        file.write(b'"}\n')
    started = time.monotonic()
    with pytest.raises(UserError, match="the line is longer than 256 MiB") as caught:
        prepare([Source(str(path))], tokenizer, max_length=64)  # type: ignore[arg-type]
    assert caught.value.where == f"{path}:2"
    assert time.monotonic() - started < 20


def test_the_line_after_one_that_is_too_long(
    tmp_path: Path, tokenizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 16)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b'{"text": "' + b"x" * 10**6 + b'"}\n' + GOOD + b"{\n")
    found = prepare([Source(str(path))], tokenizer, max_length=64, on_bad_row="skip")  # type: ignore[arg-type]
    assert [row.origin for row in found.training] == [f"{path}:1", f"{path}:3"]
    assert [row["row"] for row in found.bad_rows] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_a_line_at_the_limit_is_read_and_no_line_after_it_is_lost(
    end: bytes, extra: int, tmp_path: Path, tokenizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = b'{"text": "at the limit"}'
    monkeypatch.setattr(files, "MAX_LINE_BYTES", len(row) - extra)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(row + end + (b'{"text": "next"}' + end if end else b""))
    left = ([1] if not extra else []) + ([2] if end else [])
    options = {"max_length": 64, "on_bad_row": "skip"}
    if not left:
        with pytest.raises(DataError, match="no row is left"):
            prepare([Source(str(path))], tokenizer, **options)  # type: ignore[arg-type]
        return
    found = prepare([Source(str(path))], tokenizer, **options)  # type: ignore[arg-type]
    assert [row.origin for row in found.training] == [f"{path}:{number}" for number in left]
    assert [row["row"] for row in found.bad_rows] == ([f"{path}:1"] if extra else [])
