"""Read the rows of a recipe's datasets: local files and folders, URLs, the Hugging Face Hub, and built-in datasets."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar

from streamtune.data.bad_rows import BadRows
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
from streamtune.data.reading.data_paths import find_local_files, find_remote_files, hub_rows, is_url
from streamtune.data.reading.files import DataFile
from streamtune.data.reading.pages import PAGES_PATH, page_rows
from streamtune.data.reading.readers import Row, read_data_file
from streamtune.errors import DataError, did_you_mean

READ_BY = {
    "messages": "streamtune sft and grpo",
    **dict.fromkeys(("sharegpt", "prompt_completion", "alpaca", "text"), "streamtune sft"),
    **dict.fromkeys(("preference", "unpaired"), "streamtune dpo"),
    "prompts": "streamtune grpo",
}
"""Row type -> the commands that read it, for the error of other commands."""


class SourceWatch(Protocol):
    """Checks that the files of a source have not changed since they were first read."""

    def check_listing(self, source: Source, files: Sequence[DataFile]) -> None:
        """Raise ``DataError`` if the source's list of files has changed since the first reading."""
        ...

    def check_file(self, source: Source, file: DataFile) -> None:
        """Raise ``DataError`` if a file that is about to be opened has changed since the first reading."""
        ...


@dataclass(frozen=True)
class Source:
    """A dataset to read: one entry of a recipe's ``datasets``.

    Example:
        >>> Source("rows.jsonl", type="messages", max_rows=100).type
        'messages'
    """

    path: str
    """file, folder, glob pattern, URL, dataset on the Hugging Face Hub, or key of :data:`BUILT_IN`"""
    type: str = "auto"
    """row type: ``auto``, ``messages``, ``prompt_completion``, ``text``, ``alpaca``, ``sharegpt``, ``preference``,
    ``unpaired`` or ``prompts``"""
    split: str = "train"
    """split of a folder or of a dataset on the Hugging Face Hub"""
    name: str | None = None
    """configuration of a dataset on the Hugging Face Hub, or the task if the dataset is ``demo-arithmetic``"""
    input_separator: str = "\n\n"
    """text between ``instruction`` and ``input`` of a row of type ``alpaca``"""
    columns: Mapping[str, str] | None = None
    """column name of the row type -> name of the column in the files"""
    max_rows: int | None = None
    """maximum number of rows to use"""
    shuffle: bool = False
    """True draws ``max_rows`` rows at random from all rows, in file order; False takes the first rows"""
    repeat: int = 1
    """number of times that an epoch visits each training row"""
    weight: float | None = None
    """share of an epoch, relative to the other sources' weights; None if no source has a weight"""
    mix_by: str = "rows"
    """unit of the shares of all sources: ``rows`` or ``tokens``"""
    evaluates: str | None = None
    """name of the eval set to which the rows belong; None for training rows. Sources of eval sets come last"""
    seed: int = 42
    """seed of ``shuffle``"""
    watch: SourceWatch | None = None
    """object that checks that files of streamed rows have not changed"""
    streamed: bool = False
    """True reads a dataset on the Hugging Face Hub row by row and stores no copy"""
    where: str = ""
    """place of this entry in the recipe, ``file:line``, for error messages"""

    @property
    def place(self) -> str:
        """Place for error messages: the entry in the recipe, or the path if the source is not from a recipe."""
        return self.where or self.path


def read_rows(source: Source, bad: BadRows | None = None) -> Iterator[Row]:
    """Yield the rows of a source, at most ``max_rows``, with columns renamed by ``source.columns``.

    Args:
        bad: Object that collects malformed rows and shows messages; None raises the error of the first malformed row.

    Raises:
        DataError: A file is missing or cannot be read, or there are no rows.
    """
    bad = bad or BadRows()
    empty, before = True, bad.count
    for row in _rename_columns(_select_rows(source, bad), source, bad):
        empty = False
        yield row if row.separator == source.input_separator else replace(row, separator=source.input_separator)
    if empty and bad.count == before:
        raise DataError(f"'{source.path}' has no rows", where=source.place, fix="add rows, or remove the dataset")


def _select_rows(source: Source, bad: BadRows) -> Iterator[Row]:
    """Yield all rows of a source, its first ``max_rows`` rows, or with ``shuffle`` a random sample of ``max_rows``
    rows.
    """
    if not source.shuffle or source.max_rows is None:
        yield from islice(_read_source(source, bad), source.max_rows)
        return
    # Read twice, first to count the rows: so memory holds only one row at a time.
    all_rows = replace(source, max_rows=None)
    silent = BadRows("skip", sys.maxsize)
    count = sum(1 for _ in _read_source(all_rows, silent))
    chosen = set(random.Random(source.seed).sample(range(count), min(count, source.max_rows)))
    for number, row in enumerate(_read_source(all_rows, bad)):
        if number in chosen:
            yield row


def _rename_columns(rows: Iterable[Row], source: Source, bad: BadRows) -> Iterator[Row]:
    """Yield the rows with columns renamed by ``source.columns``.

    Raises:
        DataError: The first row lacks a column to rename. A later row without such a column is reported to ``bad``
            instead.
    """
    if not source.columns:
        yield from rows
        return
    theirs = set(source.columns.values())
    for number, row in enumerate(rows):
        missing = sorted(theirs - row.columns.keys() - set(row.null_columns))
        if missing:
            names = dict.fromkeys((*row.columns, *row.null_columns))
            what = f"'columns' refers to '{missing[0]}', but the row has {column_names(names)}"
            fix = did_you_mean(missing[0], names) or "use one of these names"
            if number == 0:
                raise DataError(f"{what} ({row.origin})", where=source.place, fix=fix)
            bad.report(DataError(what, where=row.origin, fix=fix))
            continue
        hidden = [name for name in source.columns if name in row.columns and name not in theirs]
        if hidden and number == 0:
            bad.notify(f"{source.path}: the column '{hidden[0]}' is ignored: 'columns' renames another column to it")
        kept = {name: value for name, value in row.columns.items() if name not in (*theirs, *source.columns)}
        renamed = {ours: row.columns[name] for ours, name in source.columns.items() if name in row.columns}
        yield replace(row, columns={**kept, **renamed}, null_columns=())


def typed_rows(
    sources: Sequence[Source],
    allowed_types: Sequence[str],
    detect_type: Callable[[Row], str],
    bad: BadRows,
) -> Iterator[tuple[Row, str]]:
    """Yield every row of the sources with its row type.

    The type is the source's ``type``. With ``auto``, the type is detected from the source's first row.

    Args:
        allowed_types: Types that a source may have, besides ``auto``.
        detect_type: Function that returns the type of a row.
        bad: Object that collects malformed rows, and tells the user each detected type.

    Raises:
        DataError: A source has a type that is not in ``allowed_types``, or cannot be read.
    """
    for source in sources:
        row_type = source.type
        if row_type not in ("auto", *allowed_types):
            reader = READ_BY.get(row_type)
            raise DataError(
                f"rows of type '{row_type}' are for {reader}, not for this command"
                if reader
                else f"unknown row type '{row_type}'",
                where=source.place,
                fix=f"{'with this command, ' if reader else ''}use {', '.join(('auto', *allowed_types))}",
            )
        for row in read_rows(source, bad):
            if row_type == "auto":
                try:
                    row_type = detect_type(row)
                except DataError as error:
                    bad.report_repeating_error(error)
                    continue
                if source.path not in BUILT_IN:
                    bad.notify(f"{source.path}: detected row type '{row_type}'")
            yield row, row_type


def _read_source(source: Source, bad: BadRows) -> Iterator[Row]:
    if source.path in BUILT_IN:
        _check_built_in(source, tuple(TASKS) if source.path == ARITHMETIC_PATH else ())
        yield from BUILT_IN[source.path](source)
        return
    find = find_remote_files if is_url(source.path) else find_local_files
    try:
        found = find(source.path, split=source.split, config=source.name, where=source.place)
    except OSError as error:
        raise DataError(
            f"cannot access '{source.path}': {error.strerror or error}",
            where=source.place,
            fix="check the path and its permissions",
        ) from error
    if found is None:
        yield from hub_rows(source.path, source.name, source.split, source.place, streamed=source.streamed)
        return
    files, folder = found
    if folder is not None:
        which = f"files of split '{source.split}'" if folder.hidden is None else "files that match"
        bad.notify(f"{source.path}: {which}: {_join_names(folder.names)}")
        if folder.left_out:
            bad.notify(f"{source.path}: files not read: {_join_names(folder.left_out)}")
        if folder.missing:
            bad.notify(f"{source.path}: files missing, a download may be incomplete: {_join_names(folder.missing)}")
        if folder.hidden:
            bad.notify(f"{source.path}: hidden files not read: {_join_names(folder.hidden)}")
    if source.watch is not None:
        source.watch.check_listing(source, files)
    for file in files:
        if source.watch is not None:
            source.watch.check_file(source, file)
        folder_of_file = None if file.path is None else file.path.parent
        for row in read_data_file(file, bad):
            yield replace(row, folder=folder_of_file)


MOST_LISTED = 20
"""Maximum number of files that a message lists by name."""


def _join_names(names: Sequence[str]) -> str:
    more = len(names) - MOST_LISTED
    return ", ".join(names[:MOST_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def _check_built_in(source: Source, names: Sequence[str]) -> None:
    if source.split != "train":
        raise DataError(
            f"the built-in dataset '{source.path}' has only the split 'train', found '{source.split}'",
            where=source.place,
            fix="remove 'split'; to hold rows out, set val_size",
        )
    if source.name is not None and source.name not in names:
        fix = did_you_mean(source.name, names) or (f"use {', '.join(names)}" if names else "remove 'name'")
        raise DataError(
            f"the built-in dataset '{source.path}' has no configuration '{source.name}'", where=source.place, fix=fix
        )


BUILT_IN: dict[str, Callable[[Source], Iterator[Row]]] = {
    STDLIB_PATH: lambda source: stdlib_rows(max_rows=source.max_rows),
    PREFERENCES_PATH: lambda source: preference_rows(max_rows=source.max_rows),
    ARITHMETIC_PATH: lambda source: arithmetic_rows(task=source.name, max_rows=source.max_rows),
    PASSKEY_PATH: lambda source: passkey_rows(max_rows=source.max_rows),
    PAGES_PATH: lambda source: page_rows(max_rows=source.max_rows),
}
"""Name of a built-in dataset -> function that yields its rows."""


Item = TypeVar("Item")


def with_progress(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, and show their current number on stderr if it is a terminal."""
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
