"""Read data files row by row; each row has its file and line, for error messages.

A reader yields :class:`Row`: columns as plain Python values, and an origin. The origin is ``file:line`` if the format
has lines, else ``file:row N`` (counted from 1). A bad row is reported to :class:`BadRows`; a bad file raises
``DataError``.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamtune.data.bad_rows import BadRows
from streamtune.data.reading.cells import STRICT_JSON, DuplicateKeyError, json_type_of, remove_nulls
from streamtune.data.reading.files import (
    COMPRESSED,
    MAX_LINE_BYTES,
    DataFile,
    Line,
    file_format,
    iter_checked_lines,
    iter_lines,
    make_local_file,
    open_bytes,
    read_whole_text,
)
from streamtune.errors import DataError


@dataclass(frozen=True)
class Row:
    """A row of data with its columns, as read from its file, before any conversion."""

    origin: str
    """file and line of the row, ``file:line`` or ``file:row N``"""
    columns: dict[str, Any]
    """column name -> value"""
    separator: str = "\n\n"
    """text between ``instruction`` and ``input`` of a row of type ``alpaca``"""
    null_columns: tuple[str, ...] = ()
    """columns of the table without a value in this row; they are not in :attr:`columns`"""
    folder: Path | None = None
    """folder of the row's file, to which paths of images are relative; None for rows that are not in a local file"""


Reader = Callable[[DataFile, BadRows], Iterator[Row]]
"""Function that yields the rows of a file and reports bad rows."""


def read_file(path: Path, shown_path: str) -> Iterator[Row]:
    """Yield the rows of a local file.

    Args:
        path: File; its extension selects the format.

    Raises:
        DataError: The file cannot be read, or a row is malformed.
    """
    return read_data_file(make_local_file(path, shown_path), BadRows())


def read_data_file(file: DataFile, bad: BadRows) -> Iterator[Row]:
    """Yield the rows of a file; its extension selects the format.

    Args:
        bad: Object to which malformed rows are reported; they are not yielded.

    Raises:
        DataError: The extension is unknown, or the file cannot be read.
    """
    reader = READERS.get(file_format(file.name))
    if reader is None:
        raise DataError(
            f"unknown file format: '{file.name}'",
            where=file.shown,
            fix=f"use {', '.join(READERS)}; for a compressed text file, append {', '.join(COMPRESSED)}",
        )
    return reader(file, bad)


def _to_row(value: Any, origin: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"a row must be a JSON object, found {json_type_of(value)}",
            where=origin,
            fix='write one object per row, like {"messages": [...]} or {"text": "..."}',
        )
    return Row(origin, value)


def _json_error(error: ValueError | RecursionError, origin: str, location: str) -> DataError:
    """Return the error for JSON that cannot be decoded; ``location`` is the line where the decoder stopped."""
    if isinstance(error, DuplicateKeyError):
        return DataError(f"the key '{error}' appears twice in one object", where=origin, fix="keep one of the two")
    fix = "fix the row or remove it"
    if isinstance(error, RecursionError):
        return DataError("the JSON is nested too deeply", where=origin, fix=fix)
    if isinstance(error, json.JSONDecodeError):
        if error.msg == "Extra data" and error.doc[error.pos :].lstrip().startswith(("{", "[")):
            what = f"expected one JSON value per line, found a second at column {error.colno}"
            return DataError(what, where=location, fix="write one row per line")
        return DataError(f"malformed JSON: {error.msg} (column {error.colno})", where=location, fix=fix)
    return DataError(f"malformed JSON: {error}", where=origin, fix=fix)  # more digits than Python converts


def _read_jsonl(file: DataFile, bad: BadRows) -> Iterator[Row]:
    first = True
    for number, line in iter_lines(file, bad):
        if not line or line.isspace():
            continue
        if first and line.strip() == "[":
            raise DataError(
                "a .jsonl file must have one JSON object per line, found a JSON list",
                where=f"{file.shown}:{number}",
                fix="rename it to .json",
            )
        first = False
        with bad:
            row = [_parse_line(line, f"{file.shown}:{number}")]
            del line
            yield row.pop()  # keep no reference to a long row


def _parse_line(line: str, origin: str) -> Row:
    try:
        value = STRICT_JSON.decode(line)  # unlike raw_decode, decode accepts blanks before the object and CRLF after it
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            error.colno = error.pos + 1  # if the object continues on the next line: the end of this line
        raise _json_error(error, origin, origin) from error
    return _to_row(value, origin)


_BLANK = re.compile(r"[ \t\r\n]*")


def _read_json(file: DataFile, bad: BadRows) -> Iterator[Row]:
    """Yield the rows of a JSON file: a list of objects, or objects in sequence.

    Objects are parsed one by one, so that memory holds the text and one object.
    """
    text, shown = read_whole_text(file), file.shown
    line, counted, position = 1, 0, _skip_whitespace(text, 0)
    in_list = text.startswith("[", position)
    if in_list:
        position = _skip_whitespace(text, position + 1)
    while position < len(text):
        line, counted = line + text.count("\n", counted, position), position
        origin = f"{shown}:{line}"
        if in_list and text[position] == "]":
            if text[position + 1 :].strip():
                raise DataError(
                    "malformed JSON: there is text after the list of rows",
                    where=origin,
                    fix="remove it, or write .jsonl with one row per line",
                )
            return
        try:
            value, position = STRICT_JSON.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            line_of_fault = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _json_error(error, origin, f"{shown}:{line_of_fault}") from error
        try:
            row = _to_row(value, origin)
        except DataError as error:
            bad.report(error)
        else:
            yield row
        position = _skip_whitespace(text, position)
        if in_list:
            position = _skip_to_next_item(text, position, shown)
    if in_list:
        raise DataError(
            "malformed JSON: the list of rows is truncated, expected ']'",
            where=f"{shown}:{text.count(chr(10)) + 1}",
            fix="download or write the file again",
        )


def _skip_whitespace(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _skip_to_next_item(text: str, position: int, shown_path: str) -> int:
    """Return the position of the next list item, or of the closing bracket.

    Raises:
        DataError: There is not exactly one comma between two items.
    """
    if text.startswith(",", position):
        following = _skip_whitespace(text, position + 1)
        if not text.startswith("]", following):
            return following
    elif text.startswith("]", position) or position == len(text):
        return position
    line = text.count("\n", 0, position) + 1
    raise DataError(
        "malformed JSON: expected one ',' between rows",
        where=f"{shown_path}:{line}",
        fix="write exactly one comma between two rows",
    )


def _read_csv(file: DataFile, bad: BadRows, delimiter: str | None = None) -> Iterator[Row]:
    """Yield the rows below the header line of a CSV file; quoted cells may contain line breaks.

    Args:
        bad: Object to which rows with a wrong number of cells, or with a line that cannot be read, are reported.
        delimiter: Character between cells; None detects it from the header.

    Raises:
        DataError: A quote is not closed, the header has a column twice, or a line that cannot be read is the header or
            is too long.
    """
    # The csv module rejects cells above 128 KiB by default; long texts need more.
    csv.field_size_limit(min(sys.maxsize, MAX_LINE_BYTES))
    shown = file.shown
    lines = _CsvLines(iter_checked_lines(file))
    if delimiter is None:
        delimiter = _find_delimiter(lines.peek())
        if delimiter != ",":
            name = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}[delimiter]
            bad.notify(f"{shown}: columns are separated by {name}, not commas")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        start = lines.next_line_number
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise lines.take_error() or _csv_error(error, f"{shown}:{start}") from error
        origin = f"{shown}:{start}"
        unreadable = lines.take_error()
        if unreadable is not None and header is None:
            raise unreadable
        if unreadable is not None:
            bad.report(unreadable)
            continue
        if not cells:
            continue
        if header is None:
            header = _unique_columns(cells, origin)
            continue
        if len(cells) != len(header):
            bad.report(
                DataError(
                    f"expected one cell per column ({len(header)}: {', '.join(header)}), found {len(cells)}",
                    where=origin,
                    fix="quote cells that contain the separator or a line break",
                )
            )
            continue
        yield Row(origin, dict(zip(header, cells, strict=True)))


def _csv_error(error: csv.Error, origin: str) -> DataError:
    if "new-line character" in str(error):
        what = "malformed CSV: a carriage return (CR) outside of quotes; lines must end with LF or CRLF"
        fix = r"if CR ends every line, convert the file: tr '\r' '\n' < old.csv > new.csv; else quote the cell"
        return DataError(what, where=origin, fix=fix)
    fix = 'close the quote; write a quote inside a cell as ""'
    return DataError(f"malformed CSV: {error}", where=origin, fix=fix)


class _CsvLines:
    """Iterates over the text of lines, and keeps the first error of lines that cannot be read.

    The CSV reader also gets lines that cannot be read: without them it would join the lines around them in one cell.

    Raises:
        DataError: A line is too long, so it is unknown whether it opens or closes a quote.
    """

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._error: DataError | None = None
        self._waiting = next(lines, None)

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        if self._waiting is None:
            raise StopIteration
        _, text, error = self._waiting
        if error is not None and not text:
            raise error
        self._error = self._error or error
        self._waiting = next(self._lines, None)
        return text

    @property
    def next_line_number(self) -> int:
        return self._waiting[0] if self._waiting is not None else 0

    def peek(self) -> str:
        return self._waiting[1] if self._waiting is not None else ""

    def take_error(self) -> DataError | None:
        """Return the first error of the lines since the last call, or None."""
        error, self._error = self._error, None
        return error


_QUOTED = re.compile(r'"(?:[^"]|"")*"')


def _find_delimiter(header: str) -> str:
    """Return the delimiter of a CSV header: the first of comma, ``;``, tab and ``|`` that the header contains."""
    bare = _QUOTED.sub("", header)
    return next((mark for mark in (",", ";", "\t", "|") if mark in bare), ",")


def _unique_columns(names: Sequence[str], origin: str) -> list[str]:
    """Return the column names without whitespace at their ends.

    Raises:
        DataError: A name appears twice.
    """
    columns = [name.strip() for name in names]
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(f"the column '{twice[0]}' appears twice", where=origin, fix="rename or remove one of the two")
    return columns


def _read_parquet(file: DataFile, bad: BadRows) -> Iterator[Row]:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    def iter_batches(raw: Any) -> Iterator[Any]:
        with pq.ParquetFile(raw) as opened:
            _unique_columns(opened.schema_arrow.names, file.shown)
            yield from opened.iter_batches(batch_size=64)

    return _arrow_rows(file, iter_batches, "Parquet")


def _read_arrow(file: DataFile, bad: BadRows) -> Iterator[Row]:
    import pyarrow as pa

    def iter_batches(raw: Any) -> Iterator[Any]:
        is_file = raw.read(6) == b"ARROW1"
        raw.seek(0)
        if is_file:
            with pa.ipc.open_file(raw) as opened:
                _unique_columns(opened.schema.names, file.shown)
                parts = (opened.get_batch(number) for number in range(opened.num_record_batches))
                yield from _split_arrow_batches(parts)
        else:
            with pa.ipc.open_stream(raw) as stream:
                _unique_columns(stream.schema.names, file.shown)
                yield from _split_arrow_batches(stream)

    return _arrow_rows(file, iter_batches, "Arrow")


def _split_arrow_batches(batches: Any) -> Iterator[Any]:
    """Yield batches of at most 64 rows, because rows take much more memory as Python values than as Arrow batches."""
    for batch in batches:
        batch.validate(full=True)  # a damaged file may have offsets outside its buffers
        for start in range(0, batch.num_rows, 64):
            yield batch.slice(start, 64)


def _arrow_rows(file: DataFile, iter_batches: Callable[[Any], Iterator[Any]], format_name: str) -> Iterator[Row]:
    """Yield the rows of an Arrow or Parquet file, read by ``iter_batches`` from the opened file.

    Raises:
        DataError: The file is damaged.
    """
    import pyarrow as pa

    number = 0
    try:
        with open_bytes(file, text=False) as raw:
            for batch in iter_batches(raw):
                for columns in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield row_of_table(f"{file.shown}:row {number}", columns)
    # pyarrow raises its own errors, Python errors, and MemoryError if a damaged file states a huge size
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, KeyError, MemoryError) as error:
        where = f"{file.shown}:row {number + 1}" if number else file.shown
        fix = "download or write the file again, or use .jsonl"
        raise DataError(
            f"cannot read the {format_name} file: {error_in_one_line(error, 200)}", where=where, fix=fix
        ) from error


def row_of_table(origin: str, columns: Mapping[str, Any]) -> Row:
    """Return a row of a table, in which every row has all columns, without its nulls."""
    nulls = tuple(name for name, value in columns.items() if value is None)
    return Row(origin, remove_nulls(columns), null_columns=nulls)


def error_in_one_line(error: BaseException, max_characters: int) -> str:
    """Return the message of an error, or else its class name, cut to ``max_characters`` and without line breaks."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."


def _read_text(file: DataFile, bad: BadRows) -> Iterator[Row]:
    """Yield the whole file as one row, because a text file such as a book is one document."""
    text = read_whole_text(file)
    if text.strip():
        yield Row(f"{file.shown}:1", {"text": text})


def _remove_added_nulls(read: Reader) -> Reader:
    """Return a reader that removes null arguments of tool calls if a table format probably added them.

    ``datasets`` stores the arguments of all tool calls of a column in one struct. Its ``to_json`` then writes every key
    in every call. A null may also be an argument that the call really passes. So nulls are removed only if all calls of
    a file have the same keys. A file with a null argument is read twice, to compare the keys, and the user is notified.
    """

    def rows(file: DataFile, bad: BadRows) -> Iterator[Row]:
        padded: bool | None = None
        for row in read(file, bad):
            held = [row]  # keep no reference to a long row
            del row
            if any(map(_has_null, _call_arguments(held[0].columns))):
                if padded is None:
                    padded = _have_same_keys(read(file, BadRows("skip", sys.maxsize)))
                    bad.notify(f"{file.shown}: {_NULLS_REMOVED if padded else _NULLS_TRAINED}")
                if padded:
                    _remove_nulls(held[0].columns)
            yield held.pop()

    return rows


_NULLS_REMOVED = (
    "null arguments of tool calls are removed: all calls have the same keys, so a table format probably added them. To "
    "keep them, write the arguments as JSON text"
)
_NULLS_TRAINED = (
    "null arguments of tool calls are kept as null: the calls have different keys, so no table format added them"
)


def _call_arguments(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each tool call in a row, if they are an object and not JSON text."""
    for messages in columns.values():
        for message in messages if isinstance(messages, list) else ():
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            for call in calls if isinstance(calls, list) else ():
                function = call.get("function") or call if isinstance(call, dict) else None
                found = function.get("arguments") if isinstance(function, dict) else None
                if isinstance(found, dict):
                    yield found


def _has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(item is None or _has_null(item) for item in value.values())
    return isinstance(value, list) and any(map(_has_null, value))


def _have_same_keys(rows: Iterator[Row]) -> bool:
    """Return True if the rows have two or more tool calls, and all arguments have the same (also nested) keys."""
    keys: dict[tuple[str, ...], frozenset[str]] = {}
    count = 0
    for row in rows:
        for arguments in _call_arguments(row.columns):
            count += 1
            if not _has_recorded_keys(arguments, (), keys):
                return False
    return count > 1


def _has_recorded_keys(value: Any, json_path: tuple[str, ...], keys: dict[tuple[str, ...], frozenset[str]]) -> bool:
    """Return True if each object in ``value`` has the keys that ``keys`` has for its path; record keys of new paths."""
    if isinstance(value, list):
        return all(_has_recorded_keys(item, (*json_path, "[]"), keys) for item in value)
    if not isinstance(value, dict):
        return True
    same = keys.setdefault(json_path, frozenset(value)) == value.keys()
    return same and all(_has_recorded_keys(item, (*json_path, name), keys) for name, item in value.items())


def _remove_nulls(columns: Mapping[str, Any]) -> None:
    for arguments in _call_arguments(columns):
        left = remove_nulls(arguments)
        arguments.clear()
        arguments.update(left)


READERS: dict[str, Reader] = {  # extension -> reader
    ".jsonl": _remove_added_nulls(_read_jsonl),
    ".ndjson": _remove_added_nulls(_read_jsonl),
    ".json": _remove_added_nulls(_read_json),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".txt": _read_text,
    ".md": _read_text,
}
