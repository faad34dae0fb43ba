"""Datasets on the hub, or in the local hub cache, through the ``datasets`` library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamtune.data.reading.cells import without_nulls
from streamtune.data.reading.readers import Row
from streamtune.errors import DataError, did_you_mean


def hub_rows(name: str, config: str | None, split: str, where: str, *, streamed: bool = False) -> Iterator[Row]:
    """Yield the rows of a dataset; see :func:`load_hub`.

    Raises:
        DataError: It cannot be loaded, or the hub cannot be read from any further.
    """
    shown, number = f"{name}[{split}]", 0
    rows = iter(load_hub(name, config, split, where, streamed=streamed))
    while True:
        try:
            columns = next(rows)
        except StopIteration:
            return
        except Exception as error:  # of a stream the network's, and the library's own for a damaged file
            raise DataError(
                f"cannot read on in the dataset '{name}': {_first_line(error)}",
                where=f"{shown}:row {number + 1}",
                mend="check access and the network, and start again: the run goes on from its last checkpoint",
            ) from error
        number += 1
        yield Row(f"{shown}:row {number}", without_nulls(columns))


def load_hub(name: str, config: str | None, split: str, where: str, *, streamed: bool = False) -> Any:
    """Return a ``datasets.Dataset``: from the hub the first time, then from the library's cache.

    The library runs no script of a dataset since its version 4, which this package requires.

    Args:
        name: ``name`` or ``owner/name``.
        config: Its configuration, or None.
        split: The split.
        where: The place that an error names.
        streamed: Return an ``IterableDataset``, which reads from the hub and keeps nothing.

    Raises:
        DataError: It cannot be loaded.
    """
    import datasets

    _refuse_formats(name, where)
    with _quiet_without_terminal():
        try:
            return datasets.load_dataset(name, config, split=split, streaming=streamed)
        except Exception as error:  # the library raises its own, the network's and the builder script's errors
            raise _cannot_load(name, config, split, error, where) from error


def _cannot_load(name: str, config: str | None, split: str, error: Exception, where: str) -> DataError:
    """Return the error of a dataset that is not loaded; it lists the splits where only the split is wrong."""
    import datasets

    if isinstance(error, ValueError) and "split" in str(error):
        try:
            splits = datasets.get_dataset_split_names(name, config)
        except Exception:  # whatever it is, the first error is the better one
            splits = []
        if splits and split not in splits:
            what = f"'{name}' has no split '{split}'; it has {', '.join(splits)}"
            return DataError(what, where=where, mend=did_you_mean(split, splits) or f"write split: {splits[0]}")
    return DataError(
        f"cannot load the dataset '{name}': {_first_line(error)}",
        where=where,
        mend="it is no local file; for the hub, check its name, 'name' and 'split', access and the network",
    )


def _refuse_formats(name: str, where: str) -> None:
    """Raise if the path names a file format, for which ``datasets`` would read files of the working directory."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    if name in _PACKAGED_DATASETS_MODULES or "::" in name:
        raise DataError(
            f"'{name}' is a file format of the datasets library, not a dataset",
            where=where,
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
