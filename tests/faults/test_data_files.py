"""Data files that somebody damaged: rows, or one error with the place and how to fix it."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamtune.data.reading import files
from streamtune.data.reading.readers import READERS, read_file
from streamtune.data.reading.sources import Source
from streamtune.errors import DataError
from streamtune.models import train_tokenizer
from tests.data.preparing import prepare
from tests.faults.figures import full, tell
from tests.faults.memory import forget_peak, peak_mib

ROW = {"messages": [{"role": "user", "content": "Hello 猫"}, {"role": "assistant", "content": "A cat.\n"}]}
LINE = json.dumps(ROW, ensure_ascii=False)
PIECES = [
    *(b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\n", b"\r"),
    *(b"\\ud800", b"\\u0000", b"NaN", b"1e999", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"null", b"\x1b[2J"),
    *(b"PAR1", b"\t", b"'"),
]


def sound(folder: Path) -> dict[str, bytes]:
    """A small file of every format."""
    table = pa.Table.from_pylist([ROW] * 5)
    pq.write_table(table, folder / "sound.parquet")
    with pa.OSFile(str(folder / "sound.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    lines = "".join(LINE + "\n" for _ in range(5)).encode()
    return {
        ".jsonl": lines,
        ".jsonl.gz": gzip.compress(lines),
        ".json": json.dumps([ROW] * 5).encode(),
        ".csv": b'prompt,completion\nHello,"A, cat"\n' * 1 + b"Bye,Dog\n" * 4,
        ".tsv": b"prompt\tcompletion\nHello\tcat\n" + b"Bye\tDog\n" * 4,
        ".txt": "Hello 猫\n".encode() * 20,
        ".parquet": (folder / "sound.parquet").read_bytes(),
        ".arrow": (folder / "sound.arrow").read_bytes(),
        ".jsonl.zst": pa.Codec("zstd").compress(lines, asbytes=True),
    }


def damaged(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        start = draw.randrange(len(changed) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            changed[start : start + draw.choice([0, 1, 7])] = draw.choice(PIECES)
        elif kind == 1 and start < len(changed):
            changed[start] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del changed[start:]
        else:
            changed[start:start] = changed[: draw.randrange(200)]
    return bytes(changed)


def test_a_damaged_file_is_rows_or_one_error(tmp_path: Path) -> None:
    """Every format: read, rendered and tokenised; nothing but a DataError with a place, and within a second."""
    tokenizer = train_tokenizer([LINE], vocab_size=320)
    draw, files = random.Random(3), sound(tmp_path)
    cases, refused, slowest = 0, 0, 0.0
    end = time.monotonic() + (60 if full() else 4)
    while time.monotonic() < end:
        extension, data = draw.choice(list(files.items()))
        path = tmp_path / f"rows{extension}"
        path.write_bytes(damaged(draw, data))
        started = time.process_time()
        try:
            prepare([Source(str(path))], tokenizer, max_length=4096, overlength="truncate", train_on="all", val_size=0,
                    packing=False, seed=0, notify=lambda text: None)  # fmt: skip
        except DataError as error:
            assert error.where.startswith(str(path)), (error, path.read_bytes())  # noqa: PT017
            refused += 1
        cases, slowest = cases + 1, max(slowest, time.process_time() - started)
    tell("data_fuzz", cases, cases, refused=refused, slowest_seconds=round(slowest, 3))
    assert cases > 10


HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "no JSON": (".jsonl", lambda: LINE.encode() + b"\nhello\n", ":2"),
    "UTF-16": (".jsonl", lambda: LINE.encode("utf-16-le"), ":1"),
    "Latin-1": (".jsonl", lambda: LINE.encode() + b"\n" + '{"text": "größe"}'.encode("latin-1"), ":2"),
    "NUL": (".jsonl", lambda: LINE.encode() + b"\n\0\n", ":2"),
    "deep": (".jsonl", lambda: LINE.encode() + b'\n{"text": ' + b"[" * 200_000, ":2"),
    "deep JSON": (".json", lambda: b"[" * 200_000, ":1"),
    "long number": (".jsonl", lambda: LINE.encode() + b'\n{"text": "a", "n": ' + b"9" * 10_000 + b"}", ":2"),
    "long number JSON": (".json", lambda: b'[{"text": "a", "n": ' + b"9" * 10_000 + b"}]", ":1"),
    "half a pair": (
        ".jsonl",
        lambda: LINE.encode() + b'\n{"messages": [{"role": "user", "content": "\\ud800"}]}',
        ":2",
    ),
    "half a pair in a tool": (
        ".jsonl",
        lambda: b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\\ud83d"}]}',
        ":1",
    ),
    "no parquet": (".parquet", lambda: b"PAR1" + b"\0" * 100 + b"PAR1", ""),
    "empty parquet": (".parquet", lambda: b"", ""),
    "cut gzip": (".jsonl.gz", lambda: gzip.compress(LINE.encode() * 999)[:-30], ""),
    "no gzip": (".jsonl.gz", lambda: LINE.encode(), ""),
    "rows that are text": (".jsonl", lambda: b'"a"\n', ":1"),
    "twice the key": (".jsonl", lambda: b'{"text": "a", "text": "b"}\n', ":1"),
    "messages that are none": (".jsonl", lambda: b'{"messages": [{"role": "user", "content": {"a": 1}}]}\n', ":1"),
    "open quote": (".csv", lambda: b'prompt,completion\n"a', ":2"),
    "NUL in CSV": (".csv", lambda: b"prompt,completion\na\0,b\nonly one\n", ":2"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_told_with_its_place(name: str, tmp_path: Path) -> None:
    extension, make, line = HOSTILE[name]
    path = tmp_path / f"rows{extension}"
    path.write_bytes(make())
    with pytest.raises(DataError) as caught:
        prepare([Source(str(path))], train_tokenizer([LINE], vocab_size=320), max_length=4096, overlength="truncate",
                train_on="all", val_size=0, packing=False, seed=0, notify=lambda text: None)  # fmt: skip
    assert caught.value.where.startswith(f"{path}{line}")


def test_a_cell_of_brackets_is_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\n" + "[" * 20_000 + ",b\na,b\n")
    found = prepare([Source(str(path))], train_tokenizer([LINE], vocab_size=320), max_length=4096,
                    overlength="truncate", train_on="all", val_size=0, packing=False, seed=0,
                    notify=lambda text: None)  # fmt: skip
    assert len(found.training) == 2


@pytest.mark.parametrize("extension", [".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".txt.gz"])
def test_a_line_without_end_takes_bounded_memory(
    extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With smaller bounds than the real ones, so that the test itself is cheap; a gzip bomb is such a line too."""
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(files, "MAX_DOCUMENT", 1 << 20)
    path = tmp_path / f"rows{extension}"
    start = b'{"text": "' if "json" in extension else b"text\n"
    if extension.endswith(".gz"):
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(start)
            for _ in range(64):
                file.write(b"x" * (1 << 20))
    else:
        with path.open("wb") as file:
            file.write(start)
            file.truncate(1 << 36)  # 64 GiB, without a byte on disk
    exact, before = forget_peak(), peak_mib()
    with pytest.raises(DataError) as caught:
        list(read_file(path, "rows"))
    assert caught.value.where.startswith("rows:")
    assert caught.value.fix
    if exact:
        assert peak_mib() - before < 100


def test_every_format_is_among_the_damaged_ones(tmp_path: Path) -> None:
    assert {f".{name.split('.')[1]}" for name in sound(tmp_path)} >= set(READERS) - {".ndjson", ".md"}
