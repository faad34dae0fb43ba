"""Local files, one row at a time, each with the place it came from.

A reader yields :class:`Row`: the columns as plain Python values and an origin, ``file:line`` where the format has lines
and ``file:row N`` (counted from 1) where it has none. Any fault of a file is a ``DataError`` at that place.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtune.data.cells import kind_of
from streamtune.errors import DataError

__all__ = ["READERS", "Row", "format_of", "read_file", "without_nulls"]


MAX_LINE_BYTES = 256 << 20
"""Of one line: tens of millions of tokens."""
MAX_DOCUMENT = 1 << 30
"""Characters of a file that is read at once: .json, .txt, .md."""


@dataclass(frozen=True)
class Row:
    """One row as the file has it."""

    origin: str
    """``file:line`` or ``file:row N``: what an error names"""
    columns: dict[str, Any]


def format_of(path: Path) -> str:
    """Return the extension that decides how a file is read, in lower case and without ``.gz``: ``".jsonl"``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_file(path: Path, shown: str) -> Iterator[Row]:
    """Read a local file row by row.

    Args:
        path: The file; its extension chooses the reader.
        shown: The file's name in origins and messages, usually as the user wrote it.

    Raises:
        DataError: The format is not known, or the file or one of its rows is malformed.
    """
    reader = READERS.get(format_of(path))
    if reader is None:
        raise DataError(
            f"cannot read '{path.name}': its extension says no known format",
            where=shown,
            mend=f"use one of {', '.join(READERS)} (text formats may be gzipped: .jsonl.gz)",
        )
    return reader(path, shown)


def without_nulls(value: Any) -> Any:
    """Drop keys whose value is None, at every depth.

    Arrow gives every struct of a column the same keys and fills the ones a row never had with nulls; a chat template
    would print them.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of compressed files."""


def _lines(path: Path, shown: str) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, decoded line with its line break); a byte order mark is dropped."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(
                        f"the line has more than {MAX_LINE_BYTES >> 20:,} MiB",
                        where=f"{shown}:{number}",
                        mend="write one row a line, or split the row",
                    )
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        if number == 1 and error.object.startswith((GZIP, ZSTD)):
            kind = "gzip" if error.object.startswith(GZIP) else "zstd"
            raise DataError(
                f"the file is compressed ({kind}), and its name does not say so",
                where=shown,
                mend=f"rename it to {path.name}.gz" if kind == "gzip" else "unpack it: zstd -d FILE",
            ) from error
        raise DataError(
            f"not valid UTF-8: byte 0x{error.object[error.start]:02x} at column {error.start + 1}",
            where=f"{shown}:{number}",
            mend="convert the file, for example: iconv -f UTF-16 -t UTF-8",
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"the gzip file is damaged after line {number}: {error}", where=shown) from error
    except OSError as error:
        raise DataError(f"cannot read the file: {error.strerror or error}", where=shown) from error


def _whole(path: Path, shown: str) -> str:
    """Return the text of a file that is read at once.

    Raises:
        DataError: It is larger than any such file should be; a small gzip file may unpack to that.
    """
    parts, size = [], 0
    for number, line in _lines(path, shown):
        size += len(line)
        if size > MAX_DOCUMENT:
            raise DataError(
                f"more than {MAX_DOCUMENT >> 20:,} million characters",
                where=f"{shown}:{number}",
                mend="write .jsonl, which is read line by line",
            )
        parts.append(line)
    return "".join(parts)


def _object(value: Any, origin: str) -> Row:
    """Return a JSON value as a row; raise unless it is an object."""
    if not isinstance(value, dict):
        raise DataError(
            f"a row must be a JSON object, this one is {kind_of(value)}",
            where=origin,
            mend='write one object per row, like {"messages": [...]} or {"text": "..."}',
        )
    return Row(origin, value)


class _DuplicateKeyError(ValueError):
    """A JSON object has the same key twice; JSON parsers disagree on which one counts."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKeyError(next(name for name in names if names.count(name) > 1))
    return columns


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def _json_fault(error: ValueError | RecursionError, origin: str, place: str) -> DataError:
    """Return the error for JSON that the decoder refuses.

    Args:
        error: What the decoder raised.
        origin: Where the object begins.
        place: Where the decoder stopped, for malformed JSON.
    """
    if isinstance(error, _DuplicateKeyError):
        return DataError(f"the key '{error}' appears twice in one object", where=origin, mend="keep one of the two")
    mend = "mend the row or remove it"
    if isinstance(error, RecursionError):
        return DataError("the JSON is nested too deeply", where=origin, mend=mend)
    if isinstance(error, json.JSONDecodeError):
        return DataError(f"malformed JSON: {error.msg} (column {error.colno})", where=place, mend=mend)
    return DataError(f"malformed JSON: {error}", where=origin, mend=mend)  # more digits than Python converts


def _read_jsonl(path: Path, shown: str) -> Iterator[Row]:
    """Yield one row for each line, a JSON object; blank lines are skipped."""
    for number, line in _lines(path, shown):
        if not line.strip():
            continue
        origin = f"{shown}:{number}"
        try:
            value = _DECODER.decode(line)  # unlike raw_decode, it takes blanks before the object and CRLF behind it
        except (ValueError, RecursionError) as error:
            raise _json_fault(error, origin, origin) from error
        yield _object(value, origin)


_BLANK = re.compile(r"[ \t\r\n]*")


def _read_json(path: Path, shown: str) -> Iterator[Row]:
    """Yield a list of objects, or objects in sequence; parsed one by one, so that memory holds only the text."""
    text = _whole(path, shown)
    line, counted, position = 1, 0, _skip_blank(text, 0)
    in_list = text.startswith("[", position)
    if in_list:
        position = _skip_blank(text, position + 1)
    while position < len(text):
        line, counted = line + text.count("\n", counted, position), position
        origin = f"{shown}:{line}"
        if in_list and text[position] == "]":
            if text[position + 1 :].strip():
                raise DataError("malformed JSON: something follows the list of rows", where=origin)
            return
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            line_of_fault = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _json_fault(error, origin, f"{shown}:{line_of_fault}") from error
        yield _object(value, origin)
        position = _skip_blank(text, position)
        if in_list:
            position = _next_item(text, position, shown)
    if in_list:
        raise DataError("malformed JSON: the list of rows has no end", where=f"{shown}:{text.count(chr(10)) + 1}")


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _next_item(text: str, position: int, shown: str) -> int:
    """Return the position after a list item: of the next item behind a comma, or of the closing bracket."""
    if text.startswith(",", position):
        following = _skip_blank(text, position + 1)
        if not text.startswith("]", following):
            return following
    elif text.startswith("]", position) or position == len(text):
        return position
    line = text.count("\n", 0, position) + 1
    raise DataError("malformed JSON: expected one ',' between rows", where=f"{shown}:{line}")


def _read_csv(path: Path, shown: str, delimiter: str = ",") -> Iterator[Row]:
    """Yield the rows under a header line; a quoted cell may hold line breaks."""
    # A long text in a cell is what this program is for; the csv module refuses 128 KiB unless told otherwise.
    csv.field_size_limit(min(sys.maxsize, MAX_LINE_BYTES))
    reader = csv.reader((line for _, line in _lines(path, shown)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    start = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"malformed CSV: {error}", where=f"{shown}:{start}") from error
        origin, start = f"{shown}:{start}", reader.line_num + 1
        if not cells:
            continue
        if header is None:
            header = _unique_columns(cells, origin)
            continue
        if len(cells) != len(header):
            raise DataError(
                f"the row has {len(cells)} cells, the header has {len(header)} columns ({', '.join(header)})",
                where=origin,
                mend="quote cells that hold the separator or a line break",
            )
        yield Row(origin, dict(zip(header, cells, strict=True)))


def _read_tsv(path: Path, shown: str) -> Iterator[Row]:
    return _read_csv(path, shown, delimiter="\t")


def _unique_columns(names: Sequence[str], origin: str) -> list[str]:
    """Return the column names without blanks at their ends; raise if one appears twice."""
    columns = [name.strip() for name in names]
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(f"the column '{twice[0]}' appears twice", where=origin, mend="rename or remove one of the two")
    return columns


def _read_parquet(path: Path, shown: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file, a few at a time."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(path) as file:
            _unique_columns(file.schema_arrow.names, shown)
            number = 0
            for batch in file.iter_batches(batch_size=64):
                for columns in batch.to_pylist():
                    number += 1
                    yield Row(f"{shown}:row {number}", without_nulls(columns))
    # pyarrow raises its own errors, Python's, and MemoryError for a size that a damaged file claims
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, KeyError, MemoryError) as error:
        raise DataError(
            f"not a readable Parquet file: {_short(error)}", where=shown, mend="write the file anew, or use .jsonl"
        ) from error


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def _read_text(path: Path, shown: str) -> Iterator[Row]:
    """Yield the whole file as one document: a book is one long row, not as many rows as it has lines."""
    text = _whole(path, shown)
    if text.strip():
        yield Row(f"{shown}:1", {"text": text})


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".txt": _read_text,
    ".md": _read_text,
}
"""Extension -> reader."""
