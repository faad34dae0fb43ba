"""Read files of rows, one row at a time, each with the place it came from.

A reader yields :class:`Row`: columns as plain Python values and an origin, ``file:line`` if the format has lines, else
``file:row N`` (from 1). A faulty row is reported to :class:`BadRows`; a faulty file raises ``DataError``.
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
from typing import Any, NoReturn

from streamtune.data.faults import BadRows
from streamtune.data.reading.cells import kind_of, without_nulls
from streamtune.data.reading.files import (
    COMPRESSED,
    MAX_LINE_BYTES,
    DataFile,
    format_of,
    iter_lines,
    local_file,
    open_bytes,
    read_whole,
)
from streamtune.errors import DataError


@dataclass(frozen=True)
class Row:
    """A row as its file has it."""

    origin: str
    """``file:line`` or ``file:row N``, named in errors"""
    columns: dict[str, Any]
    separator: str = "\n\n"
    """text between ``instruction`` and ``input`` of an alpaca row"""


Reader = Callable[[DataFile, BadRows], Iterator[Row]]


def read_file(path: Path, shown: str) -> Iterator[Row]:
    """Read a local file row by row; its extension chooses the reader, ``shown`` names it in origins and messages."""
    return read_data_file(local_file(path, shown), BadRows())


def read_data_file(file: DataFile, bad: BadRows) -> Iterator[Row]:
    """Read a file row by row; malformed rows are reported and left out."""
    reader = READERS.get(format_of(file.name))
    if reader is None:
        raise DataError(
            f"cannot read '{file.name}': its extension says no known format",
            where=file.shown,
            fix=f"use one of {', '.join(READERS)}; text may be compressed: {', '.join(COMPRESSED)} behind it",
        )
    return reader(file, bad)


def _object(value: Any, origin: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"a row must be a JSON object, this one is {kind_of(value)}",
            where=origin,
            fix='write one object per row, like {"messages": [...]} or {"text": "..."}',
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def _json_fault(error: ValueError | RecursionError, origin: str, place: str) -> DataError:
    """Return the error for JSON that the decoder refuses.

    Args:
        origin: Place where the object begins.
        place: Place where the decoder stopped.
    """
    if isinstance(error, _DuplicateKeyError):
        return DataError(f"the key '{error}' appears twice in one object", where=origin, fix="keep one of the two")
    fix = "fix the row or remove it"
    if isinstance(error, RecursionError):
        return DataError("the JSON is nested too deeply", where=origin, fix=fix)
    if isinstance(error, json.JSONDecodeError):
        if error.msg == "Extra data" and error.doc[error.pos :].lstrip().startswith(("{", "[")):
            what = f"two JSON values stand on one line, the second at column {error.colno}"
            return DataError(what, where=place, fix="write one row a line")
        return DataError(f"malformed JSON: {error.msg} (column {error.colno})", where=place, fix=fix)
    return DataError(f"malformed JSON: {error}", where=origin, fix=fix)  # more digits than Python converts


def _read_jsonl(file: DataFile, bad: BadRows) -> Iterator[Row]:
    """Yield a row for each line, a JSON object; blank lines are skipped."""
    first = True
    for number, line in iter_lines(file, bad):
        if not line or line.isspace():
            continue
        if first and line.strip() == "[":
            raise DataError(
                "the file is one JSON list, not an object a line",
                where=f"{file.shown}:{number}",
                fix="rename it to .json",
            )
        first = False
        with bad:
            row = [_parse_line(line, f"{file.shown}:{number}")]
            del line
            yield row.pop()  # a long row is held by its reader alone


def _parse_line(line: str, origin: str) -> Row:
    try:
        value = _DECODER.decode(line)  # unlike raw_decode, it takes blanks before the object and CRLF behind it
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            error.colno = error.pos + 1  # where the object goes on behind the line, the end of this line
        raise _json_fault(error, origin, origin) from error
    return _object(value, origin)


_BLANK = re.compile(r"[ \t\r\n]*")


def _read_json(file: DataFile, bad: BadRows) -> Iterator[Row]:
    """Yield a list of objects, or objects in sequence; parsed one by one, so that memory holds only the text."""
    text, shown = read_whole(file), file.shown
    line, counted, position = 1, 0, _skip_blank(text, 0)
    in_list = text.startswith("[", position)
    if in_list:
        position = _skip_blank(text, position + 1)
    while position < len(text):
        line, counted = line + text.count("\n", counted, position), position
        origin = f"{shown}:{line}"
        if in_list and text[position] == "]":
            if text[position + 1 :].strip():
                raise DataError(
                    "malformed JSON: something follows the list of rows",
                    where=origin,
                    fix="remove it, or write .jsonl, one row a line",
                )
            return
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            line_of_fault = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _json_fault(error, origin, f"{shown}:{line_of_fault}") from error
        try:
            row = _object(value, origin)
        except DataError as error:
            bad.report(error)
        else:
            yield row
        position = _skip_blank(text, position)
        if in_list:
            position = _next_item(text, position, shown)
    if in_list:
        raise DataError(
            "malformed JSON: the list of rows has no end",
            where=f"{shown}:{text.count(chr(10)) + 1}",
            fix="fetch or write the file anew: its end is missing",
        )


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _next_item(text: str, position: int, shown: str) -> int:
    """Return the position behind a list item: of the next item, or of the closing bracket."""
    if text.startswith(",", position):
        following = _skip_blank(text, position + 1)
        if not text.startswith("]", following):
            return following
    elif text.startswith("]", position) or position == len(text):
        return position
    line = text.count("\n", 0, position) + 1
    raise DataError(
        "malformed JSON: expected one ',' between rows",
        where=f"{shown}:{line}",
        fix="write one comma between two rows",
    )


def _read_csv(file: DataFile, bad: BadRows, delimiter: str | None = None) -> Iterator[Row]:
    """Yield the rows under a header line; a quoted cell may hold line breaks. Without a delimiter, find it."""
    # A long text in a cell is what this program is for; the csv module refuses 128 KiB unless told otherwise.
    csv.field_size_limit(min(sys.maxsize, MAX_LINE_BYTES))
    shown = file.shown
    lines = _CountedLines(iter_lines(file, bad))
    if delimiter is None:
        delimiter = _find_delimiter(lines.peek())
        if delimiter != ",":
            name = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}[delimiter]
            bad.notify(f"{shown}: the columns are separated by {name}")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        start = lines.next_number
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fix = "close the quote, or double quotes that belong to the text"
            raise DataError(f"malformed CSV: {error}", where=f"{shown}:{start}", fix=fix) from error
        origin = f"{shown}:{start}"
        if not cells:
            continue
        if header is None:
            header = _unique_columns(cells, origin)
            continue
        if len(cells) != len(header):
            number = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
            bad.report(
                DataError(
                    f"the row has {number}, the header has {len(header)} columns ({', '.join(header)})",
                    where=origin,
                    fix="quote cells that hold the separator or a line break",
                )
            )
            continue
        yield Row(origin, dict(zip(header, cells, strict=True)))


class _CountedLines:
    """Lines of text that remember the number of the next one; lines that were left out count."""

    def __init__(self, lines: Iterator[tuple[int, str]]) -> None:
        self._lines = lines
        self._waiting = next(lines, None)

    def __iter__(self) -> _CountedLines:
        return self

    def __next__(self) -> str:
        if self._waiting is None:
            raise StopIteration
        line = self._waiting[1]
        self._waiting = next(self._lines, None)
        return line

    @property
    def next_number(self) -> int:
        return self._waiting[0] if self._waiting is not None else 0

    def peek(self) -> str:
        return self._waiting[1] if self._waiting is not None else ""


_QUOTED = re.compile(r'"(?:[^"]|"")*"')


def _find_delimiter(header: str) -> str:
    """Return the delimiter of a header line: a comma, unless there is only another."""
    bare = _QUOTED.sub("", header)
    return next((mark for mark in (",", ";", "\t", "|") if mark in bare), ",")


def _unique_columns(names: Sequence[str], origin: str) -> list[str]:
    """Return the column names without blanks at their ends; raise if one appears twice."""
    columns = [name.strip() for name in names]
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(f"the column '{twice[0]}' appears twice", where=origin, fix="rename or remove one of the two")
    return columns


def _read_parquet(file: DataFile, bad: BadRows) -> Iterator[Row]:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    def batches(raw: Any) -> Iterator[Any]:
        with pq.ParquetFile(raw) as opened:
            _unique_columns(opened.schema_arrow.names, file.shown)
            yield from opened.iter_batches(batch_size=64)

    return _arrow_rows(file, batches, "Parquet")


def _read_arrow(file: DataFile, bad: BadRows) -> Iterator[Row]:
    """Yield the rows of an Arrow file or stream, such as ``datasets`` writes."""
    import pyarrow as pa

    def batches(raw: Any) -> Iterator[Any]:
        is_file = raw.read(6) == b"ARROW1"
        raw.seek(0)
        if is_file:
            with pa.ipc.open_file(raw) as opened:
                _unique_columns(opened.schema.names, file.shown)
                parts = (opened.get_batch(number) for number in range(opened.num_record_batches))
                yield from _slices(parts)
        else:
            with pa.ipc.open_stream(raw) as stream:
                _unique_columns(stream.schema.names, file.shown)
                yield from _slices(stream)

    return _arrow_rows(file, batches, "Arrow")


def _slices(batches: Any) -> Iterator[Any]:
    """Yield the rows of batches, 64 at a time, because rows as Python values take much more memory."""
    for batch in batches:
        batch.validate(full=True)  # offsets of a damaged file lead out of its memory
        for start in range(0, batch.num_rows, 64):
            yield batch.slice(start, 64)


def _arrow_rows(file: DataFile, batches: Callable[[Any], Iterator[Any]], kind: str) -> Iterator[Row]:
    """Yield the rows of Arrow batches; raise ``DataError`` if the file is damaged."""
    import pyarrow as pa

    number = 0
    try:
        with open_bytes(file, text=False) as raw:
            for batch in batches(raw):
                for columns in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield Row(f"{file.shown}:row {number}", without_nulls(columns))
    # pyarrow raises its own errors, Python's, and MemoryError for a size that a damaged file claims
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, KeyError, MemoryError) as error:
        where = f"{file.shown}:row {number + 1}" if number else file.shown
        fix = "fetch or write the file anew, or use .jsonl"
        raise DataError(f"not a readable {kind} file: {one_line(error, 200)}", where=where, fix=fix) from error


def one_line(error: BaseException, most: int) -> str:
    """Return the text of an error as a line of at most ``most`` characters; its class if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _read_text(file: DataFile, bad: BadRows) -> Iterator[Row]:
    """Yield the whole file as one document: a book is one long row, not as many rows as it has lines."""
    text = read_whole(file)
    if text.strip():
        yield Row(f"{file.shown}:1", {"text": text})


def _unpadded(read: Reader) -> Reader:
    """Return a reader that leaves out null arguments of tool calls if a table made them; the user is told.

    ``datasets`` keeps the arguments of all tool calls of a column in one struct, and ``to_json`` writes every key of it
    in every row. But a call may also say null itself. So nulls are left out only if all calls of a file have the same
    keys. A file with a null argument is read a second time to compare the keys.
    """

    def rows(file: DataFile, bad: BadRows) -> Iterator[Row]:
        padded: bool | None = None
        for row in read(file, bad):
            held = [row]  # a long row is held by its reader alone
            del row
            if any(map(_has_null, _arguments(held[0].columns))):
                if padded is None:
                    padded = _have_same_keys(read(file, BadRows("skip", sys.maxsize)))
                    bad.notify(f"{file.shown}: {_PADDED if padded else _NULL}")
                if padded:
                    _leave_out_nulls(held[0].columns)
            yield held.pop()

    return rows


_PADDED = (
    "arguments of tool calls that are null are left out: all calls have the same keys, as a table fills them up; write "
    "arguments as JSON text to keep a null"
)
_NULL = (
    "arguments of tool calls that are null are trained as null: the calls of the file have different keys, so no table "
    "filled them up"
)


def _arguments(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a row's tool calls that are objects."""
    for messages in columns.values():
        for message in messages if isinstance(messages, list) else ():
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            for call in calls if isinstance(calls, list) else ():
                function = call.get("function") or call if isinstance(call, dict) else None
                found = function.get("arguments") if isinstance(function, dict) else None
                if isinstance(found, dict):
                    yield found


def _has_null(value: Any) -> bool:
    """Return True if a key of an object is null, at any depth."""
    if isinstance(value, dict):
        return any(item is None or _has_null(item) for item in value.values())
    return isinstance(value, list) and any(map(_has_null, value))


def _have_same_keys(rows: Iterator[Row]) -> bool:
    """Return True if there are several calls, and the objects at each place of their arguments have the same keys."""
    keys: dict[tuple[str, ...], frozenset[str]] = {}
    count = 0
    for row in rows:
        for arguments in _arguments(row.columns):
            count += 1
            if not _agrees(arguments, (), keys):
                return False
    return count > 1


def _agrees(value: Any, place: tuple[str, ...], keys: dict[tuple[str, ...], frozenset[str]]) -> bool:
    """Return True if the objects of a value have the keys known at their place; unknown places are added."""
    if isinstance(value, list):
        return all(_agrees(item, (*place, "[]"), keys) for item in value)
    if not isinstance(value, dict):
        return True
    same = keys.setdefault(place, frozenset(value)) == value.keys()
    return same and all(_agrees(item, (*place, name), keys) for name, item in value.items())


def _leave_out_nulls(columns: Mapping[str, Any]) -> None:
    for arguments in _arguments(columns):
        left = without_nulls(arguments)
        arguments.clear()
        arguments.update(left)


READERS: dict[str, Reader] = {
    ".jsonl": _unpadded(_read_jsonl),
    ".ndjson": _unpadded(_read_jsonl),
    ".json": _unpadded(_read_json),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".txt": _read_text,
    ".md": _read_text,
}
