"""Sources of rows: local files and folders, the hub, and the built-in data sets."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar

from streamtune.data.faults import BadRows
from streamtune.data.reading.builtin import (
    ARITHMETIC_PATH,
    PASSKEY_PATH,
    PREFERENCES_PATH,
    STDLIB_PATH,
    TASKS,
    arithmetic_rows,
    passkey_rows,
    preference_rows,
    stdlib_rows,
)
from streamtune.data.reading.cells import column_names
from streamtune.data.reading.data_paths import hub_rows, is_address, local_files, remote_files
from streamtune.data.reading.files import DataFile
from streamtune.data.reading.readers import Row, read_data_file
from streamtune.errors import DataError, did_you_mean

READ_BY = {
    "messages": "streamtune sft and grpo",
    **dict.fromkeys(("sharegpt", "prompt_completion", "alpaca", "text"), "streamtune sft"),
    **dict.fromkeys(("preference", "unpaired"), "streamtune dpo"),
    "prompts": "streamtune grpo",
}
"""Row type -> the commands that read it, for an error of other commands."""


class SourceWatch(Protocol):
    """Compares the files of a source that is read again with the files that were read first."""

    def listed(self, source: Source, files: Sequence[DataFile]) -> None:
        """Compare the list of files; raise ``DataError`` if it differs."""
        ...

    def opens(self, source: Source, file: DataFile) -> None:
        """Compare the file that is read next; raise ``DataError`` if it differs."""
        ...


@dataclass(frozen=True)
class Source:
    """An entry of a recipe's ``datasets``."""

    path: str
    """a file, a folder or a glob of files, an address, a dataset on the hub, or one of :data:`BUILT_IN`"""
    type: str = "auto"
    """``auto``; ``messages``, ``prompt_completion``, ``text``, ``alpaca`` or ``sharegpt``; ``preference`` or
    ``unpaired``; ``prompts``"""
    split: str = "train"
    """split of a folder or of a dataset on the hub"""
    name: str | None = None
    """configuration of a dataset on the hub, or the task of ``demo-arithmetic``"""
    input_separator: str = "\n\n"
    """text between ``instruction`` and ``input`` of an alpaca row"""
    columns: Mapping[str, str] | None = None
    """name of a column here -> its name in the files"""
    max_rows: int | None = None
    """most rows to use"""
    shuffle: bool = False
    """draw ``max_rows`` among all rows by the seed instead of taking the first; they stay in their order"""
    repeat: int = 1
    """visits of each training row in an epoch"""
    weight: float | None = None
    """share of an epoch, relative to the other sources' weights; None if no source has a weight"""
    mix_by: str = "rows"
    """unit of that share, of all sources: ``rows`` or ``tokens``"""
    evaluates: str | None = None
    """name of the eval set of the rows; None trains on them. Sources of eval sets come last"""
    seed: int = 42
    """seed of ``shuffle``"""
    watch: SourceWatch | None = None
    """compares the files of streamed rows before they are read"""
    streamed: bool = False
    """read a dataset on the hub row by row, without keeping a copy"""
    where: str = ""
    """place of this entry in the recipe, ``file:line``, for errors"""

    @property
    def place(self) -> str:
        """Place that an error names: ``where``, or the path of a source that no recipe names."""
        return self.where or self.path


def read_rows(source: Source, bad: BadRows | None = None) -> Iterator[Row]:
    """Read the rows of a source, at most ``max_rows``, with the columns renamed.

    Args:
        bad: Receives malformed rows and messages for the user; without it the first malformed row raises.
    """
    bad = bad or BadRows()
    empty, before = True, bad.count
    for row in _renamed(_drawn(source, bad), source, bad):
        empty = False
        yield row if row.separator == source.input_separator else replace(row, separator=source.input_separator)
    if empty and bad.count == before:
        raise DataError(f"'{source.path}' has no rows", where=source.place)


def _drawn(source: Source, bad: BadRows) -> Iterator[Row]:
    """Yield the rows of a source: all, the first ones, or rows drawn by the seed."""
    if not source.shuffle or source.max_rows is None:
        yield from islice(_all_rows(source, bad), source.max_rows)
        return
    # Read twice: the first time to count, so that memory holds one row at a time.
    everything = replace(source, max_rows=None)
    silent = BadRows("skip", sys.maxsize)
    count = sum(1 for _ in _all_rows(everything, silent))
    chosen = set(random.Random(source.seed).sample(range(count), min(count, source.max_rows)))
    for number, row in enumerate(_all_rows(everything, bad)):
        if number in chosen:
            yield row


def _renamed(rows: Iterable[Row], source: Source, bad: BadRows) -> Iterator[Row]:
    """Yield the rows with columns renamed by ``columns``; raise ``DataError`` if the first row lacks a named column."""
    if not source.columns:
        yield from rows
        return
    theirs = set(source.columns.values())
    for number, row in enumerate(rows):
        missing = sorted(theirs - row.columns.keys())
        if missing:
            what = f"'columns' names '{missing[0]}', which is no column of the row: it has {column_names(row.columns)}"
            fix = did_you_mean(missing[0], row.columns) or "name one of these"
            if number == 0:
                raise DataError(f"{what} ({row.origin})", where=source.place, fix=fix)
            bad.report(DataError(what, where=row.origin, fix=fix))
            continue
        hidden = [name for name in source.columns if name in row.columns and name not in theirs]
        if hidden and number == 0:
            bad.notify(f"{source.path}: the column '{hidden[0]}' is not read, 'columns' puts another in its place")
        kept = {name: value for name, value in row.columns.items() if name not in theirs}
        yield Row(row.origin, {**kept, **{ours: row.columns[name] for ours, name in source.columns.items()}})


def typed_rows(
    sources: Sequence[Source],
    known: Sequence[str],
    detect: Callable[[Row], str],
    bad: BadRows,
) -> Iterator[tuple[Row, str]]:
    """Yield every row with its type: the type that its source names, or the type detected from the source's first row.

    Args:
        known: Types that a source may name, besides ``auto``.
        bad: Receives malformed rows, and is notified of each detected type.
    """
    for source in sources:
        row_type = source.type
        if row_type not in ("auto", *known):
            reader = READ_BY.get(row_type)
            raise DataError(
                f"rows of type '{row_type}' are read by {reader}" if reader else f"unknown row type '{row_type}'",
                where=source.place,
                fix=f"{'here ' if reader else ''}use {', '.join(('auto', *known))}",
            )
        for row in read_rows(source, bad):
            if row_type == "auto":
                try:
                    row_type = detect(row)
                except DataError as error:
                    bad.report_first(error)
                    continue
                if source.path not in BUILT_IN:
                    bad.notify(f"{source.path}: rows look like '{row_type}'")
            yield row, row_type


def _all_rows(source: Source, bad: BadRows) -> Iterator[Row]:
    if source.path in BUILT_IN:
        _check_choices(source, tuple(TASKS) if source.path == ARITHMETIC_PATH else ())
        yield from BUILT_IN[source.path](source)
        return
    find = remote_files if is_address(source.path) else local_files
    try:
        found = find(source.path, split=source.split, config=source.name, where=source.place)
    except OSError as error:
        raise DataError(f"cannot look at '{source.path}': {error.strerror or error}", where=source.place) from error
    if found is None:
        yield from hub_rows(source.path, source.name, source.split, source.place, streamed=source.streamed)
        return
    files, folder = found
    if folder is not None:
        bad.notify(f"{source.path}: split '{source.split}' is {_listed(folder.names)}")
        if folder.left_out:
            bad.notify(f"{source.path}: not read: {_listed(folder.left_out)}")
    if source.watch is not None:
        source.watch.listed(source, files)
    for file in files:
        if source.watch is not None:
            source.watch.opens(source, file)
        yield from read_data_file(file, bad)


MOST_LISTED = 20
"""Most files that a message lists by name."""


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_LISTED
    return ", ".join(names[:MOST_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def _check_choices(source: Source, names: Sequence[str]) -> None:
    if source.split != "train":
        raise DataError(
            f"'{source.path}' is built in and has no split '{source.split}'",
            where=source.place,
            fix="leave out 'split'; hold rows out with val_size",
        )
    if source.name is not None and source.name not in names:
        fix = did_you_mean(source.name, names) or (f"use {', '.join(names)}" if names else "leave out 'name'")
        raise DataError(f"'{source.path}' is built in and has no part '{source.name}'", where=source.place, fix=fix)


BUILT_IN: dict[str, Callable[[Source], Iterator[Row]]] = {
    STDLIB_PATH: lambda source: stdlib_rows(max_rows=source.max_rows),
    PREFERENCES_PATH: lambda source: preference_rows(max_rows=source.max_rows),
    ARITHMETIC_PATH: lambda source: arithmetic_rows(task=source.name, max_rows=source.max_rows),
    PASSKEY_PATH: lambda source: passkey_rows(max_rows=source.max_rows),
}
"""Path that names a built-in dataset -> its rows."""


Item = TypeVar("Item")


def with_progress(items: Iterable[Item]) -> Iterator[Item]:
    """Pass rows through, with a live count on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("tokenising, {task.completed:,} rows"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rows", total=None)
        for item in items:
            yield item
            progress.advance(task)
