"""Sources of rows: local files and folders, the hub, and the built-in data sets."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from streamtune.data.builtin import (
    ARITHMETIC_PATH,
    PREFERENCES_PATH,
    STDLIB_PATH,
    TASKS,
    arithmetic_rows,
    preference_rows,
    stdlib_rows,
)
from streamtune.data.passkey import PASSKEY_PATH, passkey_rows
from streamtune.data.readers import READERS, Row, format_of, read_file, without_nulls
from streamtune.errors import DataError, did_you_mean

__all__ = ["Source", "read_rows", "typed_rows", "with_progress"]


READ_BY = {
    "messages": "streamtune sft and grpo",
    **dict.fromkeys(("sharegpt", "prompt_completion", "alpaca", "text"), "streamtune sft"),
    **dict.fromkeys(("preference", "unpaired"), "streamtune dpo"),
    "prompts": "streamtune grpo",
}
"""Row type -> the commands that read it, for the error of the others."""


@dataclass(frozen=True)
class Source:
    """One entry of a recipe's ``datasets``."""

    path: str
    """a file, a folder or a glob of files, a dataset on the hub, or one of :data:`BUILT_IN`"""
    type: str = "auto"
    """``auto``; ``messages``, ``prompt_completion``, ``text``, ``alpaca`` or ``sharegpt``; ``preference`` or
    ``unpaired``; ``prompts``"""
    split: str = "train"
    """split of a dataset on the hub"""
    name: str | None = None
    """configuration of a dataset on the hub, or the task of ``demo-arithmetic``"""
    max_rows: int | None = None
    """use the first so many rows"""
    where: str = ""
    """place of this entry in the recipe, ``file:line``; named when the path is wrong"""

    @property
    def place(self) -> str:
        """Return the place that an error names: ``where``, or the path of a source that no recipe names."""
        return self.where or self.path


def read_rows(source: Source) -> Iterator[Row]:
    """Read the rows of a source, ``max_rows`` of them at most.

    Raises:
        DataError: There is no such file or dataset, it holds no row, or one of its rows is malformed.
    """
    empty = True
    for row in islice(_all_rows(source), source.max_rows):
        empty = False
        yield row
    if empty:
        raise DataError(f"'{source.path}' has no rows", where=source.place)


def typed_rows(
    sources: Sequence[Source],
    known: Sequence[str],
    detect: Callable[[Row], str],
    notify: Callable[[str], None],
) -> Iterator[tuple[Row, str]]:
    """Yield every row of every source with its type: the one its source names, or that of the source's first row.

    Args:
        sources: Where the rows come from, in order.
        known: The types a source may name, besides ``auto``.
        detect: Returns the type a row looks like.
        notify: Called with the type that was detected, source by source.

    Raises:
        DataError: As :func:`read_rows` and ``detect``, or a source names a type that is not known.
    """
    for source in sources:
        row_type = source.type
        if row_type not in ("auto", *known):
            reader = READ_BY.get(row_type)
            raise DataError(
                f"rows of type '{row_type}' are read by {reader}" if reader else f"unknown row type '{row_type}'",
                where=source.place,
                mend=f"{'here ' if reader else ''}use {', '.join(('auto', *known))}",
            )
        for row in read_rows(source):
            if row_type == "auto":
                row_type = detect(row)
                if source.path not in BUILT_IN:
                    notify(f"{source.path}: rows look like '{row_type}'")
            yield row, row_type


def _all_rows(source: Source) -> Iterator[Row]:
    if source.path in BUILT_IN:
        _check_choices(source, tuple(TASKS) if source.path == ARITHMETIC_PATH else ())
        yield from BUILT_IN[source.path](source)
        return
    try:
        files = _local_files(source)
    except OSError as error:
        raise DataError(f"cannot look at '{source.path}': {error.strerror or error}", where=source.place) from error
    if files is None:
        yield from _hub_rows(source)
    else:
        for path, shown in files:
            yield from read_file(path, shown)


def _check_choices(source: Source, names: Sequence[str]) -> None:
    """Check the split and the part that a source names of a built-in dataset.

    Raises:
        DataError: It has no such split or no such part.
    """
    if source.split != "train":
        raise DataError(
            f"'{source.path}' is built in and has no split '{source.split}'",
            where=source.place,
            mend="leave out 'split'; hold rows out with val_size",
        )
    if source.name is not None and source.name not in names:
        mend = did_you_mean(source.name, names) or (f"use {', '.join(names)}" if names else "leave out 'name'")
        raise DataError(f"'{source.path}' is built in and has no part '{source.name}'", where=source.place, mend=mend)


def _local_files(source: Source) -> list[tuple[Path, str]] | None:
    """Return the files of a source, each with the name to show; None if it can only be a dataset on the hub.

    Raises:
        DataError: The path looks like a file and there is none.
    """
    path = Path(source.path).expanduser()
    if path.is_file():
        files = [(path, source.path)]
    elif path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file() and format_of(file) in READERS)
        files = [(file, str(file)) for file in inside]
        if not files:
            raise DataError(
                f"the folder '{source.path}' holds no data file",
                where=source.place,
                mend=f"it may hold {', '.join(READERS)}",
            )
    elif re.search(r"[*?\[]", source.path):
        files = [(file, str(file)) for file in sorted(_glob(path)) if file.is_file()]
        if not files:
            raise DataError(f"no file matches '{source.path}'", where=source.place)
    elif _looks_like_hub_name(source.path):
        return None
    else:
        raise DataError(f"there is no file '{source.path}'", where=source.place, mend=_nearest(path))
    if source.split != "train" or source.name is not None:
        raise DataError(
            f"'{source.path}' is local: a local file has no split and no configuration",
            where=source.place,
            mend="leave out 'split' and 'name'; hold rows out with val_size",
        )
    return files


def _glob(pattern: Path) -> Iterator[Path]:
    """Return the paths that match a pattern, which may be absolute."""
    anchor = Path(pattern.anchor) if pattern.is_absolute() else Path()
    return anchor.glob(str(pattern.relative_to(anchor) if pattern.is_absolute() else pattern))


def _looks_like_hub_name(path: str) -> bool:
    """Return True if ``path`` can be ``name`` or ``owner/name`` on the hub and is no file name of a known format."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path)) and format_of(Path(path)) not in READERS


def _nearest(path: Path) -> str:
    """Return a hint at the existing file or folder the user may have meant."""
    folder = path.parent
    if not folder.is_dir():
        existing = next((parent for parent in folder.parents if parent.is_dir()), Path())
        missing = folder.relative_to(existing).parts[0] if folder != existing else str(folder)
        hint = did_you_mean(missing, (child.name for child in existing.iterdir() if child.is_dir()))
        return f"there is no folder '{missing}' in '{existing.resolve()}'" + (f"; {hint}" if hint else "")
    return did_you_mean(path.name, (file.name for file in folder.iterdir())) or f"look in '{folder.resolve()}'"


def _hub_rows(source: Source) -> Iterator[Row]:
    """Yield the rows of a dataset on the hub (or in the local hub cache), through the ``datasets`` library.

    The library runs no script of a dataset since its version 4, which this package requires.
    """
    import datasets

    _refuse_formats(source)

    with _quiet_without_terminal():
        try:
            loaded = datasets.load_dataset(source.path, source.name, split=source.split)
        except Exception as error:  # the library raises its own, the network's and the builder script's errors
            raise DataError(
                f"cannot load the dataset '{source.path}': {_first_line(error)}",
                where=source.place,
                mend="it is no local file; for the hub, check its name, 'name' and 'split', access and the network",
            ) from error
    shown = f"{source.path}[{source.split}]"
    for number, columns in enumerate(loaded, start=1):
        yield Row(f"{shown}:row {number}", without_nulls(columns))


def _refuse_formats(source: Source) -> None:
    """Raise if the path names a file format, for which ``datasets`` would read files of the working directory."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    if source.path in _PACKAGED_DATASETS_MODULES or "::" in source.path:
        raise DataError(
            f"'{source.path}' is a file format of the datasets library, not a dataset",
            where=source.place,
            mend="name the file itself",
        )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def _quiet_without_terminal() -> Iterator[Any]:
    """Switch the ``datasets`` progress bars off while stderr is no terminal."""
    import datasets

    if sys.stderr.isatty() or not datasets.is_progress_bar_enabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


BUILT_IN: dict[str, Callable[[Source], Iterator[Row]]] = {
    STDLIB_PATH: lambda source: stdlib_rows(max_rows=source.max_rows),
    PREFERENCES_PATH: lambda source: preference_rows(max_rows=source.max_rows),
    ARITHMETIC_PATH: lambda source: arithmetic_rows(task=source.name, max_rows=source.max_rows),
    PASSKEY_PATH: lambda source: passkey_rows(max_rows=source.max_rows),
}
"""Datasets that every machine has, by the path that names them."""


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
