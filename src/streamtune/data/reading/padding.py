"""Nulls in rows of JSON that a table's columns made: keys that a call never had, written out.

``datasets`` keeps the arguments of all tool calls of a column in one struct, and ``to_json`` writes every key of it in
every row. A null may also be what a call says. So nulls are left out where all calls of a file have the same keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from streamtune.data.faults import BadRows
from streamtune.data.reading.cells import without_nulls
from streamtune.data.reading.files import DataFile


class _HasColumns(Protocol):
    @property
    def columns(self) -> dict[str, Any]: ...


RowT = TypeVar("RowT", bound=_HasColumns)
Reader = Callable[[DataFile, BadRows], Iterator[RowT]]


def unpadded(read: Reader[RowT]) -> Reader[RowT]:
    """Return a reader that leaves out null arguments of tool calls where a table made them; the user is told.

    A file that has a null argument is read a second time, to compare the keys of its calls.
    """

    def rows(file: DataFile, bad: BadRows) -> Iterator[RowT]:
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
    """Yield the arguments of all tool calls in a row's messages that are objects."""
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


def _have_same_keys(rows: Iterator[_HasColumns]) -> bool:
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
    """Return True if the objects of a value have the keys that are known at their place; unknown ones are added."""
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
